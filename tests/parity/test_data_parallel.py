"""Every data-parallel strategy takes the step that one process takes: the parity matrix."""

import pytest

from tests.parity.matrix import Case, run
from tests.parity.parts import Part, exact, one_rank, outcome, parts, parts_of_make_test

ON_ONE_RANK, ON_TWO_RANKS, _ = parts_of_make_test()


def check(part: Part, timeout: float = 900) -> None:
    """All cases in one launch; whatever fails is told at the end, with the rest."""
    problems = [found.problem for found in part.run(timeout) if found.problem]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ON_TWO_RANKS.cases, id="some"),
        pytest.param(
            [case for case in exact(2, whole=False) if case not in ON_TWO_RANKS.cases],
            id="rest",
            marks=pytest.mark.full,
        ),
    ],
)
def test_strategies_and_models_in_turn_on_two_ranks(cases: list[Case]) -> None:
    """With accumulation and checkpointing, which take turns, too."""
    check(Part("fp32", 2, cases))


@pytest.mark.full  # tests/faults/test_loads.py trains on shards and on both axes of four ranks
def test_strategies_and_models_in_turn_on_four_ranks() -> None:
    check(Part("fp32", 4, exact(4, whole=False)))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", parts(), ids=lambda part: f"{part.name} on {part.ranks}")
def test_the_whole_matrix(part: Part) -> None:
    """Strategies × models × 1, 2, 4 ranks × accumulation × checkpointing; half precision; compiled;
    8 ranks.
    """
    check(part, timeout=3600)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.strategy}, {case.model}",
            marks=() if case in ON_ONE_RANK.cases else pytest.mark.full,
        )
        for case in one_rank(whole=False)
    ],
)
def test_trap_17_one_rank_says_what_it_did(case: Case) -> None:
    """A strategy that silently does nothing on one process, or that trains models apart."""
    result = run(case, case.micro_batches(1))
    assert not outcome(case, 1, [result]).problem
    assert any("nothing to" in line for line in result.log_lines), result.log_lines
