"""Compares topologies with one process: what `lockstep verify CONFIG` and `verify()` do.

Tests: tests/verify/test_command.py, tests/verify/test_faults.py, tests/verify/test_ready_configs.py
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lockstep.config import Config, config_from
from lockstep.cores import threads_per_rank
from lockstep.environment import rank_facts
from lockstep.errors import UsageError
from lockstep.launch.spawn import spawn_again
from lockstep.layout import SAME_BATCH
from lockstep.scratch import temporary
from lockstep.strategy import AUTO, SINGLE, parse_topology, strategy_named
from lockstep.verify.configs import Start, check_reference, compare, record
from lockstep.verify.outcome import Outcome
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
    notices = []
    topologies = [parse_topology(topology) for topology in against]
    training = config.training
    if training.max_steps is not None and training.max_steps < steps:
        steps = training.max_steps
        notices.append(f"{steps} steps: training.max_steps allows no more")
    if training.global_batch_size is None:
        apart = [
            [int(values.get(f"{axis}_size") or 1) for axis in _MODEL_AXES]
            for values, _ in topologies
        ]
        replicas = [
            ranks // math.prod(sizes) for sizes, (_, ranks) in zip(apart, topologies, strict=True)
        ]
        size = training.batch_size * training.accumulation * max(replicas)
        config = config_from(
            {"training.global_batch_size": size, "training.gradient_accumulation_steps": None},
            config,
        )
        notices.append(
            f"global batch: {size} samples for every topology (training.global_batch_size sets it)"
        )
    elif training.gradient_accumulation_steps is not None:  # it holds for one number of ranks
        config = config_from({"training.gradient_accumulation_steps": None}, config)
    why_not = {
        "powersgd": "without PowerSGD: what it leaves out of a step can't be told from an error",
        "auto": "without compression: auto decides by the link; name one to verify it",
    }
    kind = config.distributed.ddp.compression.kind
    if kind in why_not:
        config = config_from({"distributed.ddp.compression.kind": "none"}, config)
        notices.append(why_not[kind])
    name = config.distributed.strategy
    if name != AUTO and not strategy_named(name).same_training:
        notices.append(f"the synchronous step of this config is compared: {name} is other training")
    if config.precision.param_dtype != "fp32":
        notices.append(
            f"param_dtype fp32 instead of {config.precision.param_dtype}, which one process does"
            " not have"
        )
        config = config_from({"precision.param_dtype": "fp32"}, config)
    if config.precision.fp8 != "none":
        notices.append(
            "without fp8: where a last bit differs it rounds to another number, as far off as an"
            " error is"
        )
        config = config_from({"precision.fp8": "none"}, config)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return Spec(config, make, steps, int(asked)), notices
    # All processes use as many as a rank of the largest topology.
    return (
        Spec(config, make, steps, threads_per_rank(max(ranks for _, ranks in topologies))),
        notices,
    )


_spawn = partial(spawn_again, preload=None)
