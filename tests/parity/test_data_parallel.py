"""Every data-parallel strategy takes the step that one process takes: the parity matrix."""

import pytest

from tests.parity.matrix import run
from tests.parity.parts import Part, exact, one_rank, outcome, parts


def check(part: Part, timeout: float = 900) -> None:
    """All cases in one launch; whatever fails is told at the end, with the rest."""
    problems = [found.problem for found in part.run(timeout) if found.problem]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_and_model_in_turn_with_accumulation_and_checkpointing(ranks: int) -> None:
    check(Part("fp32", ranks, exact(ranks, whole=False)))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", parts(whole=True), ids=lambda part: f"{part.name} on {part.ranks}")
def test_the_whole_matrix(part: Part) -> None:
    """Strategies × models × 1, 2, 4 ranks × accumulation × checkpointing; half precision; compiled;
    8 ranks.
    """
    check(part, timeout=3600)


@pytest.mark.parametrize("strategy", sorted({case.strategy for case in one_rank(whole=False)}))
def test_trap_17_one_rank_says_what_it_did(strategy: str) -> None:
    """A strategy that silently does nothing on one process, or that trains models apart."""
    for case in one_rank(whole=False):
        if case.strategy == strategy:
            result = run(case, case.micro_batches(1))
            assert not outcome(case, 1, [result]).problem
            assert any("nothing to" in line for line in result.log_lines), result.log_lines
