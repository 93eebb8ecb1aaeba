"""Runs of Lockstep on the simulated device and on the CPU, small ones, and what their steps did."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from lockstep.config import Config, config_from
from lockstep.models import get_model
from lockstep.process_group import cluster
from lockstep.trainer import Trainer
from tests.simulated_device import device
from tests.simulated_device.device import NAME, Wait

# steps, after which a step is like any other: in the first, optimizer and generators begin
SETTLED = 2


class Tokens(Dataset[dict[str, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.randint(0, 64, (17,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": drawn[:-1], "targets": drawn[1:]}


class Outcome(NamedTuple):
    """What a run did.

    Attributes:
        numbers: (loss, gradient norm) of each step.
        waits: of each step.
        values: parameters at the end.
    """

    numbers: list[tuple[float, float]]
    waits: list[list[Wait]]
    values: dict[str, Tensor]
    races: list[str]


def config_on(kind: str, steps: int, **settings: Any) -> Config:
    return config_from(
        {
            "training.batch_size": 2,
            "training.gradient_accumulation_steps": 2,
            "training.max_steps": steps,
            "training.learning_rate": 0.01,
            "training.warmup_steps": 0,
            "training.lr_schedule": "constant",
            "training.seed": 3,
            "precision.mode": "fp32",
            "distributed.device": kind,
            "distributed.strategy": "single",
            **settings,
        }
    )


def trainer_on(
    kind: str, steps: int = 1, output_dir: Path | None = None, **settings: Any
) -> Trainer:
    if not dist.is_initialized():
        cluster.cleanup()  # the next run may be on another device
    with torch.device("meta"):
        model = get_model("transformer")(n_layer=1, n_embd=16, n_head=2, vocab_size=64, dropout=0.1)
    return Trainer(model, config=config_on(kind, steps, **settings), output_dir=output_dir)


def whole(value: Tensor) -> Tensor:
    """Return a parameter's value on the host, gathered by gloo if it is sharded."""
    if not isinstance(value, DTensor):
        return value.cpu().clone()
    own = value.to_local().cpu()
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, own)
    return torch.cat(pieces)


def run(
    kind: str = NAME,
    steps: int = SETTLED + 1,
    change: Callable[[Trainer], None] | None = None,
    **settings: Any,
) -> Outcome:
    """Take steps, reading nothing on the way."""
    device.forget()
    trainer = trainer_on(kind, steps, **settings)
    trainer.loss_check.skip()
    if change is not None:
        change(trainer)
    records = []
    waits = []
    device.waits.clear()
    for record in trainer.steps(Tokens()):
        records.append(record)
        waits.append(list(device.waits))
        device.waits.clear()
    races = list(device.races)
    values = {name: whole(value.detach()) for name, value in trainer.placed.parameters.items()}
    return Outcome([(float(r.loss), float(r.grad_norm)) for r in records], waits, values, races)


plain = cache(run)  # of one kind of device


def check_same(one: Outcome, other: Outcome, within: float = 1e-4) -> None:
    """The same training, but for the order of sums in kernels."""
    torch.testing.assert_close(
        torch.tensor(one.numbers), torch.tensor(other.numbers), rtol=within, atol=within
    )
    assert other.values
    for name, value in other.values.items():  # of a pipeline's stage, some
        torch.testing.assert_close(one.values[name], value, rtol=0, atol=20 * within)


def differ(one: Outcome, other: Outcome) -> bool:
    try:
        check_same(one, other)
    except AssertionError:
        return True
    return False


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
