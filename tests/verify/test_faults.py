"""Each of twelve faults is found, and its cause is named; sound runs pass."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.silent_bugs import faults
from benchmarks.silent_bugs.faults import Fault, sound
from lockstep.config import config_from
from lockstep.launch.spawn import spawn_again
from lockstep.verify import Outcome
from lockstep.verify import proof as package
from lockstep.verify.subject import Case, Spec, VerifyJob
from tests.sampled import chosen, quick_and_full
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

# the first test waits for all runs, and a busy machine takes 10 minutes
pytestmark = pytest.mark.timeout(1800)

# fault → (topology, settings, what differs first, kind of the cause, what its text names)
FAULTS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "another_seed_on_a_rank": ("ddp:2", {}, "loss", "random numbers", "rank 1 has another seed"),
    "reduced_in_the_wrong_backward_pass": (
        "ddp:2",
        # else the gradients carry the step's losses, which are there in its last backward pass
        # alone: DDP itself ends a run that reduces in another
        {"distributed.ddp.find_unused_parameters": True},
        "norm",
        "synchronisation",
        "not the last of the step",
    ),
    "mean_of_means": ("fsdp:2", {}, "loss", "loss normalisation", "valid targets"),
    "a_parameter_left_out_of_ddp": (
        "ddp:2",
        {},
        "norm",
        "unsynchronised parameter",
        subjects.LEFT_OUT,
    ),
    "a_broken_compression_hook": ("ddp:2", FP16, "norm", "compression", "does not add up"),
    "a_buffer_that_drifts": ("ddp:2", {}, "buffer", "buffer", "seen"),
    "shuffled_data": ("fsdp:2", {}, "samples", "data order", "other samples"),
    "an_operation_that_is_not_deterministic": (
        "ddp:2",
        {},
        "loss",
        "non-deterministic operation",
        subjects.NOISY,
    ),
    "the_norm_of_the_local_shard": ("fsdp:2", {}, "norm", "clip norm", "until they are clipped"),
    "random_numbers_lost_in_recomputation": (
        "fsdp:2",
        RECOMPUTED,
        "norm",
        "random numbers in recomputation",
        "recomputes",
    ),
    "segments_that_are_not_forward_in_training": (
        "pipeline:2",
        {},
        "loss",
        "segments",
        "forward()",
    ),
    "attention_that_knows_of_no_other_ranks": (
        "context:2",
        {},
        "loss",
        "context",
        "layers.1.attention.attend lets",
    ),
}

# Of the benchmark: one for each way in which a cause is found.
PLANTED: dict[str, Fault] = {
    fault.make.__name__: fault
    for fault in faults.FAULTS
    if fault.make.__name__
    in (
        "chaotic_net_with_a_gradient_zeroed_on_rank_1",
        "autocast_on_rank_1",
        "own_generator_of_the_module",
    )
}
SILENT = {"training.gradient_clip": None}

# sound subject whose gradients are farther off than sums in another order → the experiment that
# shows it
ROUNDING = {
    "rounds": "in float64",
    "rounds_and_draws_other_numbers_in_float64": "with other last bits",
}

SOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("ddp:2", {}),
    "compressed": ("ddp:2", FP16),
    "recomputed": ("fsdp:2", {"precision.mode": "bf16", **RECOMPUTED}),
    "reduced in bf16": ("fsdp:2", {"distributed.fsdp.reduce_dtype": "bf16"}),
    "pipeline": ("pipeline:2", {}),
    "reproducible": ("ddp:2", {"distributed.reproducible": True}),
}

# In the quick run; test_command.py and test_script.py there have a fault each whose cause is found,
# and the benchmark runs others.
QUICK: tuple[str, ...] = ()

START = partial(spawn_again, preload=["torch.distributed.pipelining", "lockstep.verify.worker"])
Make = Callable[[], Any]


def verified(
    wanted: dict[str, tuple[Make, str, dict[str, Any], int]], folder: Path
) -> dict[str, Outcome]:
    """All of them in one launch for the references, one for the steps, and two each for the
    experiments.
    """
    jobs = []
    for name, (make, topology, settings, steps) in wanted.items():
        (folder / name).mkdir()
        spec = Spec(config_from({**COMMON, **settings}), make, steps)
        jobs.append(VerifyJob(spec, topology, folder / name, (Case(steps=steps),)))
    package.record([(job.spec, job.cases, job.folder) for job in jobs], START)
    return dict(zip(wanted, package.compare(jobs, START, print), strict=True))


def wanted() -> dict[str, tuple[Make, str, dict[str, Any], int]]:
    """Name → what makes the subject, topology, settings, steps."""
    cases: dict[str, tuple[Make, str, dict[str, Any], int]] = {
        name: (getattr(subjects, name), topology, settings, 1)
        for name, (topology, settings, *_) in FAULTS.items()
    }
    cases |= {name: (subjects.sound, *case, 2) for name, case in SOUND.items()}
    cases |= {name: (getattr(subjects, name), "ddp:2", {}, 1) for name in ROUNDING}
    cases["exact"] = (subjects.rounds, "ddp:2", {"distributed.reproducible": True}, 1)
    cases["chaotic_net_sharded"] = (sound.chaotic_net_sharded, "fsdp:2", SILENT, 2)
    return cases | {
        name: (fault.make, fault.topology, SILENT | fault.settings, 1)
        for name, fault in PLANTED.items()
    }


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """What verify says of all the subjects that tests of this session ask for."""
    asked = chosen(request, "name")
    cases = {name: case for name, case in wanted().items() if name in asked}
    return verified(cases, tmp_path_factory.mktemp("verify"))


def named(*names: str) -> pytest.MarkDecorator:
    quick = [name for name in QUICK if name in names]
    return pytest.mark.parametrize("name", quick_and_full(names, quick))


@named(*FAULTS)
def test_a_planted_fault_is_found_and_its_cause_named(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    _, _, aspect, kind, words = FAULTS[name]
    outcome = outcomes[name]
    assert not outcome.failed, outcome.failed
    assert not outcome.passed
    assert outcome.first is not None
    assert outcome.first.step == 0
    assert outcome.first.aspect == aspect
    (cause,) = outcome.causes
    assert cause.kind == kind, cause
    assert words in cause.text


@named(*PLANTED)
def test_a_fault_of_the_benchmark_is_found_and_placed(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    """Some of `benchmarks/silent_bugs`: one of each kind of cause."""
    outcome = outcomes[name]
    fault = PLANTED[name]
    assert not outcome.failed, outcome.failed
    assert not outcome.passed
    (cause,) = outcome.causes
    assert cause.kind in fault.kinds, cause
    for words in fault.names:
        assert any(word in cause.text for word in words), (words, cause.text)


@named("chaotic_net_sharded")
def test_a_sound_network_that_magnifies_last_bits_passes(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    """The bound is not how far its last bits go: a gradient zeroed in the same network is found,
    above.
    """
    assert outcomes[name].passed, outcomes[name].causes


@named(*SOUND)
def test_sound_runs_pass(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.passed, (outcome.failed, outcome.first, outcome.causes)
    assert name != "reproducible" or outcome.same_bits


@named(*ROUNDING)
def test_rounding_is_told_from_an_error(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.passed, (outcome.failed, outcome.first, outcome.causes)
    (cause,) = outcome.causes  # farther off than the bounds allow
    assert (cause.kind, cause.found_by) == ("rounding", [ROUNDING[name]])


@named("exact")
def test_rounding_is_no_excuse_where_every_bit_counts(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[name]
    assert not outcome.failed, outcome.failed
    assert not outcome.passed
    (cause,) = outcome.causes
    assert cause.kind == "rounding", cause
