"""Replicas that drift apart stop the run, and are named."""

import re
import socket
from typing import Any

import pytest
import torch

from benchmarks.divergence_guard import seconds_of_step_and_check
from lockstep.errors import RunError
from lockstep.tensors import fingerprint
from tests.parity.same_bits import trainer_for
from tests.parity.toy import Tokens
from tests.ranks import run_ranks

PLAIN: dict[str, Any] = {"distributed.reproducible": False, "distributed.divergence_check_steps": 2}
WHOLE_TENSOR = 5  # steps of a run in which a rank changes all of the tensor
OFF = {**PLAIN, "distributed.divergence_check_steps": None}
NAME = "layers.1.mlp.down.weight"

# case → (topology, settings, rank on which a bit flips, parameter in which it does)
CASES: dict[str, tuple[str, dict[str, Any], int | None, str]] = {
    "flipped": ("ddp:4", PLAIN, 2, NAME),
    "sound": ("ddp:4", PLAIN, None, NAME),
    "unguarded": ("ddp:4", OFF, 2, NAME),
    "hybrid": ("hybrid:2x2", PLAIN, 3, "embed.weight"),
    "unsynchronised": ("ddp:4", {**PLAIN, "training.max_steps": WHOLE_TENSOR}, 2, NAME),
    "repaired": ("ddp:4", {**PLAIN, "distributed.divergence_action": "repair"}, 2, NAME),
}


def stopped(topology: str, settings: dict[str, Any], rank: int | None, name: str) -> str:
    """What a run says in which one bit of one parameter flips on one rank after the third step.

    A bit in the middle of the mantissa: the next update may round the last one away, and all is
    well again.
    """
    trainer = trainer_for(topology, "transformer", {"training.max_steps": 6, **settings})
    try:
        for record in trainer.steps(Tokens()):
            if record.step == 3 and torch.distributed.get_rank() == rank:
                local = trainer.placed.parameters[name].detach()
                flat = getattr(local, "to_local", lambda local=local: local)().reshape(-1)
                flat[-1:].view(torch.int32).bitwise_xor_(1 << 12)
                if settings.get("training.max_steps") == WHOLE_TENSOR:
                    local.mul_(1.01)
    except RunError as error:
        return f"step {trainer.step.progress.step}: {error}"
    return f"step {trainer.step.progress.step}: done"


def on_ranks() -> tuple[dict[str, str], tuple[float, float]]:
    said = {}
    for name, case in CASES.items():
        said[name] = stopped(*case)
        torch.distributed.barrier()
    trainer = trainer_for("ddp:4", "transformer", {"training.max_steps": 12, **OFF})
    return said, seconds_of_step_and_check(trainer, Tokens(), steps=10)


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, str], tuple[float, float]]]:
    return run_ranks(on_ranks, 4)


def test_a_flipped_bit_stops_all_ranks_and_names_rank_and_parameter(ranks: list[Any]) -> None:
    for said, _ in ranks:
        assert said["flipped"].startswith("step 4: ")
        assert f"rank 2 differs from the other replicas in {NAME}\n" in said["flipped"]
        assert "after step 4" in said["flipped"]
        assert said["sound"] == said["unguarded"] == "step 6: done"


def test_a_flipped_bit_is_told_from_software_with_its_host(ranks: list[Any]) -> None:
    for said, _ in ranks:
        assert f"on host {socket.gethostname()}\n" in said["flipped"]
        assert re.search(r"why: 1 of \d+ elements differ", said["flipped"])
        assert "a bit has flipped in memory" in said["flipped"]
        assert "were not reduced in some step" in said["unsynchronised"]


def test_a_flipped_bit_is_put_back_if_asked(ranks: list[Any]) -> None:
    for said, _ in ranks:
        assert said["repaired"] == "step 6: done"


def test_replicas_of_shards_are_compared_shard_by_shard(ranks: list[Any]) -> None:
    """Two replicas can't outvote each other: both are named, on the ranks of the other
    shard, too.
    """
    for said, _ in ranks:
        assert said["hybrid"].startswith(
            "step 4: the replicas on ranks 1, 3 differ from each other in embed.weight\n"
        )


def test_the_guard_costs_next_to_nothing(ranks: list[Any]) -> None:
    """At the default of a check every 100 steps; these steps are as short as steps get."""
    for _, (step, check) in ranks:
        assert check / 100 < 0.01 * step, f"a check takes {check:.2g} s, a step {step:.2g} s"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_a_fingerprint_sees_one_bit(dtype: torch.dtype) -> None:
    tensor = torch.zeros(33, dtype=dtype)
    before = fingerprint(tensor)
    tensor[7] = 1
    assert fingerprint(tensor) != before
    assert fingerprint(torch.empty(0, dtype=dtype)).item() == 0
    assert fingerprint(tensor.expand(2, 33).T) == 2 * fingerprint(tensor)


def test_one_replica_has_nothing_to_be_compared_with() -> None:
    trainer = trainer_for(
        "single", "transformer", {"training.max_steps": 1, "training.warmup_steps": 0, **PLAIN}
    )
    assert (
        "warning: divergence_check_steps: one replica, nothing to compare"
        in trainer.placed.log_lines
    )
