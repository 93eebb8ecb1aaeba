"""Collections in a run look at what the run makes, not at all that was imported before it."""

import subprocess
import sys

PROGRAM = """
import gc, torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep.trainer import Trainer

data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
trainer = Trainer(nn.Linear(4, 1), loss_fn=nn.MSELoss(), batch_size=4, max_steps=2)
print(*[gc.get_freeze_count() for _ in trainer.steps(data)], gc.get_freeze_count())
"""


def test_what_was_there_is_left_alone_while_steps_are_taken() -> None:
    """In a process of its own: in one that runs other tests, a run of theirs may still be open."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, second, afterwards = map(int, done.stdout.splitlines()[-1].split())
    assert min(first, second) > 100_000, "torch alone has more objects"
    assert afterwards == 0
