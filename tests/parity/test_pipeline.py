"""Pipelines take the step of one process: models × schedules × layouts, dropout on, uneven masks, short steps."""

from functools import cache

import pytest

from tests.parity.pipelines import Case, Result, difference, grid, run, run_all
from tests.ranks import run_ranks

TOLERANCE = 1e-5  # of fp32 sums in another order, over 5 steps of AdamW


@cache
def alone(model: str) -> Result:
    return run(model, {})


def compare(cases: list[Case]) -> list[list[Result]]:
    """All cases in one launch; whatever is off is told at the end, with the rest."""
    results = run_ranks(run_all, cases[0].ranks, cases, timeout=1500)
    wrong = [
        f"rank {rank} {case}: off by {difference(result, alone(case.model)):.1e}"
        for rank, of_rank in enumerate(results)
        for case, result in zip(cases, of_rank, strict=True)
        if not difference(result, alone(case.model)) < TOLERANCE
    ]
    assert not wrong, "\n".join(wrong)
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_models_schedules_and_layouts_in_turn(ranks: int) -> None:
    cases = list(grid(ranks, whole=False))
    for of_rank in compare(cases):
        for case, result in zip(cases, of_rank, strict=True):
            assert result.num_parameters == alone(case.model).num_parameters, case


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_grid(ranks: int) -> None:
    compare(list(grid(ranks, whole=True)))
