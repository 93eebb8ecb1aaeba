"""What ranks tell each other: small things."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint import Ranks
from lockstep.trainer import Trainer


@pytest.fixture
def one_rank_of_a_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A gloo group of this process; sizes in bytes of all objects that go through it."""
    sizes: list[int] = []
    gather = dist.gather_object

    def weighed(value: object, *args: object, **kwargs: object) -> None:
        sizes.append(len(pickle.dumps(value)))
        gather(value, *args, **kwargs)

    monkeypatch.setattr(dist, "gather_object", weighed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield sizes
    dist.destroy_process_group()


def test_each_rank_keeps_what_it_agreed_on(one_rank_of_a_group: list[int]) -> None:
    value = torch.zeros(1000)
    assert Ranks().run("nothing was done", lambda: value) is value
    assert max(one_rank_of_a_group) < 100


def test_a_save_sends_no_tensors(one_rank_of_a_group: list[int], tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    trainer = Trainer(model, loss_fn=nn.MSELoss(), batch_size=1, max_steps=2)
    trainer.training_step((torch.ones(1, 300), torch.zeros(1, 300)))
    trainer.save_checkpoint(tmp_path)
    assert 0 < sum(one_rank_of_a_group) < 100_000, "the state has 3 MB"
