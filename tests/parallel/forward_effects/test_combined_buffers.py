"""Buffers that a forward pass writes become those of the whole batch, however a step is cut
(`distributed.buffers`).
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate

from lockstep import place
from lockstep.config import config_from
from lockstep.data import SampleOrder
from lockstep.errors import UsageError
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

# 5 full steps of 4 micro-batches and a short one of 2
SAMPLES = 44
BATCH = 8
EACH = 2
WIDTH = 5
SLOTS = 24

WAYS = {
    "*.keys*": "gather",
    "3.bank": "gather",
    "1.offset": "mean",
    "1.*r": "mean",
    "1.first": "rank0",
}


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Its samples end with their number."""

    deterministic = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return torch.cat([drawn, torch.tensor([float(index)])]), torch.tensor(0)


class Encode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x[:, :-1]), x[:, -1:]


class Centred(nn.Module):
    """Averages, in place and not, of several types; and what the first micro-batch has."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.register_buffer("coarser", torch.zeros(WIDTH, dtype=torch.bfloat16))
        self.register_buffer("turner", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("begun_or", torch.tensor(False))
        self.register_buffer("untouched_r", torch.tensor([2**53 + 1, 2**62 + 3]))  # no float64
        self.register_buffer("first", torch.zeros(WIDTH))

    def forward(self, x: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        centred = x - self.offset
        if self.training:
            mean = x.detach().mean(0)
            self.offset = 0.9 * self.offset + 0.1 * mean
            self.coarser.lerp_(mean.bfloat16(), 0.5)
            self.turner += torch.complex(mean[:2], mean[2:4])
            self.begun_or |= True
            self.first.data = mean
        return centred, number


class Queue(nn.Module):
    """As in MoCo: keys in columns, and a pointer; with it a queue of the samples' numbers."""

    keys: Tensor
    keys_ptr: Tensor
    keys_number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(WIDTH, SLOTS), dim=0))
        self.register_buffer("keys_ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("keys_number", torch.zeros(SLOTS, dtype=torch.int32))

    def forward(self, x: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = F.normalize(x, dim=1)
        negative = query @ self.keys.clone()
        if self.training:
            with torch.no_grad():
                begin = int(self.keys_ptr)
                end = begin + len(x)
                self.keys[:, begin:end] = query.T
                self.keys_number[begin:end] = number[:, 0]
                self.keys_ptr[0] = end % SLOTS
        return query, negative, number


class Bank(nn.Module):
    """Remembers each sample in a row of its own."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(SAMPLES, WIDTH))
        self.heat = nn.Parameter(torch.ones(2))

    def forward(self, query: Tensor, negative: Tensor, number: Tensor) -> Tensor:
        rows = number[:, 0].long()
        positive = (query * (self.bank[rows] + 0.1)).sum(1, keepdim=True)
        if self.training:
            self.bank[rows] = query.detach()
        return torch.cat([positive * self.heat[0], negative * self.heat[1]], 1)


def remembering() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Encode(), Centred(), Queue(), Bank())


class Chain(nn.Module):
    """Calls one module after the other with what the one before it returns."""

    def __init__(self, modules: nn.Sequential) -> None:
        super().__init__()
        for name, module in modules.named_children():
            self.add_module(name, module)

    def segments(self) -> list[tuple[str, nn.Module]]:
        return list(self.named_children())

    def forward(self, x: Tensor) -> Any:
        values: Any = (x,)
        for module in self.children():
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values


def trainer_of(model: nn.Module, settings: dict[str, Any], **more: Any) -> Trainer:
    common = {
        "training.batch_size": EACH,
        "training.global_batch_size": BATCH,
        "training.optimizer": "sgd",
        "training.learning_rate": 0.1,
        "training.weight_decay": 0.0,
        "training.num_train_epochs": 1,
        "training.optimizer_args": {"momentum": 0.0},
        "precision.mode": "fp32",
        "distributed.buffers": WAYS,
    }
    return Trainer(
        model.train(),
        loss_fn=nn.CrossEntropyLoss(),
        config=config_from({**common, **settings}),
        **more,
    )


def remembered(settings: dict[str, Any]) -> dict[str, Tensor]:
    """All that a run leaves in the model."""
    trainer = trainer_of(Chain(remembering()), settings)
    for _ in trainer.steps(Numbered()):
        pass
    return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}


def remembered_in_all(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [remembered(case) for case in cases]


def whole_batches() -> dict[str, Tensor]:
    """The author's own loop, in plain PyTorch."""
    model = Chain(remembering()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = SampleOrder(SAMPLES, EACH, BATCH, seed=1337)
    for step in range(order.steps_per_epoch):
        items = [
            Numbered()[index] for part in order.samples_of(step).micro_batches for index in part
        ]
        x, y = (torch.stack(list(column)) for column in zip(*items, strict=True))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "launches",
    [
        [(2, ("ddp", "pipeline"))],
        pytest.param(
            [(2, ("ddp", "fsdp", "pipeline")), (3, ("ddp", "fsdp"))], marks=pytest.mark.full
        ),
    ],
    ids=["some", "all"],
)
def test_buffers_are_those_of_the_whole_batch_on_any_number_of_ranks(
    launches: list[tuple[int, tuple[str, ...]]],
) -> None:
    """In one process to rounding; then with one digest under `reproducible`, and to rounding
    without it.
    """
    plain = whole_batches()
    alone = remembered({})
    exact = remembered({"distributed.reproducible": True})
    assert plain["2.keys_ptr"] == 20, "round the end, and half a step further"
    by_micro_batch = ("1.first", "1.coarser")
    for name in plain.keys() - set(by_micro_batch):
        torch.testing.assert_close(
            alone[name], plain[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(alone["1.coarser"], plain["1.coarser"], rtol=0.05, atol=0.05)
    assert (alone["1.first"] - plain["1.first"]).abs().max() > 1e-3
    for ranks, strategies in launches:
        cases: list[dict[str, Any]] = [
            {"distributed.strategy": strategy, "distributed.reproducible": exactly}
            for strategy in strategies
            for exactly in (True, False)
        ]
        for case, found in zip(cases, run_ranks(remembered_in_all, ranks, cases)[0], strict=True):
            assert found.keys() == exact.keys()
            for name, tensor in found.items():
                if case["distributed.reproducible"]:
                    assert torch.equal(tensor, exact[name]), f"{case}: {name}"
                else:
                    tolerance = 0.02 if tensor.dtype == torch.bfloat16 else 1e-5
                    torch.testing.assert_close(
                        tensor,
                        alone[name],
                        rtol=tolerance,
                        atol=tolerance,
                        msg=lambda m, at=(case, name): f"{at}: {m}",
                    )


def test_each_way_to_train_combines_them() -> None:
    """Also a buffer that two modules share, under its second name."""
    whole = remembered({})
    trainer = trainer_of(
        Chain(remembering()), {"training.max_steps": 9, "training.num_train_epochs": None}
    )
    order = SampleOrder(SAMPLES, EACH, BATCH, seed=1337)
    steps = [
        [
            default_collate([Numbered()[index] for index in indices])
            for indices in order.samples_of(step).micro_batches
        ]
        for step in range(order.steps_per_epoch)
    ]
    ways = {**{name: way for name, way in WAYS.items() if name != "1.offset"}, "4.offset": "mean"}
    model = Chain(remembering()).train()
    model.add_module("4", Idle(model.get_submodule("1").get_buffer("offset")))
    placed = place(model, loss_fn=nn.CrossEntropyLoss(), precision="fp32", buffers=ways)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
    for micro_batches in steps[:-1]:
        for batch in micro_batches:
            trainer.training_step(batch)
        placed.backward(*micro_batches)
        optimizer.step()
        optimizer.zero_grad()
    early = remembered({"training.max_steps": len(steps) - 1, "training.num_train_epochs": None})
    assert not torch.equal(early["1.offset"], whole["1.offset"])
    for name, tensor in early.items():
        assert torch.equal(trainer.state_dict()[name], tensor), name
        torch.testing.assert_close(
            placed.state_dict()[name], tensor, msg=lambda m, n=name: f"{n}: {m}"
        )


class Idle(nn.Module):
    """Has a buffer of another module."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.register_buffer("offset", shared)

    def forward(self, *values: Tensor) -> Any:
        return values if len(values) > 1 else values[0]


class Recomputing(nn.Module):
    """Blocks that write buffers, and read what they wrote in earlier steps."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH + 1, WIDTH + 1), Level()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH + 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x / 9, use_reentrant=False) if self.recomputes else block(x / 9)
        return self.head(x)  # type: ignore[no-any-return]


class Level(nn.Module):
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(WIDTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(x) - self.level
        self.level.lerp_(out.detach().mean(0), 0.3)
        return out


def test_a_pass_that_is_recomputed_or_compiled_starts_from_the_same_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    full: dict[str, Any] = {"training.gradient_checkpointing": "full"}
    compiled: dict[str, Any] = {"training.compile": True}
    found = []
    for recomputes, more in (
        (False, {}),
        (True, {}),
        (False, full),
        (False, compiled),
        (False, full | compiled),
    ):
        settings = {"distributed.buffers": {"*.level": "mean"}, **more}
        trainer = trainer_of(Recomputing(recomputes), settings)
        list(trainer.steps(Numbered()))
        found.append({name: tensor.clone() for name, tensor in trainer.state_dict().items()})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 4
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(other[name], tensor), name


def test_a_run_that_resumes_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    whole = remembered({})
    for steps in (3, 6):
        settings = {
            "training.max_steps": steps,
            "training.num_train_epochs": None,
            "checkpoint.save_steps": 3,
        }
        trainer = trainer_of(Chain(remembering()), settings, output_dir=tmp_path)
        trainer.train(Numbered())
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_an_evaluation_leaves_no_trace_in_them() -> None:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH + 1, 2)
            self.register_buffer("level", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            out = self.linear(x)
            levelled = out + self.level
            self.level = 0.5 * self.level + out.detach().mean(0)
            return levelled

    torch.manual_seed(0)
    trainer = trainer_of(Always(), {"distributed.buffers": {"level": "mean"}})
    steps = trainer.steps(Numbered())
    next(steps)
    before = trainer.state_dict()["level"].clone()
    assert before.abs().max() > 0
    first = trainer.evaluate(Numbered())
    second = trainer.evaluate(Numbered())
    assert first == second
    assert torch.equal(trainer.state_dict()["level"], before)
    steps.close()


# ---- what can't be right is refused ----


class Writing(nn.Module):
    """Has buffers of many kinds, which a function writes."""

    def __init__(self, write: Callable[["Writing", Tensor], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH + 1, 3)
        self.norm = nn.BatchNorm1d(3)
        self.write = write
        self.register_buffer("bank", torch.zeros(SLOTS, 3))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.register_buffer("number_of_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(x))
        if self.training and self.write is not None:
            self.write(self, out.detach())
        return out


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ({"banks": "gather"}, "banks names no buffer of the model; did you mean 'bank'"),
        ({"linear.*": "mean"}, r"linear\.\* names no buffer.*names, or patterns with \*, of bank"),
        (
            {"norm.running_*": "mean"},
            "names norm.running_mean, norm.running_var .*alone, which the step itself keeps",
        ),
        ({"passing": "mean"}, "names passing, which no checkpoint has.*persistent=False"),
        ({"b*": "gather", "*k": "mean"}, r"bank is named twice, by b\*: gather and by \*k: mean"),
        ({"average": "gather"}, "average is one number, which has no rows.*average: mean"),
        (
            {"bank": "gather", "number*": "gather"},
            "gather: the pointer of .*bank may be number, number_of_calls.*bank_ptr",
        ),
    ],
)
def test_names_that_mean_nothing_are_refused(ways: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        trainer_of(Writing(), {"distributed.buffers": ways})
    assert re.search(message, str(error.value), re.DOTALL), str(error.value)


@pytest.mark.parametrize(
    ("axis", "text"),
    [("context", "sequences"), ("tensor", "layers"), ("expert", "experts"), ("diloco", "worker")],
)
def test_axes_along_which_ranks_share_a_micro_batch_are_refused(axis: str, text: str) -> None:
    size = {} if axis == "diloco" else {f"distributed.{axis}_size": 2}
    strategy = axis if axis == "diloco" else "ddp"
    with pytest.raises(UsageError, match=f"(?s){text}.*leave buffers out"):
        trainer_of(
            Writing(),
            {"distributed.buffers": {"bank": "gather"}, "distributed.strategy": strategy, **size},
        )


def shift(model: Writing, out: Tensor) -> None:
    """A queue without a pointer."""
    model.bank = torch.cat([out, model.bank])[:SLOTS]


def beside_pointer(model: Writing, out: Tensor) -> None:
    model.bank[:] = out[0]
    model.number.add_(len(out))


def count_down(model: Writing, _out: Tensor) -> None:
    model.number.sub_(1)


def grow(model: Writing, out: Tensor) -> None:
    model.average = out.mean(0)


@pytest.mark.parametrize(
    ("write", "ways", "message"),
    [
        (
            shift,
            {"bank": "gather"},
            "two micro-batches of a step write the same elements of bank.*bank_ptr: gather",
        ),
        (
            beside_pointer,
            {"bank": "gather", "number": "gather"},
            "writes bank .*outside of the slots that its pointer",
        ),
        (
            count_down,
            {"number": "gather"},
            "gather: the forward pass takes .*number from 0 to -1.*number: rank0, or mean",
        ),
        (
            grow,
            {"average": "mean"},
            r"the forward pass changes the shape of .*average, \[\] → \[3\]",
        ),
    ],
)
def test_writes_that_do_not_combine_are_refused_in_the_first_step(
    write: Callable[[Writing, Tensor], None], ways: dict[str, str], message: str
) -> None:
    trainer = trainer_of(Writing(write), {"distributed.buffers": ways})
    with pytest.raises(UsageError) as error:
        next(trainer.steps(Numbered()))
    assert re.search(message, str(error.value), re.DOTALL), str(error.value)


def count_up(model: Writing, out: Tensor) -> None:
    model.number += len(out)
    model.number_of_calls += 1


def test_counts_are_added_up_and_what_is_never_written_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ways = {"number*": "gather", "bank": "mean"}
    trainer = trainer_of(
        Writing(count_up), {"distributed.buffers": ways, "distributed.reproducible": True}
    )
    for _ in trainer.steps(Numbered()):
        pass
    assert trainer.state_dict()["number"] == SAMPLES
    assert trainer.state_dict()["number_of_calls"] == SAMPLES / EACH
    assert "distributed.buffers: bank: no forward pass of the first step has written" in caplog.text
    assert "number*" not in caplog.text
