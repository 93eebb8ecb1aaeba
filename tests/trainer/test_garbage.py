"""Collections in a run look at what the run makes, not at all that was imported before it."""

import gc

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.trainer import Trainer


def test_what_was_there_is_left_alone_while_steps_are_taken() -> None:
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    trainer = Trainer(nn.Linear(4, 1), loss_fn=nn.MSELoss(), batch_size=4, max_steps=2)
    before = gc.get_freeze_count()
    for _ in trainer.steps(data):
        assert gc.get_freeze_count() > before + 100_000, "torch alone has more objects"
    assert gc.get_freeze_count() == 0
