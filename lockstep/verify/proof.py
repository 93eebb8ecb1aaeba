"""Compares topologies with one process: what `lockstep verify CONFIG` and `verify()` do.

Tests: tests/verify/test_command.py, tests/verify/test_faults.py, tests/verify/test_ready_configs.py
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.config import Config, config_from
from lockstep.errors import UsageError
from lockstep.launch.spawn import spawn_again
from lockstep.layout import SAME_BATCH
from lockstep.machine.cores import threads_per_rank
from lockstep.machine.environment import rank_facts
from lockstep.machine.scratch import temporary
from lockstep.strategy import AUTO, SINGLE, parse_topology, strategy_named
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.configs import Start, check_reference, compare, record
from lockstep.verify.reference import Check
from lockstep.verify.subject import Case, Make, Spec, VerifyJob

DEFAULT_STEPS = 5
_MODEL_AXES = ("pipeline", *SAME_BATCH)  # ranks along them share a micro-batch


@dataclass
class Verdict:
    """Result of `verify`."""

    outcomes: list[Outcome]  # the reference taken twice, then each topology
    steps: int  # number of steps that were compared
    micro_batches: int  # number per step
    exact: bool  # whether every bit had to be equal
    notices: list[str] = field(default_factory=list)  # changed settings, as lines to print
    checks: list[Check] = field(default_factory=list)  # of the reference itself

    @property
    def passed(self) -> bool:
        """Return whether all topologies took the same steps and the reference has no fault.

        The reference's checks look for its faults.
        """
        return all(outcome.passed for outcome in self.outcomes) and all(
            check.passed for check in self.checks
        )


def verify(
    subject: Make | Config,
    against: Sequence[str] | None = None,
    *,
    config: Config | None = None,
    steps: int = DEFAULT_STEPS,
    start: Start | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> Verdict:
    """Compare topologies with one process.

    Args:
        subject: a config that names model and data; or a function at the top of a module that
            returns a `Subject` or (model, data), and is called in every process.
        against: topologies: `ddp:2`, `fsdp:4`, `hybrid:2x2`, `pipeline:2*fsdp:2` … Unset: ddp:2,
            fsdp:2 and the strategy that the config names, on few ranks.
        config: with a function: the settings of the run.
        steps: number of steps.
        start: starts ranks; unset: `lockstep.spawn`.
        report: called with lines about the progress.

    Raises:
        UsageError: a topology or the config is wrong, or the reference cannot be trained.
    """
    make: Make | None = None
    if isinstance(subject, Config):
        config = subject
    else:
        make = subject
        config = config or Config()
    against = default_against(config) if against is None else against
    spec, notices = spec_of(config, make, against, steps)
    start = start or _spawn
    with temporary("verify") as folder:
        report(f"reference: {spec.steps} steps in one process")
        main = Case(steps=spec.steps)
        record([(spec, (main,), folder)], start)
        outcomes = []
        for topology in (SINGLE, *against):
            report(f"{topology}: {spec.steps} steps")
            outcomes += compare([VerifyJob(spec, topology, folder, (main,))], start, report)
        report("reference: checks of its own")
        checks = check_reference(spec, folder, start) if outcomes[0].passed else []
    size = spec.config.training
    assert size.global_batch_size is not None
    return Verdict(
        outcomes, spec.steps, size.global_batch_size // size.batch_size, spec.exact, notices, checks
    )


def require_startable(steps: int) -> None:
    """Raise UsageError where nothing is compared, or this process is a rank."""
    if steps < 1:
        raise UsageError(f"--steps {steps} compares nothing", fix="write a number from 1 on")
    if (world := rank_facts().world_size) > 1:
        text = f"verify starts its own ranks, and is one of {world} itself"
        raise UsageError(text, fix="start it without a launcher")


def default_against(config: Config) -> list[str]:
    """Return ddp:2, fsdp:2 and the config's own strategy, on the fewest ranks that test it."""
    strategy = config.distributed.strategy
    own = [] if strategy == AUTO else strategy_named(strategy).topologies_to_verify(config.step)
    return ["ddp:2", "fsdp:2", *own]


def spec_of(
    config: Config, make: Make | None, against: Sequence[str], steps: int
) -> tuple[Spec, list[str]]:
    """Return what all topologies train, and lines on the settings that were changed for that."""
    require_startable(steps)
    if not against:
        raise UsageError(
            "verify against nothing", fix="name topologies, as in --against ddp:2,fsdp:2"
        )
    topologies = [parse_topology(topology) for topology in against]
    notices = []
    most_steps = config.training.max_steps
    if most_steps is not None and most_steps < steps:
        steps = most_steps
        notices.append(f"{steps} steps: training.max_steps allows no more")
    settings: dict[str, Any] = {}
    for change in (
        _with_global_batch(config, topologies),
        _without_inexact_compression(config),
        _as_synchronous_step(config),
        _in_float32(config),
        _without_fp8(config),
    ):
        settings |= change.settings
        if change.notice:
            notices.append(change.notice)
    if settings:
        config = config_from(settings, config)
    return Spec(config, make, steps, _threads(topologies)), notices


@dataclass(frozen=True)
class _Change:
    """A change that makes a config comparable in one respect; empty where it is so already."""

    settings: dict[str, Any] = field(default_factory=dict)
    notice: str = ""  # a line on it, to print


_NO_CHANGE = _Change()


def _with_global_batch(config: Config, topologies: Sequence[tuple[dict[str, Any], int]]) -> _Change:
    """Give all topologies the global batch that the one with most replicas has.

    The config's own stays; gradient_accumulation_steps holds for one number of ranks, and goes.
    With batch_size 4 and 2 accumulation steps, `ddp:3` and `pipeline:2*fsdp:2` are compared with
    4 × 2 × max(3, 2) = 24 samples a step.
    """
    training = config.training
    if training.global_batch_size is not None:
        if training.gradient_accumulation_steps is None:
            return _NO_CHANGE
        return _Change({"training.gradient_accumulation_steps": None})
    replicas = []
    for values, ranks in topologies:
        sizes = [int(values.get(f"{axis}_size") or 1) for axis in _MODEL_AXES]
        replicas.append(ranks // math.prod(sizes))
    size = training.batch_size * training.accumulation * max(replicas)
    settings = {"training.global_batch_size": size, "training.gradient_accumulation_steps": None}
    return _Change(
        settings,
        f"global batch: {size} samples for every topology (training.global_batch_size sets it)",
    )


def _without_inexact_compression(config: Config) -> _Change:
    """Switch off compression that leaves gradients out, or depends on the link."""
    notices = {
        "powersgd": "without PowerSGD: what it leaves out of a step can't be told from an error",
        "auto": "without compression: auto decides by the link; name one to verify it",
    }
    kind = config.distributed.ddp.compression.kind
    if kind not in notices:
        return _NO_CHANGE
    return _Change({"distributed.ddp.compression.kind": "none"}, notices[kind])


def _as_synchronous_step(config: Config) -> _Change:
    """Say that a strategy which is other training is not what is compared."""
    name = config.distributed.strategy
    if name == AUTO or strategy_named(name).same_training:
        return _NO_CHANGE
    return _Change(
        notice=f"the synchronous step of this config is compared: {name} is other training"
    )


def _in_float32(config: Config) -> _Change:
    """Keep parameters in fp32, as one process does."""
    dtype = config.precision.param_dtype
    if dtype == "fp32":
        return _NO_CHANGE
    notice = f"param_dtype fp32 instead of {dtype}, which one process does not have"
    return _Change({"precision.param_dtype": "fp32"}, notice)


def _without_fp8(config: Config) -> _Change:
    """Multiply without fp8, whose rounding is as large as an error."""
    if config.precision.fp8 == "none":
        return _NO_CHANGE
    return _Change(
        {"precision.fp8": "none"},
        "without fp8: where a last bit differs it rounds to another number, as far off as an error"
        " is",
    )


def _threads(topologies: Sequence[tuple[dict[str, Any], int]]) -> int:
    """Return the CPU threads of every process: OMP_NUM_THREADS, or those of a rank.

    All use as many as a rank of the largest topology.
    """
    variable = os.environ.get("OMP_NUM_THREADS", "")
    if variable.isdigit() and int(variable) > 0:
        return int(variable)
    return threads_per_rank(max(ranks for _, ranks in topologies))


_spawn = partial(spawn_again, preload=None)
