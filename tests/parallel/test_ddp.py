"""What DDP says when the loss does not depend on a parameter, and what it is called with."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import config_from
from lockstep.errors import RunError
from lockstep.trainer import Trainer
from tests.ranks import run_ranks


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.tensor(index % 2)


class Partly(nn.Module):
    """`never` is never used; with `sometimes`, `rare` only in a step's first micro-batches."""

    def __init__(self, *, sometimes: bool) -> None:
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)
        self.sometimes, self.calls = sometimes, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.used(x)
        return y + self.unused(x) if self.sometimes and self.calls % 2 else y


def message(sometimes: bool, settings: dict[str, Any]) -> str | list[float]:
    torch.manual_seed(0)
    common = {"training.batch_size": 4, "training.global_batch_size": 16, "training.max_steps": 3}
    config = config_from({**common, "distributed.strategy": "ddp", **settings})
    trainer = Trainer(Partly(sometimes=sometimes), loss_fn=nn.CrossEntropyLoss(), config=config)
    try:
        return [float(record.loss) for record in trainer.steps(Points())]
    except RunError as error:
        return str(error)


FIND = {"distributed.ddp.find_unused_parameters": True}


def messages() -> dict[str, Any]:
    found = {
        "never": message(False, {}),
        "sometimes": message(True, {}),
        "never, found": message(False, FIND),
        "sometimes, found": message(True, FIND),
    }
    torch.manual_seed(0)
    dist.barrier()
    return found


def test_trap_60_parameters_without_a_gradient_are_named_in_the_same_step() -> None:
    """DDP says "expected to have finished reduction" in the next step, and names no parameter."""
    alone = message(False, {"distributed.strategy": "single"})
    for found in run_ranks(messages, 2):
        for case in ("never", "sometimes"):
            text = found[case]
            assert isinstance(text, str), text
            assert "unused.weight, unused.bias" in text
            assert "used.weight, used.bias" not in text.replace("unused", "")
            assert "find_unused_parameters: true" in text
        assert found["never, found"] == pytest.approx(alone, rel=1e-5)
        assert len(found["sometimes, found"]) == 3
