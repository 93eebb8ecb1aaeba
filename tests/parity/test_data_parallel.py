"""Every data-parallel strategy takes the step that one process takes: the parity matrix."""

import pytest

from tests.parity.matrix import MODELS, Case, Result, difference, grid, reference, run, run_all
from tests.ranks import run_ranks

TOLERANCE = 1e-5  # of fp32 sums in another order, over 5 steps of AdamW


def alone(model: str, micro_batches: int) -> Result:
    return reference(Case(model, "single", 1, "none"), micro_batches)


def compare(ranks: int, cases: list[Case]) -> None:
    """All cases in one launch; whatever fails is told at the end, with the rest."""
    wrong = []
    for rank, results in enumerate(run_ranks(run_all, ranks, cases, timeout=900)):
        for case, result in zip(cases, results, strict=True):
            expected = alone(case.model, case.micro_batches(ranks))
            if isinstance(result, str):
                wrong.append(f"rank {rank} {case}: {result}")
            elif difference(result, expected) > TOLERANCE:
                wrong.append(f"rank {rank} {case}: off by {difference(result, expected):.1e}")
            elif result.num_parameters != expected.num_parameters:
                wrong.append(f"rank {rank} {case}: {result.num_parameters} parameters")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_and_model_in_turn_with_accumulation_and_checkpointing(ranks: int) -> None:
    compare(ranks, list(grid(ranks, whole=False)))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_grid(ranks: int) -> None:
    compare(ranks, list(grid(ranks, whole=True)))


@pytest.mark.full
def test_eight_ranks() -> None:
    compare(8, [case for case in grid(8, whole=True) if case.model == "tied"])


@pytest.mark.parametrize("strategy", ["dp", "ddp", "full_shard", "shard_grad_op", "no_shard", "accelerate"])
def test_trap_17_one_rank_says_what_it_did(strategy: str) -> None:
    """A strategy that silently does nothing on one process, or that trains models apart."""
    for model in MODELS if strategy == "full_shard" else ["transformer"]:
        result = run(Case(model, strategy, 3, "full"), 3)
        assert difference(result, alone(model, 3)) < TOLERANCE
        assert result.num_parameters == alone(model, 3).num_parameters
        assert any("nothing to" in line for line in result.notices), result.notices
