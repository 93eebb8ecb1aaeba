"""Pipelines take the step of one process: models × schedules × layouts, dropout on, uneven masks,
short steps.
"""

from functools import cache

import pytest

from lockstep.models.protocol import require_segments
from tests.parallel.pipeline.pipeline_launch import case_name, launched
from tests.parity.pipelines import MODELS, Case, Result, difference, grid, run, run_all
from tests.ranks import run_ranks
from tests.sampled import quick_and_full

TOLERANCE = 1e-5  # of fp32 sums in another order, over 3 steps of AdamW and an evaluation


@cache
def alone(model: str) -> Result:
    return run(model, {})


@pytest.mark.parametrize(
    "case", [c for ranks in (2, 4) for c in grid(ranks, whole=False)], ids=case_name
)
def test_a_model_a_schedule_and_a_layout(case: Case) -> None:
    expected = alone(case.model)
    for rank in launched(case.ranks):
        result = rank[case_name(case)]
        assert difference(result, expected) < TOLERANCE
        assert result.num_parameters == expected.num_parameters


@pytest.mark.parametrize(
    "case",
    [
        c
        for ranks in (2, 4)
        for c in grid(ranks, whole=False)
        if c.layout in ("pipeline:2", "pipeline:4")
    ],
    ids=case_name,
)
def test_no_rank_holds_another_stages_parameters(case: Case) -> None:
    """The process holds only parameters of its own stages with values, as a measurement shows.

    For BDH, the rank with the first and the last stage holds all parameters.
    """
    results = [rank[case_name(case)] for rank in launched(case.ranks)]
    for result in results:
        assert result.alive == sum(result.held.values())
        assert result.alive < result.num_parameters or case.model == "bdh"
    everywhere = {name for result in results for name in result.held}
    assert (
        sum(max(r.held.get(name, 0) for r in results) for name in everywhere)
        == results[0].num_parameters
    )


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_grid(ranks: int) -> None:
    cases = list(grid(ranks, whole=True))
    results = run_ranks(run_all, ranks, cases, timeout=3000)
    wrong = [
        f"rank {rank} {case_name(case)}: off by {difference(result, alone(case.model)):.1e}"
        for rank, of_rank in enumerate(results)
        for case, result in zip(cases, of_rank, strict=True)
        if not difference(result, alone(case.model)) < TOLERANCE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", quick_and_full(MODELS, [name for name in MODELS if name != "traced"])
)
def test_each_model_is_long_enough_for_two_stages_on_each_of_four_ranks(name: str) -> None:
    assert len(require_segments(MODELS[name].make())) >= 8
