"""Losses and counts that travel with DDP's gradients are what an all-reduce of their own gives."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lockstep import Trainer
from lockstep.parallel.axes import replicate
from lockstep.parallel.loss_accumulator import _ROOM, CarriedFigures
from tests.ranks import run_ranks
from tests.sampled import chosen, quick_and_full

Figures = tuple[list[float], list[float]]


def carried(*of_ranks: Figures) -> list[Figures]:
    """What each rank gets, where DDP's mean is made by hand."""
    carriers = [CarriedFigures(rank, len(of_ranks)) for rank in range(len(of_ranks))]
    mean = torch.zeros_like(carriers[0].figures)
    for carrier, (losses, counts) in zip(carriers, of_ranks, strict=True):
        has_room, root, gradient = carrier.send(losses, counts)
        assert has_room
        torch.autograd.backward(root, gradient)
        assert carrier.figures.grad is not None
        mean += carrier.figures.grad / len(of_ranks)
    for carrier in carriers:
        carrier.figures.grad = mean.detach().clone()
    return [carrier.received(len(of_ranks[0][0]) - 2) for carrier in carriers]


def test_what_ranks_send_is_summed() -> None:
    found = carried(
        ([6.0, 0.0, 5000.0, 0.0], [3.0, 0.0, 0.0, 7.0]),
        ([0.0, 8.0, 300.0, 1.0], [0.0, 4.0, 0.0, 7.0]),
    )
    assert found == [([6.0, 8.0, 5300.0, 1.0], [3.0, 4.0, 0.0, 14.0])] * 2


def test_large_numbers_arrive_exactly() -> None:
    losses = [3.4e38, 1.1754943508222875e-37, 2.0**40 + 12345.0, 0.0]
    counts = [2.0**47 + 2.0**25 + 1.0, 0.1 + 2.0**-40, 0.0, 2.0**31 + 77.0]
    nothing: Figures = ([0.0, 0.0, 2.0**41 + 4095.0, 1.0], [0.0, 0.0, 0.0, 2.0**31 + 77.0])
    (summed, found), *_ = carried((losses, counts), nothing, nothing, nothing)
    assert summed[0] == pytest.approx(losses[0], rel=1e-14)
    assert summed[1] == losses[1]
    assert summed[2:] == [2.0**40 + 12345.0 + 3 * (2.0**41 + 4095.0), 3.0]
    assert found == [counts[0], pytest.approx(counts[1], rel=1e-14), 0.0, 4 * (2.0**31 + 77.0)]


def test_numbers_that_are_none_stay_in_their_place() -> None:
    (losses, _), _ = carried(
        ([math.nan, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0]),
        ([0.0, 0.0, math.inf, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 1.0]),
    )
    assert math.isnan(losses[0])
    assert losses[1:] == [1.0, math.inf, 0.0, 0.0]


def test_more_micro_batches_than_there_is_room_for_are_not_carried() -> None:
    carrier = CarriedFigures(0, 2)
    has_room, _, gradient = carrier.send([1.0] * (_ROOM + 3), [1.0] * (_ROOM + 3))
    assert not has_room
    assert not gradient.any()


# ---- in a run ----

SAMPLES = 264
CASES: dict[str, dict[str, Any]] = {
    "usual": {"global_batch_size": 8},
    "uneven": {"global_batch_size": 12},  # three micro-batches for two ranks
    "many": {"global_batch_size": 264},  # 66 micro-batches
    "fp16": {"global_batch_size": 8, "precision": "fp16"},
}


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator)
    y = torch.randint(0, 5, (SAMPLES,), generator=generator)
    y[::7] = -100  # uneven counts
    return list(zip(x, y, strict=True))


def trainer(data: Any, *, is_carried: bool, **settings: Any) -> tuple[Trainer, Iterator[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    usual = replicate._carried_figures
    if not is_carried:
        replicate._carried_figures = lambda *_: None
    try:
        made = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            max_steps=4,
            strategy="ddp",
            device="cpu",
            **settings,
        )
    finally:
        replicate._carried_figures = usual
    assert (made.placed.carried_figures is not None) == is_carried
    return made, made.steps(DataLoader(data, batch_size=4))


def seen(case: str, *, is_carried: bool) -> tuple[list[Any], list[float], int]:
    """Each step's figures, the weights in the end, and the last step's all-reduces."""
    made, steps = trainer(samples(), is_carried=is_carried, **CASES[case])
    records: list[Any] = []
    calls = 0
    for number in range(4):
        if number < 3:
            record = next(steps)
        else:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                record = next(steps)
            named = Counter(event.name for event in profiled.events() or ())
            calls = sum(count for name, count in named.items() if name == "gloo:all_reduce")
        records.append((float(record.loss), float(record.tokens), record.skipped))
        if record.step == 3:
            records.append(float(made.evaluate(samples()[:8])))
    weights = [p.sum().item() for p in made.placed.parameters.values()]
    return records, weights, calls


QUICK = ("uneven", "many")


def both(cases: list[str]) -> dict[str, Any]:
    return {
        case: [seen(case, is_carried=is_carried) for is_carried in (True, False)] for case in cases
    }


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(both, 2, chosen(request, "case"))


@pytest.mark.parametrize("case", quick_and_full(CASES, QUICK))
def test_carried_figures_are_those_of_an_all_reduce(case: str, runs: list[dict[str, Any]]) -> None:
    (carried_here, apart), (on_the_other, _) = (run[case] for run in runs)
    assert carried_here[:2] == apart[:2] == on_the_other[:2]


@pytest.mark.parametrize("case", quick_and_full(CASES, QUICK))
def test_a_step_makes_no_all_reduce_besides_that_of_its_gradients(
    case: str, runs: list[dict[str, Any]]
) -> None:
    (_, _, calls), (_, _, apart) = runs[0][case]
    assert (calls, apart - calls) == ((2, 0) if case == "many" else (1, 1))


def told() -> tuple[str, list[int]]:
    """A loss that is not finite, in the third step; and a stop that one rank is asked for."""
    data = samples()
    data[19] = (torch.full((6,), math.nan), torch.tensor(1))
    _, steps = trainer(data, is_carried=True, global_batch_size=8)
    try:
        list(steps)
        message = ""
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    made, steps = trainer(samples(), is_carried=True, global_batch_size=8)
    taken = []
    for record in steps:
        taken.append(record.step)
        if record.step == 2 and made.placed.layout.world_size == 2 and torch.distributed.get_rank():
            made.step.ask_to_stop()
    return message, taken


def test_a_loss_that_is_not_finite_is_told_at_its_step_and_a_vote_is_heard() -> None:
    for message, taken in run_ranks(told, 2):
        assert message.startswith("BadNumbersError")
        assert "step 3" in message
        assert taken == [1, 2, 3]
