"""Prove with `lockstep verify` that every topology takes the same step, on the user's own model and data.

    one process takes N steps and writes them to disk                    (the reference)
    each topology takes them in a launch of its own, and compares        samples, loss, norm, gradients, values, buffers
    where it differs: experiments that change one thing each             the likely cause

In plain mode each step starts from the reference's state, and gradients may differ by the rounding of another summation
order. With `distributed.reproducible` a topology continues from its own state, and every bit must be equal.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.config import Config, config_from
from lockstep.cores import threads_per_rank
from lockstep.environment import rank_facts
from lockstep.errors import LockstepError, UsageError
from lockstep.scratch import temporary
from lockstep.strategy import AUTO, SINGLE, parse_topology, strategy_named
from lockstep.verify.causes import Cause, Evidence, cause_of, experiments_for
from lockstep.verify.differences import ASPECTS, Difference, StepResult
from lockstep.verify.subject import MAIN, Case, Make, Results, Spec, Subject, VerifyJob

__all__ = ["Cause", "Difference", "Outcome", "Subject", "Verdict", "verify"]

DEFAULT_STEPS = 5
_TAKEN = "taken"  # file with the cases that the reference could take
_LARGER = 4.0  # a step whose difference is this many times larger than an explained one needs a cause of its own


@dataclass
class Outcome:
    """Steps of one topology, compared with the reference's.

    Attributes:
        topology: as it was written; `single` is the reference taken once more.
        steps: one result per step.
        cause: of the first difference.
        failed: the error, if the topology could not be run.
    """

    topology: str
    steps: list[StepResult] = field(default_factory=list)
    cause: Cause | None = None
    failed: str | None = None

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
        rounding = self.cause is not None and not self.cause.is_error
        return self.failed is None and (self.first is None or rounding)


@dataclass
class Verdict:
    """Result of `verify`.

    Attributes:
        outcomes: the reference taken twice, then each topology.
        steps: number of steps that were compared.
        micro_batches: number per step.
        exact: whether every bit had to be equal.
        notices: settings that were changed for the comparison, as lines to print.
    """

    outcomes: list[Outcome]
    steps: int
    micro_batches: int
    exact: bool
    notices: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether all topologies took the same steps."""
        return all(outcome.passed for outcome in self.outcomes)


Start = Callable[[Callable[..., Any], Sequence[Any], int], None]
"""Runs a function with arguments on a number of ranks of this machine, and waits for them."""


def verify(
    subject: Make | Config, against: Sequence[str] | None = None, *, config: Config | None = None,
    steps: int = DEFAULT_STEPS, start: Start | None = None, report: Callable[[str], None] = lambda _line: None,
) -> Verdict:  # fmt: skip
    """Compare topologies with one process.

    Args:
        subject: a config that names model and data; or a function at the top of a module that returns a `Subject` or
            (model, data), and is called in every process.
        against: topologies: `ddp:2`, `fsdp:4`, `hybrid:2x2`, `pipeline:2*fsdp:2` … Unset: ddp:2, fsdp:2 and the
            strategy that the config names, on few ranks.
        config: with a function: the settings of the run.
        steps: number of steps.
        start: starts ranks; unset: `lockstep.spawn`.
        report: called with lines about the progress.

    Returns:
        the verdict; `passed` is whether all topologies took the same steps.

    Raises:
        UsageError: a topology or the config is wrong, or the reference cannot be trained.
    """
    config, make = (subject, None) if isinstance(subject, Config) else (config or Config(), subject)
    against = default_against(config) if against is None else against
    spec, notices = _spec(config, make, against, steps)
    start = start or _spawn
    outcomes = []
    with temporary("verify") as folder:
        report(f"reference: {spec.steps} steps in one process")
        main = Case(steps=spec.steps)
        start(_record, ([(spec, (main,), folder)],), 1)
        for topology in (SINGLE, *against):
            report(f"{topology}: {spec.steps} steps")
            outcomes += compare([VerifyJob(spec, topology, folder, (main,))], start, report)
    size = spec.config.training
    assert size.global_batch_size is not None
    return Verdict(outcomes, spec.steps, size.global_batch_size // size.batch_size, spec.exact, notices)


def default_against(config: Config) -> list[str]:
    """Return ddp:2, fsdp:2 and the config's own strategy, on the fewest ranks that test it."""
    strategy = config.distributed.strategy
    return [
        "ddp:2",
        "fsdp:2",
        *([] if strategy == AUTO else strategy_named(strategy).topologies_to_verify(config.step)),
    ]


def _spec(config: Config, make: Make | None, against: Sequence[str], steps: int) -> tuple[Spec, list[str]]:
    """Return the spec, whose global batch is the same for all topologies, and notices of changed settings."""
    if steps < 1:
        raise UsageError(f"--steps {steps} compares nothing", fix="write a number from 1 on")
    if not against:
        raise UsageError("verify against nothing", fix="name topologies, as in --against ddp:2,fsdp:2")
    world = rank_facts().world_size
    if world > 1:
        raise UsageError(
            f"verify starts its own ranks, and is one of {world} itself", fix="start it without a launcher"
        )
    notices = []
    ranks = [_data_parallel_size(topology) for topology in against]
    training = config.training
    if training.max_steps is not None and training.max_steps < steps:
        steps = training.max_steps
        notices.append(f"{steps} steps: training.max_steps allows no more")
    if training.global_batch_size is None:
        size = training.batch_size * training.accumulation * max(ranks, default=1)
        config = config_from({"training.global_batch_size": size, "training.gradient_accumulation_steps": None}, config)
        notices.append(f"global batch: {size} samples for every topology (training.global_batch_size sets it)")
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
        notices.append(f"param_dtype fp32 instead of {config.precision.param_dtype}, which one process does not have")
        config = config_from({"precision.param_dtype": "fp32"}, config)
    if config.precision.fp8 != "none":
        notices.append("without fp8: where a last bit differs it rounds to another number, as far off as an error is")
        config = config_from({"precision.fp8": "none"}, config)
    return Spec(config, make, steps, _threads(max(parse_topology(topology)[1] for topology in against))), notices


def _threads(ranks: int) -> int:
    """Return the CPU threads per rank of the largest topology; all processes use as many."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else threads_per_rank(ranks)


def _data_parallel_size(topology: str) -> int:
    values, ranks = parse_topology(topology)
    return ranks // int(values.get("pipeline_size") or 1)


def compare(jobs: Sequence[VerifyJob], start: Start, report: Callable[[str], None]) -> list[Outcome]:
    """Run topologies with the same number of ranks in one launch, and compare them with references on disk."""
    outcomes = [Outcome(job.topology) for job in jobs]
    try:
        start(_compare, (jobs,), jobs[0].ranks)
    except LockstepError as error:
        for outcome in outcomes:
            outcome.failed = str(error)
        return outcomes
    for job, outcome in zip(jobs, outcomes, strict=True):
        outcome.steps = _read(job).steps[MAIN]
    pending = [(job, outcome, _next(outcome)) for job, outcome in zip(jobs, outcomes, strict=True)]
    while wanted := [(job, outcome, found) for job, outcome, found in pending if found is not None]:
        for job, _, found in wanted:
            report(f"{job.topology}: differs in step {found.step + 1}; looking for the cause")
        _find_causes(wanted, start)
        # Rounding in one step explains the other steps only if their differences are not larger.
        pending = [
            (job, outcome, None if outcome.cause is None or outcome.cause.is_error else _next(outcome, found))
            for job, outcome, found in wanted
        ]
    return outcomes


def _next(outcome: Outcome, judged: StepResult | None = None) -> StepResult | None:
    """Return the next step whose difference needs a cause."""
    for result in outcome.steps:
        if not result.differences:
            continue
        if judged is None:
            return result
        farther = any(result.distance(aspect) > _LARGER * judged.distance(aspect) for aspect in ASPECTS)
        if result.step > judged.step and farther:
            return result
    return None


def _read(job: VerifyJob) -> Results:
    found: Results = pickle.loads(job.results.read_bytes())
    return found


def _find_causes(different: Sequence[tuple[VerifyJob, Outcome, StepResult]], start: Start) -> None:
    wanted = []
    for job, _, found in different:
        _, subject = job.spec.build({})
        wanted.append((job.spec, experiments_for(job.spec, job.topology, found, subject.data), job.folder))
        subject.close()
    start(_record, (wanted,), 1)
    jobs, left_out = [], []
    for job, _, _ in different:
        cases, impossible = pickle.loads((job.folder / _TAKEN).read_bytes())
        jobs.append(replace(job, cases=tuple(cases)))
        left_out.append(impossible)
        job.results.write_bytes(pickle.dumps(Results()))
    ended = ""
    try:
        start(_compare, (jobs,), jobs[0].ranks)
    except LockstepError as error:  # the difference and its size are known nevertheless
        ended = str(error).splitlines()[0]
    for job, (_, outcome, found), impossible in zip(jobs, different, left_out, strict=True):
        results = _read(job)
        tried = {name: steps[0] for name, steps in results.steps.items() if steps}
        missing = impossible | results.left_out
        if ended:
            missing |= {case.name: ended for case in job.cases if case.name not in tried}
        outcome.cause = cause_of(Evidence(found, tried, missing, job.folder, job.spec.config))
        outcome.cause.is_error |= job.spec.exact  # if every bit must be equal, rounding is an error


def _record(wanted: Sequence[tuple[Spec, Sequence[Case], Path]]) -> None:
    from lockstep.verify import worker

    for spec, cases, folder in wanted:
        (folder / _TAKEN).write_bytes(pickle.dumps(worker.record(spec, cases, folder)))


def _compare(jobs: Sequence[VerifyJob]) -> None:
    from lockstep.verify import worker

    worker.compare(jobs)


def _spawn(function: Callable[..., Any], args: Sequence[Any], ranks: int) -> None:
    from lockstep.launch.spawn import spawn

    spawn(function, tuple(args), nprocs=ranks)
