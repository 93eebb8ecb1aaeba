"""DDP's options, what it says when the loss does not depend on a parameter, and streams that end at
different times.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.config import config_from
from lockstep.errors import RunError
from lockstep.trainer import Trainer
from tests.parity.matrix import Case, run_all
from tests.parity.parts import outcome
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
        self.sometimes = sometimes
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y + self.unused(x) if self.sometimes and next(self.calls) % 2 else y


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


def with_options(strategy: str, **options: Any) -> Case:
    more = tuple((f"distributed.ddp.{key}", value) for key, value in options.items())
    return Case("transformer", strategy, 3, "none", more)


OPTIONS = [
    with_options("ddp", static_graph=True),
    with_options("accelerate", static_graph=True),
    with_options("ddp", gradient_as_bucket_view=False),
    with_options("ddp", find_unused_parameters=True, bucket_cap_mb=0.01),
]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Rank 0 reads 3 points, rank 1 reads 9 others."""

    rank_sharded = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from (Points()[i] for i in ((0, 1, 2), range(10, 19))[dist.get_rank()])


# What the ranks of a step hold together; then the stream of rank 0 is at its end.
TOGETHER = [(0, 1, 10, 11), (2, 12, 13), (14, 15), (16, 17), (18,)]


def uneven(settings: dict[str, Any]) -> list[tuple[float, int]]:
    """(loss, samples of all ranks) of each step over streams of unequal length."""
    torch.manual_seed(0)
    common = {
        "training.batch_size": 2,
        "training.lr_schedule": "constant",
        "training.warmup_steps": 0,
    }
    config = config_from(
        {**common, "precision.mode": "fp32", "training.num_train_epochs": 1, **settings}
    )
    model = nn.Linear(4, 2)
    trainer = Trainer(model, nn_sgd, nn.CrossEntropyLoss(), config=config)
    return [(float(record.loss), int(record.tokens)) for record in trainer.steps(Stream())]


def nn_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def by_hand() -> list[float]:
    """The same steps, written out."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    found = []
    optimizer = nn_sgd(model.parameters())
    for step in TOGETHER:
        points = [Points()[i] for i in step]
        loss = nn.functional.cross_entropy(
            model(torch.stack([x for x, _ in points])), torch.stack([y for _, y in points])
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


STRATEGIES = ("ddp", "fsdp", "accelerate")


def messages() -> dict[str, Any]:
    found: dict[str, Any] = {"options": run_all(OPTIONS[::3])}
    found["uneven"] = {
        strategy: uneven({"distributed.strategy": strategy}) for strategy in STRATEGIES
    }
    found |= {
        "never": message(False, {}),
        "sometimes": message(True, {}),
        "never, found": message(False, FIND),
        "sometimes, found": message(True, FIND),
    }
    torch.manual_seed(0)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(messages, 2)


def test_options_of_ddp_change_nothing_in_what_is_trained(ranks: list[dict[str, Any]]) -> None:
    check_options(OPTIONS[::3], [rank["options"] for rank in ranks])


@pytest.mark.full
def test_other_options_of_ddp_change_nothing_in_what_is_trained() -> None:
    check_options(OPTIONS[1:3], run_ranks(run_all, 2, OPTIONS[1:3]))


def check_options(options: list[Case], of_ranks: list[list[Any]]) -> None:
    for case, *results in zip(options, *of_ranks, strict=True):
        assert not outcome(case, 2, results).problem


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trap_63_streams_of_unequal_length_end_together_and_each_sample_counts_once(
    ranks: list[dict[str, Any]], strategy: str
) -> None:
    """Accelerate's `join_uneven_inputs` deadlocks outside of GPU DDP; a mean over ranks weighs
    lonely samples twice.
    """
    for rank in ranks:
        losses, samples = zip(*rank["uneven"][strategy], strict=True)
        assert list(samples) == [len(step) for step in TOGETHER]
        assert losses == pytest.approx(by_hand(), rel=1e-5)


def test_trap_60_parameters_without_a_gradient_are_named_in_the_same_step(
    ranks: list[dict[str, Any]],
) -> None:
    """DDP says "expected to have finished reduction" in the next step, and names no parameter."""
    alone = message(False, {"distributed.strategy": "single"})
    for found in ranks:
        for case in ("never", "sometimes"):
            text = found[case]
            assert isinstance(text, str), text
            assert "unused.weight, unused.bias" in text
            assert "used.weight, used.bias" not in text.replace("unused", "")
            assert "find_unused_parameters: true" in text
        assert found["never, found"] == pytest.approx(alone, rel=1e-5)
        assert len(found["sometimes, found"]) == 3
