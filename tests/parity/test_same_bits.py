"""`distributed.reproducible`: one digest, whatever the number of ranks and the strategy."""

from typing import Any

import pytest

from tests.parity.same_bits import bits, many, of_one_process
from tests.ranks import run_ranks
from tests.sampled import sampled

MODELS = ("bdh", "transformer", "free_transformer")
PRECISIONS = ("fp32", "bf16")
TOPOLOGIES = {
    2: ("ddp:2", "fsdp:2", "pipeline:2"),
    4: ("ddp:4", "fsdp:4", "hybrid:2x2", "pipeline:2*ddp:2"),
}


def grid(
    ranks: int, samples: int, layers: int, steps: int, *, whole: bool = True
) -> list[tuple[Any, ...]]:
    """So many steps of so many samples; unless `whole`, one combination in three of model,
    precision and topology.
    """
    return [
        (topology, model, setting, steps, {"n_layer": layers})
        for i, model in enumerate(MODELS)
        for j, precision in enumerate(PRECISIONS)
        for setting in [{"precision.mode": precision, "training.global_batch_size": samples}]
        for k, topology in enumerate(TOPOLOGIES[ranks])
        if whole or (i + j + k) % 3 == 0
    ]


def without_pipeline(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if ".pipeline." not in key}


def check(ranks: int, cases: list[tuple[Any, ...]], timeout: float = 300) -> None:
    """Every case on every rank against one process."""
    for results in run_ranks(many, ranks, cases, timeout=timeout):
        for (topology, *rest), (digest, records) in zip(cases, results, strict=True):
            model, settings, *others = rest
            reference, reference_records = of_one_process(
                (model, without_pipeline(settings), *others)
            )
            assert records == reference_records, (topology, rest)
            assert digest == reference, (topology, rest)


@sampled("cases", grid(2, samples=8, layers=2, steps=2, whole=False), 3)
def test_one_digest_on_two_ranks(cases: list[tuple[Any, ...]]) -> None:
    """Dropout, clipping; after 2 steps parameters, optimizer state, losses and norms are equal in
    every bit.
    """
    check(2, cases)


@pytest.mark.full  # test_change_of_topology goes through all of these topologies
def test_one_digest_on_four_ranks() -> None:
    check(4, grid(4, samples=8, layers=2, steps=2, whole=False))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_digest_of_more_and_larger_steps(ranks: int) -> None:
    """50 steps; of one micro-batch or of two to four a rank, of one layer or of two a stage."""
    check(ranks, grid(ranks, samples=8, layers=2, steps=50), timeout=1800)
    check(ranks, grid(ranks, samples=16, layers=4, steps=50), timeout=1800)


NO_SHARD = {"distributed.strategy": "fsdp", "distributed.fsdp.sharding_strategy": "no_shard"}
ON_THREE: list[tuple[Any, ...]] = [
    ("ddp:3", "transformer", {"training.global_batch_size": 22}, 4, {"tie_embeddings": True}),
    ("ddp:3", "bdh", NO_SHARD, 2),
    (
        "ddp:3",
        "transformer",
        {"precision.mode": "fp16", "training.gradient_checkpointing": "full"},
        2,
    ),
    ("fsdp:3", "transformer", {"training.global_batch_size": 24}, 4, {"tie_embeddings": True}),
    ("fsdp:3", "transformer", {"training.gradient_checkpointing": "selective"}, 2),
]


@sampled("cases", ON_THREE, 8)
def test_ragged_steps_and_odd_numbers_of_ranks(cases: list[tuple[Any, ...]]) -> None:
    """83 samples in steps of 11 or 12 micro-batches, on 3 ranks, tied weights: extra partial sums,
    the same bits.

    The fourth step is the epoch's short one.
    """
    check(3, cases)


SCHEDULE = "distributed.pipeline.schedule"
STAGES = "distributed.pipeline.stages_per_rank"


TIED = {"tie_embeddings": True}
SHARED: list[tuple[Any, ...]] = [
    ("pipeline:2", "transformer", {}, 2, TIED),
    ("pipeline:2", "bdh", {SCHEDULE: "GPipe", "training.global_batch_size": 22}, 2),
    ("pipeline:2", "bdh", {SCHEDULE: "Interleaved1F1B", STAGES: 2}, 2),
    ("pipeline:2", "transformer", {SCHEDULE: "Interleaved1F1B", STAGES: 2}, 2, TIED),
    ("pipeline:2", "transformer", {SCHEDULE: "ZBVZeroBubble", STAGES: 2}, 2),
    (
        "pipeline:2",
        "transformer",
        {"training.gradient_checkpointing": "full", "precision.mode": "fp16"},
        2,
    ),
]


@sampled("cases", SHARED, 2)
def test_pipelines_and_weights_that_stages_share(cases: list[tuple[Any, ...]]) -> None:
    """BDH's layers and tied embeddings: a running sum of gradients goes from stage to stage with
    each micro-batch.
    """
    check(2, cases)


SIDE_BY_SIDE: list[tuple[Any, ...]] = [
    ("pipeline:2*fsdp:2", "transformer", {"training.global_batch_size": 22}, 2, TIED),
    ("pipeline:2*fsdp:2", "bdh", {}, 3),
    ("pipeline:4", "transformer", {}, 2, TIED),
    ("pipeline:2*fsdp:2", "free_transformer", {}, 3),
    ("pipeline:2*ddp:2", "transformer", {"training.global_batch_size": 22}, 4, TIED),
]


@pytest.mark.full  # test_change_of_topology and test_mixture have pipelines beside both
def test_pipelines_side_by_side() -> None:
    """Replicated or sharded, with numbers of micro-batches that they can't share out evenly, or
    over four stages.
    """
    check(4, SIDE_BY_SIDE)


def test_another_seed_has_other_bits() -> None:
    """Else one digest would prove nothing."""
    assert bits("single", "transformer", {"training.seed": 2}, 4) != bits(
        "single", "transformer", {}, 4
    )


def test_plain_sums_have_other_bits() -> None:
    """Nor would it if any order of summation gave it."""
    plain = {"distributed.reproducible": False}
    check_differs = run_ranks(many, 2, [("ddp:2", "transformer", plain, 5)])[0][0]
    assert check_differs != bits("single", "transformer", plain, 5)
