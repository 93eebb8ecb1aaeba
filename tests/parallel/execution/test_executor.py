"""The executor: what runs when, what one pass leaves for another, and what happens when
one fails.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.costs.steps import ScheduledPass
from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError
from lockstep.parallel.execution.executor import Executor, Stage
from lockstep.parallel.execution.passes import AroundMicroBatch, Explains, MicroBatchPass
from lockstep.parallel.loss_accumulator import HostLossAccumulator, Loss
from lockstep.randomness import RandomState

WIDTH = 4


class Writes(AroundMicroBatch):
    """Writes down what is called, with the stage and the position."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.passes = set[int]()

    def _write(self, what: str, passing: MicroBatchPass) -> None:
        self.passes.add(id(passing))
        where = f"{passing.stage}.{passing.position}"
        self.log.append(f"{self.name} {what} {where}{' last' if passing.last else ''}")

    def before(self, passing: MicroBatchPass) -> None:
        self._write("before", passing)

    def after_forward(self, passing: MicroBatchPass) -> None:
        self._write("after_forward", passing)

    def before_backward(self, passing: MicroBatchPass) -> None:
        self._write("before_backward", passing)

    def after_backward(self, passing: MicroBatchPass) -> None:
        self._write("after_backward", passing)

    def after(self, passing: MicroBatchPass) -> None:
        self._write("after", passing)

    def after_step(self, micro_batches_per_step: int) -> None:
        self.log.append(f"{self.name} after_step {micro_batches_per_step}")

    def failed(self, error: BaseException) -> None:
        self.log.append(f"{self.name} failed")


class Two(nn.Module):
    """A model of two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).sum()  # type: ignore[no-any-return]


def batches(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    return [MicroBatch(index, torch.randn(3, WIDTH, generator=generator)) for index in range(count)]


def random_state() -> RandomState:
    return RandomState(seed=0, device=torch.device("cpu"))


def one_stage(model: Two, around: Sequence[AroundMicroBatch] = ()) -> Stage:
    return Stage(lambda micro_batch, _: Loss(model.loss(micro_batch.batch), 1, 3), around)


def two_stages(model: Two, around: Sequence[AroundMicroBatch] = ()) -> list[Stage]:
    def first(micro_batch: MicroBatch, _activations: Any) -> Any:
        return (model.first(micro_batch.batch),)

    def second(_micro_batch: MicroBatch, activations: Any) -> Any:
        return Loss(model.second(torch.tanh(activations[0].requires_grad_())).sum(), 1, 3)

    return [
        Stage(first, around, 0, 2),
        Stage(second, around, 1, 2),
    ]


def program(text: str) -> list[ScheduledPass]:
    return [ScheduledPass(each[0], int(each[1]), int(each[3])) for each in text.split()]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_model_that_is_one_stage_runs_forward_and_backward_in_turn() -> None:
    log: list[str] = []
    outer = Writes("outer", log)
    inner = Writes("inner", log)
    executor = Executor([one_stage(Two(), [outer, inner])], random_state())
    executor.in_order(batches(2), HostLossAccumulator(2, shared=False), 1.0)
    first = [
        "outer before",
        "inner before",
        "inner after_forward",
        "outer after_forward",
        "outer before_backward",
    ]
    first += [
        "inner before_backward",
        "inner after_backward",
        "outer after_backward",
        "inner after",
        "outer after",
    ]
    expected = [f"{each} 0.0" for each in first] + [f"{each} 0.0 last" for each in first]
    assert log == [*expected, "inner after_step 2", "outer after_step 2"]


@pytest.mark.parametrize(
    "text",
    [
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1",
        "F0.0 F1.0 I1.0 I0.0 F0.1 F1.1 W0.0 I1.1 W1.0 I0.1 W1.1 W0.1",
    ],
)
def test_stages_have_the_gradients_of_the_model_in_every_bit(text: str) -> None:
    whole = Two()
    model = Two()
    mine = batches(2)
    by_hand = HostLossAccumulator(2, shared=False)
    Executor([one_stage(whole)], random_state()).in_order(mine, by_hand, 0.5)
    accumulator = HostLossAccumulator(2, shared=False)
    Executor(two_stages(model), random_state()).run(
        program(text), mine, accumulator, 0.5, last=True
    )
    assert accumulator.totals() == by_hand.totals()
    assert len(gradients(model)) == 4
    assert all(
        torch.equal(one, other)
        for one, other in zip(gradients(model), gradients(whole), strict=True)
    )


def test_around_a_pass_in_two_halves_gradients_are_there_after_the_second() -> None:
    log: list[str] = []
    writes = Writes("it", log)
    executor = Executor(two_stages(Two(), [writes]), random_state())
    executor.run(
        program("F0.0 F1.0 I1.0 I0.0 W1.0 W0.0"),
        batches(1),
        HostLossAccumulator(1, shared=False),
        1.0,
        last=True,
    )
    of_last = [line.removeprefix("it ") for line in log if line.endswith("1.0 last")]
    assert [line.split()[0] for line in of_last] == [
        "before",
        "after_forward",
        "before_backward",
        "after_backward",
        "before_backward",
        "after_backward",
        "after",
    ]
    assert len(writes.passes) == 2  # one object for all passes of a micro-batch on a stage
    assert log[-2:] == ["it after_step 1", "it after_step 1"]


def test_where_halves_are_not_wanted_the_first_does_all() -> None:
    model = Two()
    log = list[str]()
    executor = Executor(two_stages(model, [Writes("it", log)]), random_state(), halves=False)
    executor.run(
        program("F0.0 F1.0 I1.0 I0.0"),
        batches(1),
        HostLossAccumulator(1, shared=False),
        1.0,
        last=False,
    )
    assert len(gradients(model)) == 4
    executor.run(
        program("F0.0 F1.0 I1.0 I0.0 W1.0 W0.0"),
        batches(1),
        HostLossAccumulator(1, shared=False),
        1.0,
        last=False,
    )
    assert sum(line.startswith("it after 1.0") for line in log) == 2
    assert not any("after_step" in line for line in log)  # neither was the last run of the step


def test_a_loss_is_weighted_by_the_gradient_with_which_its_backward_pass_starts() -> None:
    plain = Two()
    weighted = Two()
    mine = batches(2)
    Executor([one_stage(plain)], random_state()).in_order(
        mine[:1], HostLossAccumulator(2, shared=False), 1.0
    )
    dummy = MicroBatch(1, mine[1].batch, real=False)
    accumulator = HostLossAccumulator(2, shared=False)
    executor = Executor([one_stage(weighted)], random_state(), multiplier=2.0)
    executor.in_order([mine[0], dummy], accumulator, 0.25)
    for one, other in zip(gradients(weighted), gradients(plain), strict=True):
        assert torch.equal(one, other / 2)
    assert accumulator.totals()[1] == 3  # the dummy's targets count for nothing


@pytest.mark.parametrize("text", ["F0.0 F1.0 B1.0 B0.0", "F0.0 F1.0 I1.0 I0.0 W1.0 W0.0"])
def test_further_roots_are_where_a_backward_pass_begins_too(text: str) -> None:
    tokens = [torch.zeros(1, requires_grad=True) for _ in range(2)]

    class Joins(AroundMicroBatch):
        def after_forward(self, passing: MicroBatchPass) -> None:
            root = tokens[passing.stage] * 2
            passing.further_roots.append((root, torch.ones_like(root)))

    model = Two()
    executor = Executor(two_stages(model, [Joins()]), random_state())
    executor.run(program(text), batches(1), HostLossAccumulator(1, shared=False), 1.0, last=True)
    assert [token.grad.tolist() for token in tokens if token.grad is not None] == [[2.0], [2.0]]
    assert len(gradients(model)) == 4


def test_after_an_error_all_clean_up_and_the_next_step_begins_anew() -> None:
    log: list[str] = []
    model = Two()
    broken = [True]

    def forward(micro_batch: MicroBatch, _activations: Any) -> Loss:
        if broken[0] and micro_batch.index == 1:
            raise RuntimeError("mixed")
        return Loss(model.loss(micro_batch.batch), 1, 3)

    clearer = UsageError("it is explained", fix="mend it")
    around = [Explains(lambda error: clearer if str(error) == "mixed" else None), Writes("it", log)]
    executor = Executor([Stage(forward, around)], random_state())
    with pytest.raises(UsageError, match="it is explained") as raised:
        executor.in_order(batches(2), HostLossAccumulator(2, shared=False), 1.0)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert log[-1] == "it failed"
    broken[0] = False
    executor.in_order(batches(2), HostLossAccumulator(2, shared=False), 1.0)
    assert log[-1] == "it after_step 2"


def test_what_does_nothing_is_not_called() -> None:
    class Counts(AroundMicroBatch):
        def after(self, passing: MicroBatchPass) -> None:
            """Override one of them."""

    stage = one_stage(Two(), [Counts(), AroundMicroBatch()])
    assert [
        len(getattr(stage, name))
        for name in ("before", "after_forward", "before_backward", "after")
    ] == [
        0,
        0,
        0,
        1,
    ]
