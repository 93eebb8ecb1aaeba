"""Pipelines beside replicas and shards, on 4 ranks, and checkpoints that go from one layout to
another.
"""

import pytest
import torch

from tests.parallel.pipeline.pipeline_cases import (
    evaluation,
    go_on,
    piped,
    running_statistics,
    several,
    train,
    worst,
)
from tests.parallel.pipeline.pipeline_launch import (
    GOES_ON,
    GOES_ON_IN_FULL,
    IN_TURN,
    LENGTHS_IN_V,
    SIDE_BY_SIDE,
    TOPOLOGIES,
    folder_of,
    launched,
    loads_on,
    uninterrupted,
)
from tests.parallel.pipeline.test_pipeline import off
from tests.parity.pipelines import SCHEDULES
from tests.ranks import run_ranks

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", IN_TURN)
def test_trap_22_every_schedule_is_right_beside_replicas_and_shards(name: str) -> None:
    """Stages wrapped in DDP: gradients of zero-bubble schedules are wrong up to 1.4 times, GPipe
    dies in step 2. Here over several steps, with several runs of the schedule in each, tied weights
    across stages, and dummies.
    """
    assert off(name, 4) < TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_schedule_beside_the_other() -> None:
    """Beside shards what runs beside replicas above, and the other way round; and different shapes
    on a path with a turn.
    """
    rest = {name: case for name, case in SIDE_BY_SIDE.items() if name not in IN_TURN}
    rest["lengths, V"] = LENGTHS_IN_V
    results = run_ranks(several, 4, [("train", case) for case in rest.values()], timeout=1500)
    for place, (name, (model, settings, *more)) in enumerate(rest.items()):
        alone = {key: value for key, value in settings.items() if not key.startswith("distributed")}
        reference = train(model, alone, *more)
        assert max(worst(of_rank[place], reference) for of_rank in results) < TOLERANCE, name


@pytest.mark.parametrize("name", ["bdh", "lengths"])
def test_shared_weights_are_sharded_and_pipelines_may_see_different_shapes(name: str) -> None:
    """FSDP2's collectives need all pipelines to do the same, also when only one of them meets a new
    shape.
    """
    assert off(name, 4) < TOLERANCE


def test_evaluation_of_different_shapes() -> None:
    expected = evaluation({}, "TextsOfAllLengths")
    for rank in launched(4):
        assert rank["evaluated"] == pytest.approx(expected, rel=1e-6)


def test_gradients_are_reduced_once_a_step_however_many_runs_it_has() -> None:
    """Two stages a rank; three micro-batches, in two runs."""
    for rank in launched(4):
        assert rank["reductions"] == {"runs": 2, "reductions": 2}


def test_running_statistics_are_those_of_one_process() -> None:
    expected = running_statistics({})
    for rank in launched(4):
        for name, value in rank["statistics"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_full_shard_is_refused_where_it_would_be_silently_wrong() -> None:
    """A zero-bubble schedule needs parameters that full_shard has freed: gradients are None or 25 %
    off.
    """
    for rank in launched(4):
        assert "UsageError" in rank["refused"]
        assert "shard_grad_op" in rank["refused"]


@pytest.mark.parametrize(("origin", "topology"), GOES_ON)
def test_trap_25_a_checkpoint_goes_on_in_every_other_layout(origin: str, topology: str) -> None:
    """Names of parameters are those of the unsplit model, so stages do not overwrite each other's;
    each rank saves the optimizer of what it holds; what is saved under pipeline × fsdp trains on
    anywhere with the same losses.
    """
    rest = uninterrupted()[2:]
    launched(4)
    if topology == "single":
        assert worst(go_on({}, str(folder_of(origin))), rest) < TOLERANCE
        return
    for rank in launched(TOPOLOGIES[topology][0]):
        assert worst(rank[f"{origin} → {topology}"], rest) < TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_checkpoint_goes_on_in_the_remaining_layouts() -> None:
    rest = uninterrupted()[2:]
    launched(4)  # writes the checkpoint
    assert worst(go_on({}, str(folder_of("single"))), rest) < TOLERANCE
    for ranks in (2, 4):
        calls = loads_on(ranks, GOES_ON_IN_FULL)
        for of_rank in run_ranks(several, ranks, list(calls.values()), timeout=900):
            for name, steps in zip(calls, of_rank, strict=True):
                assert worst(steps, rest) < TOLERANCE, name


def test_trap_25_no_buffer_stays_on_meta() -> None:
    """Buffers that several stages use are forgotten by whoever fills only parameters."""
    for ranks in (2, 4):
        for rank in launched(ranks):
            looks = [
                value for value in rank.values() if isinstance(value, dict) and "on_meta" in value
            ]
            assert all(not look["on_meta"] for look in looks)


def test_the_run_that_saved_under_a_pipeline_is_the_run_of_one_process() -> None:
    for rank in launched(4):
        assert worst(rank["saved"], uninterrupted()) < TOLERANCE


@pytest.mark.full
def test_pipeline_beside_hybrid_shard_on_eight_ranks() -> None:
    calls = [
        (
            "train",
            (
                "deep",
                {
                    **piped(schedule, pipeline_size=2, replicate_size=2, shard_size=2),
                    "distributed.fsdp.sharding_strategy": "shard_grad_op",
                },
                "Tokens",
                {"tie_embeddings": True},
            ),
        )
        for schedule in SCHEDULES
    ]
    reference = train("deep", {}, "Tokens", {"tie_embeddings": True})
    for results in run_ranks(several, 8, calls, timeout=900):
        for result in results:
            assert worst(result, reference) < TOLERANCE
