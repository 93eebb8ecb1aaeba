"""What a rank holds under FSDP, counted; and a model that does not fit into one process but into
four.
"""

from typing import Any

import pytest

from tests.parallel.memory import HEADROOM, held_in_each, train_within_a_limit
from tests.ranks import run_ranks

FSDP = {"distributed.strategy": "fsdp"}
KIND = "distributed.fsdp.sharding_strategy"
CASES = [
    FSDP,
    {**FSDP, "distributed.fsdp.accumulate": "unsharded"},
    {"distributed.strategy": "ddp"},
]
OTHER_KINDS = [{**FSDP, KIND: "shard_grad_op"}, {**FSDP, KIND: "no_shard"}]


@pytest.fixture(scope="module")
def held() -> list[list[dict[str, Any]]]:
    return run_ranks(held_in_each, 4, CASES)


@pytest.mark.full
def test_a_rank_holds_its_share_and_one_gathered_unit(held: list[list[dict[str, Any]]]) -> None:
    """Parameters, gradients and AdamW's two states: 16 bytes a parameter, over the ranks; gradients
    too, in between.

    Without reduction of each micro-batch's gradients (`accumulate: unsharded`) a rank holds those
    of the whole model.
    """
    for sharded, unsharded, replica in held:
        parameters = sharded["parameters"]
        allowed = 1.05 * (4 * parameters / 4 + sharded["unit"])
        assert 4 * parameters / 4 * 0.99 < sharded["at update"] < allowed
        assert max(sharded["between"]) < allowed
        assert min(unsharded["between"]) > sharded["at update"] + 0.7 * parameters
        assert replica["at update"] > 3.95 * parameters


@pytest.mark.full
def test_the_order_of_strategies_by_memory_is_the_documented_one(
    held: list[list[dict[str, Any]]],
) -> None:
    """`shard_grad_op` gathers the parameters for the forward and backward pass, `full_shard` a unit
    at a time.
    """
    others = run_ranks(held_in_each, 4, OTHER_KINDS)
    for (full, _, replica), (gathered, unsharded) in zip(held, others, strict=True):
        parameters = full["parameters"]
        assert full["at loss"] < 0.25 * 3 * parameters + 2.5 * full["unit"], full
        assert full["at loss"] + 0.5 * parameters < gathered["at loss"], (full, gathered)
        for replicas in (unsharded, replica):
            assert gathered["at loss"] + 0.5 * parameters < replicas["at loss"], (
                gathered,
                replicas,
            )
            assert gathered["at update"] < 0.3 * replicas["at update"], (gathered, replicas)


@pytest.mark.full
def test_fsdp_trains_what_one_process_can_not(capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on each process's data: 100 MB of parameters take 400 MB to train, and each process
    may have 230 more.
    """
    [alone] = run_ranks(train_within_a_limit, 1, {"distributed.strategy": "single"})
    assert "alloc" in alone["error"] or "memory" in alone["error"], alone
    ranks = run_ranks(train_within_a_limit, 4, FSDP)
    for rank in ranks:
        assert "error" not in rank, rank
        assert rank["parameters"] > 24e6
        assert rank["losses"][1] < rank["losses"][0]
        assert rank["data"] < HEADROOM
    shown = ranks[0]
    resident = ", ".join(f"{bytes_ / 2**20:.0f}" for bytes_ in shown["resident"])
    with capsys.disabled():
        print(
            f"\nfsdp:4 trains {shown['parameters']:,} parameters in {resident} MiB per rank, beside"
            " the interpreter"
        )
