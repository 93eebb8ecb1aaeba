"""What ranks tell each other: small things."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint import Ranks
from lockstep.trainer import Trainer


class Sent:
    """The collectives that were called, and the bytes that each sent."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sizes: list[int] = []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """A gloo group of this process, whose collectives of objects are noted."""
    noted = Sent()

    def note(name: str, position: int) -> None:
        call = getattr(dist, name)

        def noting(*args: Any, **kwargs: Any) -> None:
            noted.calls.append(name)
            noted.sizes.append(args[position].nbytes)
            call(*args, **kwargs)

        monkeypatch.setattr(dist, name, noting)

    note("gather", 0)
    note("all_gather", 1)
    note("broadcast", 0)
    note("scatter", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield noted
    dist.destroy_process_group()


def test_each_rank_keeps_what_it_agreed_on(sent: Sent) -> None:
    value = torch.zeros(1000)
    assert Ranks().run("nothing was done", lambda: value) is value
    assert 0 < max(sent.sizes) < value.nbytes


def test_ranks_send_only_what_an_agreement_needs(sent: Sent) -> None:
    """All ranks wait for each collective."""
    ranks = Ranks()
    ranks.run("nothing was done", lambda: 1)
    assert sent.calls == ["all_gather"]
    sent.calls.clear()
    assert ranks.broadcast("nothing was done", lambda: 2) == 2
    assert sent.calls == ["broadcast"]
    sent.calls.clear()
    assert ranks.all_reduce("nothing was done", lambda: 3, sum) == 3
    assert sent.calls == ["all_gather", "broadcast"]


def test_a_save_sends_no_tensors(sent: Sent, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    trainer = Trainer(model, loss_fn=nn.MSELoss(), batch_size=1, max_steps=2)
    trainer.training_step((torch.ones(1, 300), torch.zeros(1, 300)))
    trainer.save_checkpoint(tmp_path)
    assert 0 < sum(sent.sizes) < 100_000, "the state has 3 MB"
