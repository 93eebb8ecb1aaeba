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


class Sent:
    """The collectives of objects that were called, and the bytes that each sent."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sizes: list[int] = []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """A gloo group of this process, whose collectives of objects are noted."""
    noted = Sent()

    def note(name: str, position: int) -> None:
        call = getattr(dist, name)

        def noting(*args: object, **kwargs: object) -> None:
            noted.calls.append(name)
            noted.sizes.append(len(pickle.dumps(args[position])))
            call(*args, **kwargs)

        monkeypatch.setattr(dist, name, noting)

    note("gather_object", 0)
    note("all_gather_object", 1)
    note("broadcast_object_list", 0)
    note("scatter_object_list", 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield noted
    dist.destroy_process_group()


def test_each_rank_keeps_what_it_agreed_on(sent: Sent) -> None:
    value = torch.zeros(1000)
    assert Ranks().run("nothing was done", lambda: value) is value
    assert 0 < max(sent.sizes) < 100


def test_ranks_send_only_what_an_agreement_needs(sent: Sent) -> None:
    """Each of these calls costs two collectives or three, for which all ranks wait."""
    ranks = Ranks()
    ranks.run("nothing was done", lambda: 1)
    assert sent.calls == ["all_gather_object"]
    sent.calls.clear()
    assert ranks.broadcast("nothing was done", lambda: 2) == 2
    assert sent.calls == ["broadcast_object_list"]
    sent.calls.clear()
    assert ranks.all_reduce("nothing was done", lambda: 3, sum) == 3
    assert sent.calls == ["gather_object", "broadcast_object_list"]


def test_a_save_sends_no_tensors(sent: Sent, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    trainer = Trainer(model, loss_fn=nn.MSELoss(), batch_size=1, max_steps=2)
    trainer.training_step((torch.ones(1, 300), torch.zeros(1, 300)))
    trainer.save_checkpoint(tmp_path)
    assert 0 < sum(sent.sizes) < 100_000, "the state has 3 MB"
