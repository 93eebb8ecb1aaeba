"""State that a model keeps from one forward pass to the next is noticed; what is only left behind
is not.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.forward_effects.attribute_changes import AttributeChanges
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

WIDTH = 4


class Recurrent(nn.Module):
    """Keeps a state in the way that `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.h: Any = None
        self.kept: Any = {"list": [], "dict": {}, "deque": deque(maxlen=2)}.get(kind)
        self.bank: list[Tensor] = []  # grows
        self.seen: dict[str, Tensor] = {}
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        before = {
            "tensor": lambda: self.h,
            "list": lambda: self.kept[0] if self.kept else None,
            "dict": lambda: self.kept.get("state"),
            "deque": lambda: self.kept[-1] if self.kept else None,
            "bank": lambda: self.bank[0] if self.bank else None,
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
        elif self.kind == "bank":
            self.bank.append(after.detach())
        return self.head(after * self.cache[len(x)])  # type: ignore[no-any-return]


def train(
    kind: str, strategy: str, reproducible: bool, make: Callable[[str], nn.Module] = Recurrent
) -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2
    )
    model = make(kind).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    more = {"reproducible": reproducible}
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), strategy=strategy, global_batch_size=4, max_steps=3, **more
    )  # type: ignore[arg-type]
    list(trainer.steps(data))


@pytest.mark.parametrize("kind", ["tensor", "list", "dict", "deque", "bank"])
def test_state_is_refused_where_the_step_must_not_depend_on_ranks(kind: str) -> None:
    with pytest.raises(UsageError, match=r"goes on from (h|kept|bank)"):
        train(kind, "single", True)
    train(kind, "single", False)


def test_what_is_left_behind_or_cached_is_no_state() -> None:
    train("none", "single", True)


class Scaled(nn.Module):
    """Keeps numbers in the way that `kind` says; all of them go on from what they were, but the
    last ones.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.head = nn.Linear(WIDTH, 1)
        self.gain = 1.0
        self.late_gain = None
        self.last_gain = 0.0
        self.array = np.ones(1)
        self.kept = {"gain": 1.0}
        self.series = [1.0, 0.0]
        self.parts: list[float] = []
        self.tracker = SimpleTracker()
        self.nested = {"inner": {"gain": 1.0}}
        self.register_buffer("lazy", None)

    def forward(self, x: Tensor) -> Tensor:
        seen = float(x.abs().mean())
        gain: Any = 1.0
        if self.kind == "attribute":
            gain = self.gain = 0.9 * self.gain + 0.1 * seen
        elif self.kind == "late":
            gain = self.late_gain = (
                seen if self.late_gain is None else 0.9 * self.late_gain + 0.1 * seen
            )
        elif self.kind == "array":
            self.array = 0.9 * self.array + 0.1 * seen
            gain = float(self.array[0])
        elif self.kind == "dict":
            self.kept["gain"] = gain = 0.9 * self.kept["gain"] + 0.1 * seen
        elif self.kind == "list":
            self.series[0] = gain = 0.9 * self.series[0] + 0.1 * seen
        elif self.kind == "longer list":
            self.series.append(seen)
            gain = sum(self.series)
        elif self.kind == "object":
            gain = self.tracker.update(seen)
        elif self.kind == "nested":
            self.nested["inner"]["gain"] = gain = 0.9 * self.nested["inner"]["gain"] + 0.1 * seen
        elif self.kind == "lazy buffer":
            self.lazy = (
                x.abs().mean() if self.lazy is None else 0.9 * self.lazy + 0.1 * x.abs().mean()
            )
            gain = self.lazy
        # Of this pass alone.
        self.parts.clear()
        self.parts.append(seen)
        gain = gain * sum(self.parts)
        # For others to look at.
        self.last_gain = self.kept["last"] = self.series[1] = self.tracker.last = seen
        return self.head(x * gain)  # type: ignore[no-any-return]


class SimpleTracker:
    def __init__(self) -> None:
        self.value = 1.0
        self.last = 0.0

    def update(self, seen: float) -> float:
        self.value = 0.9 * self.value + 0.1 * seen
        return self.value


KEPT = {
    "attribute": "gain",
    "late": "late_gain",
    "array": "array",
    "dict": r"kept\['gain'\]",
    "list": r"series\[0\]",
    "longer list": r"series, series\[1\]",
    "object": r"tracker\.value",
    "lazy buffer": "lazy",
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_number_that_the_next_pass_goes_on_from_is_refused_too(kind: str) -> None:
    with pytest.raises(UsageError, match=f"goes on from {KEPT[kind]}, which"):
        train(kind, "single", True, Scaled)
    train(kind, "single", False, Scaled)


def test_numbers_that_are_written_alone_are_no_state(caplog: pytest.LogCaptureFixture) -> None:
    train("none", "single", True, Scaled)
    assert "on from" not in caplog.text
    train("nested", "single", True, Scaled)
    assert "may go on from nested['inner']['gain'], which" in caplog.text


class Late(nn.Module):
    """A buffer that is first written in the third step, in the way that `kind` says."""

    level: Tensor
    large: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("level", torch.zeros(1))
        self.register_buffer("constant", torch.tensor([1.0, torch.nan]))
        self.register_buffer("large", torch.zeros(1 << 15))
        self.step = 0  # which the loop sets

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "in place" and self.step > 1:
            self.level += x.mean()
        elif self.kind == "replaced" and self.step > 1:
            self.level = self.level + x.mean()
        elif (self.kind == "data" and self.step > 1) or self.kind == "data at once":
            self.level.data.add_(x.mean())
        elif self.kind == "large data" and self.step > 1:
            self.large.data.add_(x.mean())
        return self.head(x) * self.constant[0] + self.level + self.large[0]  # type: ignore[no-any-return]


WHEN = {"in place": "in step 3", "replaced": "in step 3", "data": "in step 3"}
HIDDEN = {"large data": "in steps 3 to 4"}  # by the sum of the bits


def train_late(kind: str, strategy: str, reproducible: bool) -> Tensor:
    model = Late(kind).train()
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(
        model,
        optimizer,
        nn.MSELoss(),
        strategy=strategy,
        batch_size=2,
        global_batch_size=4,
        max_steps=4,
        reproducible=reproducible,
    )
    for step, _ in enumerate(trainer.steps(data), start=1):
        model.step = step
    return trainer.placed.buffers["large" if kind in HIDDEN else "level"][:1].clone()


@pytest.mark.parametrize("kind", [*WHEN, *HIDDEN, "data at once"])
def test_a_buffer_is_noticed_in_the_step_in_which_it_is_first_written(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one written through `.data`, which hides it from versions; a checkpoint has what it
    became.
    """
    when = (WHEN | HIDDEN).get(kind)
    first = f", first {when}" if when else ""
    name = "large" if kind in HIDDEN else "level"
    with pytest.raises(UsageError, match=f"changes the buffer {name}{first}\\n"):
        train_late(kind, "single", True)
    assert train_late(kind, "single", False).abs() > 0
    assert f"changes the buffer {name}{first}:" in caplog.text
    assert "constant" not in caplog.text


def test_a_buffer_that_the_loop_writes_between_steps_is_no_state() -> None:
    """A temperature that the caller anneals, whichever way it is written."""
    model = Late("none").train()
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        nn.MSELoss(),
        batch_size=2,
        max_steps=4,
        reproducible=True,
    )
    for step, _ in enumerate(trainer.steps(data), start=1):
        model.level.data.fill_(step / 4)
        model.constant.data[0] = step


@pytest.mark.parametrize("hidden", [False, True])
def test_a_buffer_that_evaluations_write_is_refused_there(hidden: bool) -> None:
    class Evaluated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, 1)
            self.register_buffer("evaluated", torch.zeros(1))

        def forward(self, input: Tensor) -> Tensor:
            if not self.training:
                (self.evaluated.data if hidden else self.evaluated).add_(input.sum())
            return super().forward(input)

    x = torch.randn(8, WIDTH)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(
        Evaluated(),
        loss_fn=nn.MSELoss(),
        batch_size=2,
        global_batch_size=4,
        max_steps=1,
        reproducible=True,
    )
    list(trainer.steps(data))
    with pytest.raises(UsageError, match="changes the buffer evaluated in evaluation, too"):
        trainer.evaluate(data)


def late_on_ranks() -> list[Any]:
    found: list[Any] = [train_late(kind, "ddp", False) for kind in ("data", "replaced")]
    for kind in WHEN:
        try:
            train_late(kind, "ddp", True)
        except UsageError as error:
            found.append(str(error))
    return found


def on_ranks() -> list[str]:
    found = []
    for kind in ("tensor", "none"):
        try:
            train(kind, "fsdp", True)
            found.append("trains")
        except UsageError as error:
            found.append(str(error))
    return found + late_on_ranks()


def test_ranks_refuse_it_together() -> None:
    """Buffers that are written late end as rank 0's on all ranks."""
    found = run_ranks(on_ranks, 2)
    for refused, trained, hidden, replaced, *late in found:
        assert "goes on from h" in refused
        assert trained == "trains"
        assert hidden == found[0][2] != 0
        assert replaced == found[0][3] != 0
        for text, when in zip(late, WHEN.values(), strict=True):
            assert f"changes the buffer level, first {when}" in text


# ---- what the step itself writes, at its end, is not a state of the forward pass ----


class Balancing(nn.Module):
    """Counts in forward passes, and writes another buffer by `end_step`, in the way that `kind`
    says.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, 1)
        self.child = nn.Module()
        self.register_buffer("step_counts", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("bias", torch.zeros(1))
        self.child.register_buffer("level", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step_counts += len(x)
        if self.kind == "forward too":
            self.bias += 1
        out: Tensor = self.linear(x) + self.bias
        return out

    def end_step(self, counts: Tensor) -> None:
        if self.kind == "data":
            self.bias.data += 0.1 * counts
        elif self.kind == "child":
            self.child.level += counts
        else:
            self.bias += 0.1 * counts


@pytest.mark.parametrize("kind", ["in place", "data", "child"])
def test_what_the_end_of_a_step_writes_is_not_refused(kind: str) -> None:
    train(kind, "single", True, Balancing)


def test_what_the_forward_pass_writes_besides_is_refused() -> None:
    with pytest.raises(UsageError, match="the forward pass changes the buffer bias"):
        train("forward too", "single", True, Balancing)


# ---- what begins after the first steps ----


class Later(nn.Module):
    """Begins in step 6 to do what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.head = nn.Linear(WIDTH, 1)
        self.gain = 1.0
        self.last = 0.0
        self.count = 0
        self.longest = 0
        self.h: Tensor | None = None
        self.kept: dict[str, Any] = {}
        self.tracker = SimpleTracker()
        self.memory = torch.zeros(WIDTH)
        self.generator = torch.Generator()
        self.step = 1  # which the loop sets

    def forward(self, x: Tensor) -> Tensor:
        seen = float(x.abs().mean())
        gain: Any = 1.0
        if self.step < 6:
            pass
        elif self.kind == "number":
            self.gain = gain = 0.9 * self.gain + 0.1 * seen
        elif self.kind == "member":
            self.kept["gain"] = gain = 0.9 * self.kept.get("gain", 1.0) + 0.1 * seen
        elif self.kind == "object":
            gain = self.tracker.update(seen)
        elif self.kind == "tensor":
            gain = self.h = x.abs().mean() if self.h is None else 0.9 * self.h + 0.1
        elif self.kind == "replaced tensor":
            self.memory = 0.9 * self.memory + x.mean(0)
            gain = self.memory
        elif self.kind == "count":
            self.count += 1
        elif self.kind == "parameter":
            self.head.weight.data.clamp_(-0.1, 0.1)
        elif self.kind == "generator":
            gain = torch.rand(1, generator=self.generator)
        elif self.kind == "left behind":
            self.last = self.kept["last"] = seen
        elif self.kind == "cache":  # which grows in step 6 alone
            self.longest = max(self.longest, len(x))
        return self.head(x * gain)  # type: ignore[no-any-return]


def train_later(kind: str, steps: int) -> None:
    model = Later(kind).train()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: Any = {"batch_size": 2, "global_batch_size": 4, "reproducible": True}
    trainer = Trainer(model, optimizer, nn.MSELoss(), max_steps=steps, **settings)
    for record in trainer.steps(data):
        model.step = record.step + 1


LATER = {
    "number": (7, "goes on from gain, which"),
    "member": (7, r"goes on from kept\['gain'\], which"),
    "object": (7, r"goes on from tracker\.value, which"),
    "tensor": (7, "goes on from h, which"),
    "count": (7, "advances the attribute count"),
    "replaced tensor": (8, "goes on from memory, which"),
    "parameter": (8, r"writes the parameter head\.weight"),
    "generator": (8, "draws from a generator"),
}


@pytest.mark.parametrize("kind", LATER)
def test_what_begins_late_is_refused_in_the_next_step_or_the_next_look(kind: str) -> None:
    """A number, or a tensor where there was none, in the next step; the rest in step 8."""
    step, message = LATER[kind]
    train_later(kind, step - 1)
    with pytest.raises(UsageError, match=message):
        train_later(kind, step)


@pytest.mark.parametrize("kind", ["left behind", "cache"])
def test_what_is_left_behind_late_is_no_state(kind: str) -> None:
    train_later(kind, 10)


def test_state_that_the_loop_resets_at_each_step_is_refused() -> None:
    """The second micro-batch of a step goes on from the first one's."""
    model = Recurrent("tensor").train()
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    settings: Any = {"batch_size": 2, "global_batch_size": 4, "reproducible": True}
    trainer = Trainer(model, None, nn.MSELoss(), max_steps=3, **settings)

    def loop() -> None:
        for _ in trainer.steps(data):
            model.h = None

    with pytest.raises(UsageError, match="goes on from h, which"):
        loop()


def test_each_slot_asks_for_a_look_once() -> None:
    """A model that leaves a number behind in each step is not looked at in each."""
    model = Later("left behind")
    model.step = 6
    changes = AttributeChanges([model])
    assert not changes.has_new()
    model.last = 0.5
    model.kept["last"] = 0.5
    assert changes.has_new()
    changes.take_as_known()
    model.last = 0.6
    model.kept["more"] = 0.6  # the dict grows for the second time
    assert not changes.has_new()
    model.gain = 2.0
    assert changes.has_new()


@pytest.mark.parametrize("what", ["layer", "parameter"])
@pytest.mark.parametrize("after", [1, 5])
def test_a_layer_that_is_replaced_while_it_trains_is_refused(what: str, after: int) -> None:
    """After the step that follows, but for the first two, of which the second one tells."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(model, None, nn.MSELoss(), batch_size=2, max_steps=8)
    made: list[int] = []

    def loop() -> None:
        for record in trainer.steps(data):
            made.append(record.step)
            if record.step == after and what == "layer":
                model[2] = nn.Linear(WIDTH, 1)
            elif record.step == after:
                model[2].weight = nn.Parameter(torch.zeros(1, WIDTH))

    with pytest.raises(UsageError, match=r"the model's 2\.weight.* is another parameter now"):
        loop()
    assert made[-1] == after
