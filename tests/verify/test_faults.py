"""Each of ten faults is found, and its cause is named; sound runs pass."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep import verify as package
from lockstep.config import config_from
from lockstep.verify import Outcome
from lockstep.verify.subject import Case, Spec, VerifyJob
from tests.verify import subjects

COMMON: dict[str, Any] = {
    "training.batch_size": 2,
    "training.global_batch_size": 8,
    "training.learning_rate": 3e-3,
    "training.warmup_steps": 0,
    "training.max_steps": 20,
    "training.gradient_clip": {"strategy": "norm", "value": 0.2},
    "precision.mode": "fp32",
}

FP16 = {"distributed.ddp.compression.kind": "fp16"}
RECOMPUTED = {"training.gradient_checkpointing": "full"}

# fault → (topology, settings, what differs first, kind of the cause, what its text names)
FAULTS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "another_seed_on_a_rank": ("ddp:2", {}, "loss", "random numbers", "rank 1 has another seed"),
    "reduced_in_the_wrong_backward_pass": ("ddp:2", {}, "norm", "synchronisation", "not the last of the step"),
    "mean_of_means": ("fsdp:2", {}, "loss", "loss normalisation", "valid targets"),
    "a_parameter_left_out_of_ddp": ("ddp:2", {}, "norm", "unsynchronised parameter", subjects.LEFT_OUT),
    "a_broken_compression_hook": ("ddp:2", FP16, "norm", "compression", "does not add up"),
    "a_buffer_that_drifts": ("ddp:2", {}, "buffer", "buffer", "seen"),
    "shuffled_data": ("fsdp:2", {}, "samples", "data order", "other samples"),
    "an_operation_that_is_not_deterministic": ("ddp:2", {}, "loss", "non-deterministic operation", subjects.NOISY),
    "the_norm_of_the_local_shard": ("fsdp:2", {}, "norm", "clip norm", "until they are clipped"),
    "random_numbers_lost_in_recomputation": (
        "fsdp:2",
        RECOMPUTED,
        "norm",
        "random numbers in recomputation",
        "recomputes",
    ),
}

# sound subject whose gradients are farther off than sums in another order → the experiment that shows it
ROUNDING = {"rounds": "in float64", "rounds_and_draws_other_numbers_in_float64": "with other last bits"}

SOUND: list[tuple[str, dict[str, Any]]] = [
    ("ddp:2", {}),
    ("ddp:2", FP16),
    ("fsdp:2", {"precision.mode": "bf16", **RECOMPUTED}),
    ("fsdp:2", {"distributed.fsdp.reduce_dtype": "bf16"}),
    ("pipeline:2", {}),
    ("ddp:2", {"distributed.reproducible": True}),
]


def job(make: Callable[[], Any], topology: str, settings: dict[str, Any], folder: Path, steps: int = 2) -> VerifyJob:
    folder.mkdir()
    spec = Spec(config_from({**COMMON, **settings}), make, steps)
    case = Case(steps=steps)
    package._record([(spec, (case,), folder)])
    return VerifyJob(spec, topology, folder, (case,))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All of them in one launch for the steps, and one for the experiments."""
    folder = tmp_path_factory.mktemp("verify")
    jobs = [
        job(getattr(subjects, name), topology, settings, folder / name, steps=1)
        for name, (topology, settings, *_) in FAULTS.items()
    ]
    jobs += [job(subjects.sound, *case, folder / f"sound-{i}") for i, case in enumerate(SOUND)]
    jobs += [job(getattr(subjects, name), "ddp:2", {}, folder / name, steps=1) for name in ROUNDING]
    jobs.append(job(subjects.rounds, "ddp:2", {"distributed.reproducible": True}, folder / "exact", steps=1))
    found = package.compare(jobs, package._spawn, print)
    names: Sequence[str] = [*FAULTS, *(f"sound-{i}" for i in range(len(SOUND))), *ROUNDING, "exact"]
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_cause_named(fault: str, outcomes: dict[str, Outcome]) -> None:
    _, _, aspect, kind, named = FAULTS[fault]
    outcome = outcomes[fault]
    assert outcome.failed is None, outcome.failed
    assert not outcome.passed
    assert outcome.first is not None
    assert outcome.first[0] == 0
    assert outcome.first[1].aspect == aspect
    assert outcome.cause is not None
    assert outcome.cause.kind == kind, outcome.cause
    assert named in outcome.cause.text


@pytest.mark.parametrize("number", range(len(SOUND)))
def test_sound_runs_pass(number: int, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[f"sound-{number}"]
    assert outcome.passed, (SOUND[number], outcome.failed, outcome.first, outcome.cause)
    exact = SOUND[number][1].get("distributed.reproducible", False)
    assert not exact or all(step.same_bits for step in outcome.steps)


@pytest.mark.parametrize(("name", "experiment"), ROUNDING.items())
def test_rounding_is_told_from_an_error(name: str, experiment: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.passed, (outcome.failed, outcome.first, outcome.cause)
    assert outcome.cause is not None, "farther off than the bounds allow"
    assert (outcome.cause.kind, outcome.cause.found_by) == ("rounding", [experiment])


def test_rounding_is_no_excuse_where_every_bit_counts(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["exact"]
    assert outcome.failed is None, outcome.failed
    assert not outcome.passed
    assert outcome.cause is not None
    assert outcome.cause.kind == "rounding", outcome.cause
