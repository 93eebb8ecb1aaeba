"""A hidden state that a model keeps from one forward pass to the next is noticed; what is only left behind is not."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

WIDTH = 4


class Recurrent(nn.Module):
    """Keeps a state in the way that `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.h: Any = None
        self.kept: Any = {"list": [], "dict": {}, "deque": deque(maxlen=2)}.get(kind)
        self.seen: dict[str, Tensor] = {}
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        before = {
            "tensor": lambda: self.h,
            "list": lambda: self.kept[0] if self.kept else None,
            "dict": lambda: self.kept.get("state"),
            "deque": lambda: self.kept[-1] if self.kept else None,
        }.get(self.kind, lambda: None)()
        after = self.cell(x, x.new_zeros(len(x), WIDTH) if before is None else before)
        self.seen["hidden"] = after.detach()  # for others to look at
        self.cache.setdefault(len(x), x.new_ones(WIDTH))
        if self.kind == "tensor":
            self.h = after.detach()
        elif self.kind == "dict":
            self.kept["state"] = after.detach()
        elif self.kind == "list":
            self.kept[:] = [after.detach()]
        elif self.kind == "deque":
            self.kept.append(after.detach())
        return self.head(after * self.cache[len(x)])  # type: ignore[no-any-return]


def train(kind: str, strategy: str, reproducible: bool) -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
    model = Recurrent(kind).train()
    optimizer, more = torch.optim.SGD(model.parameters(), lr=0.01), {"reproducible": reproducible}
    trainer = Trainer(model, optimizer, nn.MSELoss(), strategy=strategy, global_batch_size=4, max_steps=3, **more)  # type: ignore[arg-type]
    list(trainer.steps(data))


@pytest.mark.parametrize("kind", ["tensor", "list", "dict", "deque"])
def test_state_is_refused_where_the_step_must_not_depend_on_ranks(kind: str) -> None:
    with pytest.raises(UsageError, match=r"goes on from (h|kept)"):
        train(kind, "single", True)
    train(kind, "single", False)


def test_what_is_left_behind_or_cached_is_no_state() -> None:
    train("none", "single", True)


def on_ranks() -> list[str]:
    found = []
    for kind in ("tensor", "none"):
        try:
            train(kind, "fsdp", True)
            found.append("trains")
        except UsageError as error:
            found.append(str(error))
    return found


def test_ranks_refuse_it_together() -> None:
    for refused, trained in run_ranks(on_ranks, 2):
        assert "goes on from h" in refused
        assert trained == "trains"
