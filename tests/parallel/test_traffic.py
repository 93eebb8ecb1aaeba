"""Bytes on the link between two hosts: what strategies and compressions send, and when."""

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config import config_from
from lockstep.parallel.comm.compression import ROUNDS, WARM_UP_STEPS, sent_numbers
from lockstep.trainer import Trainer
from lockstep.trainer.run_monitor import Announcer
from tests.hosts import hosts, require_root, sent_bytes
from tests.parity.link import all_of
from tests.parity.toy import Tokens, language_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.root

KIND = "distributed.ddp.compression.kind"
RANK = 2
MEASURED = 2
POWERSGD = {"distributed.ddp.compression.rank": RANK, "distributed.ddp.compression.start_step": 2}
LEAST = 0.99  # of theory: what TCP repeats is taken off in whole segments, and some are short
SIZE = {"n_embd": 128, "n_layer": 3, "mlp_hidden": 512}


def trainer_with(settings: dict[str, Any], accumulation: int = 1) -> Trainer:
    common = {
        "training.batch_size": 1,
        "training.gradient_accumulation_steps": accumulation,
        "training.max_steps": 50,
        "precision.mode": "fp32",
        "distributed.strategy": "ddp",
    }
    return Trainer(
        language_model("transformer", **SIZE), config=config_from({**common, **settings})
    )


def settled() -> int:
    """Bytes sent so far, once nothing is on its way any more."""
    time.sleep(0.3)
    return sent_bytes()


def bytes_per_step(kind: str) -> dict[str, float]:
    trainer = trainer_with({KIND: kind, **(POWERSGD if kind == "powersgd" else {})})
    shapes = {name: tuple(p.shape) for name, p in trainer.placed.parameters.items()}
    steps = trainer.steps(Tokens())
    for _ in range(3):  # DDP cuts its buckets anew, PowerSGD begins
        next(steps)
    before = settled()
    for _ in range(MEASURED):
        next(steps)
    dist.barrier()
    sent = (settled() - before) / MEASURED
    ranks = dist.get_world_size()
    return {
        "sent": sent,
        "calculated": 4 * sent_numbers(shapes, kind, RANK) * 2 * (ranks - 1) / ranks,
    }


def bytes_by_micro_batch(settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes that this host sends in each call of an accumulated step, the second step of a run."""
    trainer = trainer_with({**settings, "training.batch_size": 2}, accumulation=3)
    trainer.loss_check.skip()  # it gathers parameters in the first three steps
    # samples of its own, as a loop with a DistributedSampler brings them
    first = 2 * dist.get_rank()
    items = [Tokens()[first + i] for i in range(2)]
    batch: dict[str, Tensor] = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    sent = []
    for _ in range(6):
        dist.barrier()
        before = settled()
        trainer.training_step(batch)
        dist.barrier()
        sent.append(settled() - before)
    return {"sent": sent[3:], "gradients": 4 * trainer.placed.num_parameters}


def bytes_of_samples(accumulation: int) -> int:
    """Bytes that this host sends while both train 24 samples, one at a time, in steps of so many
    micro-batches each.
    """
    trainer = trainer_with({}, accumulation)
    trainer.loss_check.skip()
    steps = trainer.steps(Tokens())
    for _ in range(2):  # DDP cuts its buckets anew
        next(steps)
    dist.barrier()
    before = settled()
    for _ in range(12 // accumulation):
        next(steps)
    dist.barrier()
    return settled() - before


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {
        kind: bytes_per_step(kind) for kind in ("none", "fp16", "bf16", "powersgd")
    }
    found["samples"] = {accumulation: bytes_of_samples(accumulation) for accumulation in (1, 4)}
    found["ddp"] = bytes_by_micro_batch({})
    found["accelerate"] = bytes_by_micro_batch({"distributed.strategy": "accelerate"})
    found["unsharded"] = bytes_by_micro_batch(
        {"distributed.strategy": "fsdp", "distributed.fsdp.accumulate": "unsharded"}
    )
    return found


def on_four_ranks() -> dict[str, Any]:
    """Shards within a host, replicas over the link."""
    settings = {
        "distributed.strategy": "fsdp",
        "distributed.fsdp.sharding_strategy": "hybrid_shard",
    }
    return bytes_by_micro_batch({**settings, "distributed.shard_size": 2})


def what_auto_chooses() -> list[str]:
    """What is said at start, and what each rank is to say after the steps in which it is tried."""
    trainer = trainer_with({KIND: "auto"})
    said: list[str] = []
    with patch.object(Announcer, "say", lambda _announcer, *lines: said.extend(lines)):
        for _ in zip(range(1 + WARM_UP_STEPS + 2 * ROUNDS), trainer.steps(Tokens()), strict=False):
            pass
    return [*trainer.placed.log_lines, *said]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    require_root()
    with hosts(2) as both:
        return run_ranks(on_two_ranks, 2, on=both)


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16", "powersgd"])
def test_trap_62_a_compression_sends_the_bytes_that_it_is_calculated_to(
    found: list[dict[str, Any]], kind: str
) -> None:
    """Headers of TCP and IP, and the small all-reduces of loss and norm, come on top."""
    for rank in found:
        sent = rank[kind]["sent"]
        calculated = rank[kind]["calculated"]
        assert LEAST * calculated <= sent < 1.05 * calculated + 10_000, (sent, calculated)


def test_trap_62_auto_compresses_on_a_slow_link() -> None:
    """Both ranks agree; on a link without a limit gloo's sums would eat up the gain."""
    require_root()
    with hosts(2, rate="100mbit") as both:
        for lines in run_ranks(what_auto_chooses, 2, on=both):
            assert any(
                "compression auto: the first 13 steps take turns" in line for line in lines
            ), lines
            assert any("compression auto: bf16, as a step takes" in line for line in lines), lines


def test_compressions_send_less(found: list[dict[str, Any]]) -> None:
    whole = found[0]["none"]["sent"]
    assert found[0]["bf16"]["sent"] < 0.55 * whole
    assert found[0]["powersgd"]["sent"] < 0.15 * whole


def test_accumulation_divides_what_a_sample_costs_the_link(found: list[dict[str, Any]]) -> None:
    """Four micro-batches a step: a quarter of the steps for as many samples, and of the bytes."""
    for rank in found:
        assert rank["samples"][4] == pytest.approx(rank["samples"][1] / 4, rel=0.05), rank[
            "samples"
        ]


@pytest.mark.parametrize("strategy", ["ddp", "accelerate"])
def test_trap_02_no_gradient_is_sent_before_the_last_micro_batch(
    found: list[dict[str, Any]], strategy: str
) -> None:
    """Synchronising on each of k micro-batches sends k times the bytes."""
    for rank in found:
        *early, last = rank[strategy]["sent"]
        assert max(early) < 20_000, early
        assert (
            LEAST * rank[strategy]["gradients"]
            <= last
            < 1.05 * rank[strategy]["gradients"] + 20_000
        )


def test_fsdp_unsharded_gathers_parameters_each_time_and_reduces_gradients_once(
    found: list[dict[str, Any]],
) -> None:
    """Two ranks: a gather of the parameters sends half of them, and blocks are gathered for forward
    and backward.
    """
    for rank in found:
        *early, last = rank["unsharded"]["sent"]
        gradients = rank["unsharded"]["gradients"]
        assert max(early) < 1.1 * gradients
        assert last > max(early) + 0.45 * gradients


@pytest.mark.full  # replicas and shards apart are above
def test_trap_02_replicas_of_shards_send_nothing_before_the_last_micro_batch() -> None:
    require_root()
    with hosts(2) as both:
        for rank in run_ranks(on_four_ranks, 4, on=both):
            *early, last = rank["sent"]
            assert max(early) < 50_000, early
            assert last > 0.9 * rank["gradients"]


@pytest.mark.parametrize(
    "topologies",
    [["fsdp:2"], pytest.param(["ddp:2", "pipeline:2"], marks=pytest.mark.full)],
    ids="*".join,
)
def test_the_same_bits_cost_no_traffic(topologies: list[str]) -> None:
    """An all-to-all and an all-gather send what an all-reduce does; pipelines send what they always
    do.

    Shards send less than in plain mode here: gloo's reduce-scatter is an all-reduce of which a part
    is kept.
    """
    require_root()
    with hosts(2) as both:
        for rank in run_ranks(all_of, 2, topologies, 1, 2, 2, on=both):
            for topology, found in zip(topologies, rank, strict=True):
                plain, exact = found["bytes"]
                assert plain > 100_000, topology
                assert exact < 1.03 * plain, (topology, plain, exact)
                assert exact > 0.97 * plain or topology == "fsdp:2"


@pytest.mark.full
def test_three_replicas_send_no_more_where_each_has_one_partial_sum() -> None:
    """Of four micro-batches one of three ranks runs two, which are one node of the tree."""
    require_root()
    with hosts(3) as all_hosts:
        ranks = [rank[0]["bytes"] for rank in run_ranks(all_of, 3, ["ddp:3"], 1, 3, on=all_hosts)]
    plain, exact = (max(rank[side] for rank in ranks) for side in (0, 1))
    assert abs(exact / plain - 1) < 0.05
