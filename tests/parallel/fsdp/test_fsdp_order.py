"""Data decide which units of FSDP2 a forward pass calls: ranks that leave one out join its
messages.

Right is what one process computes. What can't be joined is one error, soon.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.parallel.fsdp import order as fsdp_order
from lockstep.strategy import parse_topology
from lockstep.torch_compat.fsdp_state import TAKES_ZEROS
from lockstep.trainer import Trainer
from tests.ranks import run_ranks
from tests.sampled import sampled

WIDTH = 6
SAMPLES = 48


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def in_row(parts: Iterable[nn.Module], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


class Model(nn.Module):
    """Parts that run by `way`; samples have a kind, which decides."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.step = 0
        self.first, self.second = (nn.ModuleList(Part() for _ in range(2)) for _ in range(2))
        self.text = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        if way in ("frozen tower", "frozen reentrant"):
            self.first.requires_grad_(False)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        lists = {"first": self.first, "second": self.second, "text": self.text}
        return [
            (f"{name}.{i}", part) for name, parts in lists.items() for i, part in enumerate(parts)
        ]

    def forward(self, x: Tensor, image: Tensor, kind: Tensor) -> Tensor:
        seen = {int(each) for each in kind}
        way: Callable[[Tensor, Tensor, set[int]], Tensor] = getattr(
            self, self.way.replace(" ", "_")
        )
        x = way(x, image, seen)
        return self.head(x if self.way == "everything recomputed" else in_row(self.text, x))

    def towers(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        for place, tower in enumerate((self.first, self.second)):
            if place in seen:
                x = x + in_row(tower, image + place)
        return x

    frozen_tower = towers

    def recomputed_parts(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        for place, tower in enumerate((self.first, self.second)):
            if place in seen:
                made = image + place
                for part in tower:
                    made = checkpoint(part, made, use_reentrant=False)
                x = x + made
        return x

    def recomputed_text(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Recompute the text's parts at once, which all ranks call, beside towers that some leave
        out.
        """
        return checkpoint(in_row, self.text, self.towers(x, image, seen), use_reentrant=False)

    def recomputed_towers(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        for place, tower in enumerate((self.first, self.second)):
            if place in seen:
                x = x + checkpoint(in_row, tower, image + place, use_reentrant=False)
        return x

    def reentrant_towers(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        for place, tower in enumerate((self.first, self.second)):
            if place in seen:
                x = x + checkpoint(in_row, tower, self.text[0](x), use_reentrant=True)
        return x

    def frozen_reentrant(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        x = self.second[0](x)
        return x + checkpoint(self.first[0], x, use_reentrant=True) if 0 in seen else x

    def everything_recomputed(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Leave out a tower within a checkpoint that is around all parts."""
        return checkpoint(
            lambda y: in_row(self.text, self.towers(y, image, seen)), x, use_reentrant=False
        )

    def recomputed_further(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Recompute more than the unit: it is gathered before its own backward pass."""
        return (
            x + checkpoint(lambda y: torch.tanh(self.first[0](y)), image, use_reentrant=False)
            if 0 in seen
            else x
        )

    def recomputed_at_times(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Call parts in a checkpoint in each second step, on all ranks alike."""
        parts = (*self.first, *self.second)
        return checkpoint(in_row, parts, x, use_reentrant=False) if self.step % 2 else x

    def late(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Run the towers on what the text's parts made, and the text's parts once more: no unit is
        called twice.
        """
        x = self.second[0](x)
        return self.second[1](x) if 1 in seen else self.first[0](x)

    def dropped(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        for part in (*self.first, *self.second):
            x = part(x) if random.random() < 0.5 else x
        return x

    def backwards(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Call units in another order than they were registered in."""
        for part in (*self.second, *self.first):
            x = part(x) if 0 in seen or part in self.first else x
        return x

    def either_order(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Call the same units in another order, by the data."""
        parts = (self.first, self.second) if 0 in seen else (self.second, self.first)
        return in_row((*parts[0], *parts[1]), x)

    def repeated(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        for _ in range(1 + (0 in seen)):
            x = self.first[0](x)
        return self.first[1](self.second[1](self.second[0](x)))

    def growing(self, x: Tensor, image: Tensor, seen: set[int]) -> Tensor:
        """Call a unit more often from some step on, on all ranks alike."""
        for part in (*self.first, *self.second, *([self.first[0]] if self.step >= 2 else [])):
            x = part(x)
        return x


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Kinds of micro-batches (of 2 samples), by their place in the order of the data."""

    deterministic = True

    def __init__(self, kinds: str) -> None:
        self.kinds = kinds

    def __len__(self) -> int:
        return 2 * len(self.kinds)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x, image = torch.randn(2, WIDTH, generator=generator)
        return {
            "x": x,
            "image": image,
            "kind": torch.tensor(int(self.kinds[index // 2])),
            "y": x.sum(0, keepdim=True),
        }


KINDS = "001101220221201222110022"  # 0, 1: the first, the second tower; 2: none
KEPT = {"distributed.fsdp.sharding_strategy": "shard_grad_op"}  # gathered until the backward pass
NONE_FIRST = "222222220122021022110022"

Case = tuple[str, str, str, dict[str, Any]]  # (topology, way, kinds, settings)


def train(
    topology: str, way: str, kinds: str, settings: dict[str, Any]
) -> list[tuple[float, float]]:
    values, _ = parse_topology(topology)
    common = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.num_train_epochs": 1,
        "training.learning_rate": 1e-2,
        "training.optimizer": "adamw",
        "precision.mode": "fp32",
        "data.shuffle": False,
    }
    config = config_from(
        {**common, **{f"distributed.{key}": value for key, value in values.items()}, **settings}
    )
    model = Model(way).train()
    trainer = Trainer(model, loss_fn=nn.MSELoss(), config=config)
    rows = []
    for record in trainer.steps(torch.utils.data.DataLoader(Samples(kinds), batch_size=2)):
        rows.append((float(record.loss), float(record.grad_norm)))
        model.step = record.step
    rows.append(
        (float(trainer.evaluate(torch.utils.data.DataLoader(Samples(kinds), batch_size=2))), 0.0)
    )
    return rows


def train_all(cases: list[Case]) -> list[list[tuple[float, float]]]:
    return [train(*case) for case in cases]


def assert_like_one_process(cases: list[Case], found: list[list[tuple[float, float]]]) -> None:
    for case, rows in zip(cases, found, strict=True):
        kept = {key: value for key, value in case[3].items() if key.startswith("training")}
        alone = train("single", *case[1:3], kept)
        assert len(rows) == len(alone)
        for mine, right in zip(rows, alone, strict=True):
            assert mine == pytest.approx(right, rel=2e-5), case


joins = pytest.mark.skipif(not TAKES_ZEROS, reason="units are joined from torch 2.13 on")


JOINED: list[Case] = [
    ("fsdp:2", "towers", NONE_FIRST, {}),
    ("fsdp:2", "towers", KINDS, {}),
    ("fsdp:2", "towers", KINDS, {"distributed.reproducible": True}),
    ("fsdp:2", "dropped", KINDS, {}),
    ("fsdp:2", "growing", KINDS, {}),
    ("fsdp:2", "frozen tower", KINDS, {}),
    ("fsdp:2", "recomputed parts", NONE_FIRST, {}),
    ("fsdp:2", "recomputed parts", KINDS, {}),
    ("fsdp:2", "recomputed at times", KINDS, {}),
    ("fsdp:2", "recomputed text", KINDS, {}),
]


@joins
@sampled("cases", JOINED, 8)
def test_ranks_join_the_units_that_their_data_leave_out(cases: list[Case]) -> None:
    for found in run_ranks(train_all, 2, cases):
        assert_like_one_process(cases, found)


@pytest.mark.full
@joins
def test_ranks_join_under_each_setting() -> None:
    settings: list[dict[str, Any]] = [
        {"training.gradient_checkpointing": "full"},
        {"distributed.fsdp.sharding_strategy": "shard_grad_op"},
        {"distributed.fsdp.accumulate": "unsharded"},
        {"training.global_batch_size": 4},
        {"distributed.reproducible": True, "training.global_batch_size": 4},
    ]
    cases: list[Case] = [
        ("fsdp:2", "towers", kinds, more) for more in settings for kinds in (KINDS, NONE_FIRST)
    ]
    cases += [("fsdp:2", way, KINDS, {}) for way in ("late", "backwards")]
    assert_like_one_process(cases, run_ranks(train_all, 2, cases)[0])
    hybrid: list[Case] = [
        ("hybrid:2x2", way, kinds, {})
        for way in ("towers", "dropped")
        for kinds in (KINDS, NONE_FIRST)
    ]
    hybrid += [
        ("hybrid:2x2", "towers", KINDS, {"distributed.reproducible": True}),
        ("fsdp:4", "towers", KINDS, {}),
    ]
    no_shard: dict[str, Any] = {
        "distributed.fsdp.sharding_strategy": "no_shard",
        "distributed.shard_size": 1,
        "distributed.replicate_size": 4,
    }
    hybrid += [
        ("fsdp:4", "towers", KINDS, no_shard | more)
        for more in ({}, {"distributed.reproducible": True})
    ]
    hybrid += [
        (
            "hybrid:2x2",
            "dropped",
            KINDS,
            {"distributed.reproducible": True, "training.global_batch_size": 6},
        )
    ]
    assert_like_one_process(hybrid, run_ranks(train_all, 4, hybrid)[0])


def refused(case: Case) -> str:
    fsdp_order._PATIENCE = 2.0
    with pytest.raises((UsageError, RuntimeError)) as error:
        train(*case)
    return str(error.value)


def test_what_the_installed_fsdp_can_not_join_is_one_error_on_all_ranks() -> None:
    """As torch 2.11 and 2.12, which reduce nothing for a rank that has no gradients."""
    for text in run_ranks(refused_by_old_torch, 2, ("fsdp:2", "towers", "0101" * 6, {})):
        assert "the data of some ranks leave out first.0, which those of others need" in text
        assert "install torch 2.13 or newer; or call it on every rank" in text


def refused_by_old_torch(case: Case) -> str:
    fsdp_order.TAKES_ZEROS = False
    return refused(case)


def test_a_unit_that_ranks_call_another_number_of_times_is_an_error() -> None:
    """In the first step, where all ranks know, and later, where the one that leaves out a call
    does. So are units that ranks call in different orders.
    """
    for text in run_ranks(refused, 2, ("fsdp:2", "repeated", "0101" * 6, {})):
        assert "leave out a call of first.0" in text
    texts = run_ranks(refused, 2, ("fsdp:2", "repeated", "0000" + "01" * 10, {}))
    assert any("leave out a call of first.0" in text for text in texts)
    for text in run_ranks(refused, 2, ("fsdp:2", "either order", "0101" * 6, {})):
        in_order = "a call of first.0, which others make, or make it in another order"
        assert (in_order if TAKES_ZEROS else "leave out first.0, which those of others") in text


@pytest.mark.parametrize(
    ("way", "kinds", "settings"),
    [
        ("recomputed towers", KINDS, {}),
        pytest.param("recomputed towers", "0000" + "01" * 10, {}, marks=pytest.mark.full),
        pytest.param("everything recomputed", KINDS, {}, marks=pytest.mark.full),
        pytest.param("recomputed towers", NONE_FIRST, {}, marks=pytest.mark.full),
        pytest.param("everything recomputed", NONE_FIRST, {}, marks=pytest.mark.full),
        pytest.param("everything recomputed", "0000" + "01" * 10, {}, marks=pytest.mark.full),
        pytest.param("recomputed further", KINDS, {}, marks=pytest.mark.full),
        pytest.param("recomputed towers", KINDS, KEPT, marks=pytest.mark.full),
        pytest.param("recomputed further", KINDS, KEPT, marks=pytest.mark.full),
        pytest.param("frozen reentrant", KINDS, {}, marks=pytest.mark.full),
        pytest.param("frozen reentrant", "0000" + "01" * 10, {}, marks=pytest.mark.full),
    ],
)
def test_a_unit_that_is_recomputed_with_others_and_left_out_is_an_error(
    way: str, kinds: str, settings: dict[str, Any]
) -> None:
    """In the first step, as in a later one, where the rank that leaves it out says so.

    Units are joined from torch 2.13 on; before, the rank that calls one says that others don't.
    """
    texts = run_ranks(refused, 2, ("fsdp:2", way, kinds, settings))
    said = ["a checkpoint of the model's own recomputes"]
    if not TAKES_ZEROS:
        said += ["where no rank's did before, and others don't now", "install torch 2.13 or newer"]
    assert any(each in text for text in texts for each in said), texts


@pytest.mark.full
@pytest.mark.parametrize("kinds", [KINDS, NONE_FIRST, "0000" + "01" * 10])
def test_a_unit_in_a_reentrant_checkpoint_that_is_left_out_is_an_error(kinds: str) -> None:
    texts = run_ranks(refused, 2, ("fsdp:2", "reentrant towers", kinds, {}))
    assert any("distributed.strategy: fsdp" in text for text in texts), texts


class Chained(nn.Module):
    """A segment of a pipeline; the data decide whether it calls its second part."""

    def __init__(self, leaves_out: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.leaves_out = leaves_out

    def forward(self, x: Tensor) -> Tensor:
        some = self.leaves_out and float(x.detach()[0, 0]) > 0
        return in_row(self.parts[:1] if some else self.parts, x)


class Chain(nn.Sequential):
    def blocks(self) -> list[tuple[str, nn.Module]]:
        segments = [(name, s) for name, s in self.named_children() if isinstance(s, Chained)]
        return [
            (f"{name}.parts.{i}", part) for name, s in segments for i, part in enumerate(s.parts)
        ]


def refused_in_stages() -> str:
    torch.manual_seed(0)
    model = Chain(nn.Linear(WIDTH, WIDTH), Chained(True), Chained(True), nn.Linear(WIDTH, 1))
    values, _ = parse_topology("pipeline:2*fsdp:2")
    settings = {"training.batch_size": 2, "training.global_batch_size": 8, "training.max_steps": 4}
    config = config_from(
        {**{f"distributed.{key}": value for key, value in values.items()}, **settings}
    )
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))
    fsdp_order._PATIENCE = 2.0
    with pytest.raises((UsageError, RuntimeError)) as error:
        for _ in Trainer(model, loss_fn=nn.MSELoss(), config=config).steps(
            torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        ):
            pass
    return str(error.value)


def test_a_unit_of_a_stage_that_some_ranks_leave_out_is_an_error() -> None:
    texts = run_ranks(refused_in_stages, 4)
    assert any("leave out a call of 1.parts.1" in text for text in texts), texts
