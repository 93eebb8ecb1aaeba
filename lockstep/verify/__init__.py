"""Prove with `lockstep verify` that every topology takes the same step, on the user's own model and data.

    one process takes N steps and writes them to disk                    (the reference)
    each topology takes them in a launch of its own, and compares        samples, loss, norm, gradients, values, buffers
    where it differs: the step part by part                              the first module, gradient or sum that differs
    experiments that undo one thing each                                 the cause
    the reference's samples cut otherwise, and a plain pass              the reference is right itself

In plain mode each step starts from the reference's state, and gradients may differ by the rounding
of another summation order. With `distributed.reproducible` a topology continues from its own state,
and every bit must be equal.

Tests: tests/verify/test_command.py, tests/verify/test_faults.py, tests/verify/test_ready_configs.py
"""

import math
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config import Config, config_from
from lockstep.cores import threads_per_rank
from lockstep.environment import rank_facts
from lockstep.errors import UsageError
from lockstep.launch.spawn import spawn_again
from lockstep.scratch import temporary
from lockstep.strategy import AUTO, SINGLE, parse_topology, strategy_named
from lockstep.verify.causes import cause_of, is_clear, wanted_experiments
from lockstep.verify.differences import ASPECTS, Cause, Difference, Evidence, StepResult
from lockstep.verify.experiments import NUDGED, first_experiments, further_experiments
from lockstep.verify.recorded_flow import Deviation
from lockstep.verify.reference import Check, judge
from lockstep.verify.subject import (
    MAIN,
    Case,
    Make,
    Spec,
    Subject,
    VerifyJob,
    run_isolated,
    why_not_ended,
)

__all__ = ["Cause", "Difference", "Outcome", "Subject", "Verdict", "verify"]

DEFAULT_STEPS = 5
_MODEL_AXES = ("pipeline", "context", "tensor")  # ranks along them share a micro-batch
_CHECKED = "checks"  # file with the names of the checks that are possible
_SECONDS = 30.0  # limit for a case; it is longer where the reference takes long
_LONGEST = 3600.0  # seconds for the reference itself
_TIMES = 20.0  # how many times as long as the reference a case may take
# a step whose difference is this many times larger than an explained one needs a cause of its own
_LARGER = 4.0


@dataclass
class Outcome:
    """Steps of one topology, compared with the reference's."""

    topology: str  # as it was written; `single` is the reference taken once more
    steps: list[StepResult] = field(default_factory=list)  # one result per step
    cause: Cause | None = None  # of the first difference
    deviations: list[Deviation] = field(default_factory=list)  # parts of that step, in its order
    failed: str | None = None  # the error, if the topology could not be run

    @property
    def first(self) -> tuple[int, Difference] | None:
        """The first step that differs (counted from 0), and its first difference."""
        for result in self.steps:
            if result.first is not None:
                return result.step, result.first
        return None

    @property
    def passed(self) -> bool:
        """Return whether the topology took the same steps, up to rounding."""
        rounding = self.cause is not None and not self.cause.is_error and self.cause.is_judged
        return self.failed is None and (self.first is None or rounding)

    @property
    def same_bits(self) -> bool:
        """Return whether no step differs in any bit."""
        return all(result.same_bits for result in self.steps)

    @property
    def largest_rounding(self) -> float:
        """The largest relative difference of a gradient within its bound."""
        return max((result.rounding for result in self.steps), default=0.0)


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
        """Return whether all topologies took the same steps, and the reference's checks found no fault."""
        return all(outcome.passed for outcome in self.outcomes) and all(
            check.passed for check in self.checks
        )


Start = Callable[[Callable[..., Any], Sequence[Any], int], None]
"""Runs a function with arguments on a number of ranks of this machine, and waits for them."""


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
    config, make = (subject, None) if isinstance(subject, Config) else (config or Config(), subject)
    against = default_against(config) if against is None else against
    spec, notices = _spec(config, make, against, steps)
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
        checks = []
        if outcomes[0].passed:
            start(_check, (spec, folder), 1)
            taken: list[str] = pickle.loads((folder / _CHECKED).read_bytes())
            ends = {
                what: why_not_ended(folder / "ends" / f"check-{what}", 1, _limit(folder))
                for what in taken
            }
            missing = {
                what: str(error).splitlines()[0]
                for what, error in ends.items()
                if error is not None
            }
            checks = judge(taken, folder, missing)
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


def _spec(
    config: Config, make: Make | None, against: Sequence[str], steps: int
) -> tuple[Spec, list[str]]:
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


def record(
    wanted: Sequence[tuple[Spec, Sequence[Case], Path]], start: Start
) -> list[dict[str, str]]:
    """Let one process take the steps of cases alone.

    Return, for each of `wanted`, case that fails → reason.

    Raises:
        LockstepError: the case that compares all steps could not be taken.
    """
    limits = [_limit(folder) for *_, folder in wanted]
    start(_record, (wanted, limits), 1)
    left_out: list[dict[str, str]] = [{} for _ in wanted]
    for (_, cases, folder), limit, missing in zip(wanted, limits, left_out, strict=True):
        for case in cases:
            error = why_not_ended(_end_of_record(folder, case), 1, limit)
            if error is not None and case.name == MAIN:
                raise error
            if error is not None:
                missing[case.name] = str(error).splitlines()[0]
    return left_out


def _limit(folder: Path) -> float:
    path = folder / MAIN / "seconds"
    return _SECONDS + _TIMES * float(path.read_text()) if path.exists() else _LONGEST


def _end_of_record(folder: Path, case: Case) -> Path:
    return folder / "ends" / f"reference-{case.name}"


def compare(
    jobs: Sequence[VerifyJob], start: Start, report: Callable[[str], None]
) -> list[Outcome]:
    """Run topologies with the same number of ranks in one launch, and compare them with references on disk."""
    outcomes = [Outcome(job.topology) for job in jobs]
    start(_compare, (jobs,), jobs[0].ranks)
    pending = []
    for job, outcome in zip(jobs, outcomes, strict=True):
        results = _results(job, MAIN)
        if isinstance(results, str):
            outcome.failed = results
        else:
            outcome.steps = results
            pending.append((job, outcome, _next(outcome)))
    while wanted := [(job, outcome, found) for job, outcome, found in pending if found is not None]:
        for job, _, found in wanted:
            report(f"{job.topology}: differs in step {found.step + 1}; looking for the cause")
        _find_causes(wanted, start)
        # Rounding in one step explains the other steps only if their differences are not larger.
        explained = [
            one for one in wanted if one[1].cause is not None and not one[1].cause.is_error
        ]
        pending = [(job, outcome, _next(outcome, found)) for job, outcome, found in explained]
    return outcomes


def _results(job: VerifyJob, name: str) -> list[StepResult] | str:
    case = next(case for case in job.cases if case.name == name)
    error = why_not_ended(job.end_of(case), job.ranks, _limit(job.folder))
    if error is not None:
        return str(error)
    path = job.results_of(case)
    if not path.exists():
        return f"{name}: a process of it ended without a word"
    found: list[StepResult] | str = pickle.loads(path.read_bytes())
    return found


def _next(outcome: Outcome, judged: StepResult | None = None) -> StepResult | None:
    """Return the next step whose difference needs a cause."""
    for result in outcome.steps:
        if not result.differences:
            continue
        if judged is None:
            return result
        farther = any(
            result.distance(aspect) > _LARGER * judged.distance(aspect) for aspect in ASPECTS
        )
        if result.step > judged.step and farther:
            return result
    return None


def _find_causes(different: Sequence[tuple[VerifyJob, Outcome, StepResult]], start: Start) -> None:
    evidence = []
    for job, _, found in different:
        cases = tuple(first_experiments(job.spec, job.topology, found.step))
        evidence.append(
            (replace(job, cases=cases), Evidence(found, {}, {}, job.folder, job.spec.config))
        )
    _experiment(evidence, start)
    further = []
    for job, known in evidence:
        if not is_clear(known):
            _, subject = job.spec.build({})
            wanted = wanted_experiments(known, job.topology)
            cases = tuple(
                further_experiments(job.spec, job.topology, known.found.step, wanted, subject.data)
            )
            subject.close()
            further.append((replace(job, cases=cases), known))
    _experiment([(job, known) for job, known in further if job.cases], start)
    for (job, known), (_, outcome, _) in zip(evidence, different, strict=True):
        outcome.cause, outcome.deviations = cause_of(known), known.deviations
        outcome.cause.is_error |= job.spec.exact  # if every bit must be equal, rounding is an error


def _experiment(wanted: Sequence[tuple[VerifyJob, Evidence]], start: Start) -> None:
    if not wanted:
        return
    left_out = record([(job.spec, job.cases, job.folder) for job, _ in wanted], start)
    jobs = []
    for (job, evidence), missing in zip(wanted, left_out, strict=True):
        evidence.left_out |= missing
        taken = tuple(
            case for case in job.cases if case.name not in missing and case.name != NUDGED
        )
        jobs.append(replace(job, cases=taken))
    start(_compare, (jobs,), jobs[0].ranks)
    for job, (_, evidence) in zip(jobs, wanted, strict=True):
        for case in job.cases:
            results = _results(job, case.name)
            if isinstance(results, str):
                evidence.left_out[case.name] = results.splitlines()[0]
            elif results:
                evidence.tried[case.name] = results[0]


# ---- what runs in the started processes: each case in a fork ----


def _check(spec: Spec, folder: Path) -> None:
    from lockstep.verify import reference

    def choose() -> None:
        (folder / _CHECKED).write_bytes(pickle.dumps(reference.checks_of(spec)))

    limit = _limit(folder)
    run_isolated(choose, folder / "ends" / _CHECKED, 0, limit, alone=True)
    for what in pickle.loads((folder / _CHECKED).read_bytes()):
        call = partial(reference.take, spec, what, folder)
        run_isolated(call, folder / "ends" / f"check-{what}", 0, limit, alone=True)


def _record(wanted: Sequence[tuple[Spec, Sequence[Case], Path]], limits: Sequence[float]) -> None:
    from lockstep.verify import worker

    for (spec, cases, folder), limit in zip(wanted, limits, strict=True):
        for case in cases:
            run_isolated(
                partial(worker.record, spec, case, folder),
                _end_of_record(folder, case),
                0,
                limit,
                alone=True,
            )


def _compare(jobs: Sequence[VerifyJob]) -> None:
    from lockstep.verify import worker

    number = 0
    for job in jobs:
        for case in job.cases:
            number += 1
            call = partial(worker.compare, job, case)
            if not run_isolated(
                call, job.end_of(case), number, _limit(job.folder), alone=job.ranks == 1
            ):
                break  # other cases hang as well


_spawn = partial(spawn_again, preload=None)
