"""Compares topologies of a config with one process, and finds the causes of differences.

Each topology runs in launches of its own, in which each case is a fork (`lockstep.verify.subject`):
first the steps, then, where one differs, the experiments that tell why.

Tests: tests/verify/test_faults.py, tests/verify/test_ready_configs.py
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import first_line
from lockstep.verify.causes import cause_of, is_clear, wanted_experiments
from lockstep.verify.comparison_result import (
    ALLOWED,
    DIFFERENT,
    EQUAL,
    NOT_RUN,
    Outcome,
    PartDifference,
)
from lockstep.verify.differences import ASPECTS, Evidence, StepResult
from lockstep.verify.experiments import NUDGED, first_experiments, further_experiments
from lockstep.verify.recorded_flow import Deviation
from lockstep.verify.reference import Check, judge
from lockstep.verify.subject import MAIN, Case, Spec, VerifyJob, run_isolated, why_not_ended

# Column of the table → the aspects that it shows.
COLUMNS = {
    "samples": ("samples",),
    "loss": ("loss",),
    "norm": ("norm",),
    "gradients": ("gradient",),
    "values": ("start", "optimizer", "value"),
    "buffers": ("buffer",),
}
_CHECKED = "checks"  # file with the names of the checks that are possible
_SECONDS = 30.0  # limit for a case; it is longer where the reference takes long
_LONGEST = 3600.0  # seconds for the reference itself
_TIMES = 20.0  # how many times as long as the reference a case may take
# a step whose difference is this many times larger than an explained one needs a cause of its own
_LARGER = 4.0

Start = Callable[[Callable[..., Any], Sequence[Any], int], None]
"""Runs a function with arguments on a number of ranks of this machine, and waits for them."""


def record(
    wanted: Sequence[tuple[Spec, Sequence[Case], Path]], start: Start
) -> list[dict[str, str]]:
    """Let one process take the steps of cases alone.

    Returns:
        For each of `wanted`: case that fails → reason.

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
                missing[case.name] = first_line(error)
    return left_out


def compare(
    jobs: Sequence[VerifyJob], start: Start, report: Callable[[str], None]
) -> list[Outcome]:
    """Run topologies with the same number of ranks in one launch, and compare them.

    They are compared with references on disk.
    """
    start(_compare, (jobs,), jobs[0].ranks)
    compared = [_Topology(job, _results(job, MAIN)) for job in jobs]
    pending = [topology for topology in compared if topology.next_difference() is not None]
    while pending:
        for topology in pending:
            assert topology.examined is not None
            report(
                f"{topology.job.topology}: differs in step {topology.examined.step + 1}; looking"
                " for the cause"
            )
        _find_causes(pending, start)
        # Rounding in one step explains the other steps only if their differences are not larger.
        explained = [topology for topology in pending if not topology.outcome.causes[0].is_error]
        pending = [topology for topology in explained if topology.next_difference() is not None]
    return [topology.finished() for topology in compared]


def outcomes_of(jobs: Sequence[VerifyJob], start: Start) -> list[Outcome]:
    """Take the steps of jobs in one launch, and return what differs, without causes."""
    start(_compare, (jobs,), jobs[0].ranks)
    return [_Topology(job, _results(job, MAIN)).finished() for job in jobs]


def check_reference(spec: Spec, folder: Path, start: Start) -> list[Check]:
    """Make the reference's own checks, each in a process of its own, and return the verdicts."""
    start(_check, (spec, folder), 1)
    taken: list[str] = pickle.loads((folder / _CHECKED).read_bytes())
    limit = _limit(folder)
    ends = {what: why_not_ended(folder / "ends" / f"check-{what}", 1, limit) for what in taken}
    missing = {what: first_line(error) for what, error in ends.items() if error is not None}
    return judge(taken, folder, missing)


def _limit(folder: Path) -> float:
    """Return the seconds that a case may take, from those that the reference took."""
    path = folder / MAIN / "seconds"
    return _SECONDS + _TIMES * float(path.read_text()) if path.exists() else _LONGEST


def _end_of_record(folder: Path, case: Case) -> Path:
    """Return the folder that tells how one process ended a case."""
    return folder / "ends" / f"reference-{case.name}"


def _results(job: VerifyJob, name: str) -> list[StepResult] | str:
    """Return the results of a case, step by step, or why there are none."""
    case = next(case for case in job.cases if case.name == name)
    error = why_not_ended(job.end_of(case), job.ranks, _limit(job.folder))
    if error is not None:
        return str(error)
    path = job.results_of(case)
    if not path.exists():
        return f"{name}: a process of it ended without a word"
    results: list[StepResult] | str = pickle.loads(path.read_bytes())
    return results


# ---- one topology ----


@dataclass
class _Topology:
    """Steps of one topology, until each difference has a cause."""

    job: VerifyJob
    steps: list[StepResult] | str  # one result per step, or why there are none
    outcome: Outcome = field(init=False)
    examined: StepResult | None = None  # the step whose difference is explained now, or was last
    deviations: list[Deviation] = field(default_factory=list)  # parts of that step, in its order

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.job.topology, self.job.ranks)
        if isinstance(self.steps, str):
            self.outcome.fail(self.steps)

    @property
    def results(self) -> list[StepResult]:
        """The results of the steps; empty if the topology could not be run."""
        return [] if isinstance(self.steps, str) else self.steps

    def next_difference(self) -> StepResult | None:
        """Return the next step whose difference needs a cause, which is examined from now on.

        None without any.
        """
        judged = self.examined
        for result in self.results:
            if result.differences and (judged is None or _is_later_and_larger(result, judged)):
                self.examined = result
                return result
        return None

    def finished(self) -> Outcome:
        """Return the outcome, once there are causes."""
        outcome = self.outcome
        results = self.results
        outcome.take_steps(len(results), outcome.framework)
        rounding = max((result.rounding for result in results), default=0.0)
        same_bits = bool(results) and all(result.same_bits for result in results)
        wrong = next((result for result in results if result.first is not None), None)
        if wrong is None:
            outcome.compare(None, rounding, same_bits=same_bits)
        else:
            assert wrong.first is not None
            first = replace(wrong.first, step=wrong.step)
            alike = sum(d.aspect == first.aspect for d in wrong.differences) - 1
            outcome.compare(first, rounding, alike=alike, same_bits=same_bits)
            outcome.describe(wrong.fingerprints, [] if outcome.passed else self._parts(wrong))
        for column, aspects in COLUMNS.items():
            sign = ALLOWED if outcome.passed else DIFFERENT
            if not any(result.has(*aspects) for result in results):
                sign = EQUAL
            outcome.signs[column] = NOT_RUN if outcome.failed else sign
        return outcome

    def _parts(self, wrong: StepResult) -> list[PartDifference]:
        """Return the parts that deviate by themselves; if none does, the parameters that differ."""
        parts = []
        for deviation in self.deviations:
            text = (
                f"{deviation.stage}: {deviation.what} {deviation.relation} on rank {deviation.rank}"
            )
            if deviation.note:
                text += f" ({deviation.note})"
            parts.append(PartDifference(deviation.module, text, deviation.relative))
        if parts:
            return parts
        named = [d for d in wrong.differences if d.name in wrong.fingerprints]
        return [
            PartDifference(d.name, f"{d.aspect} differs by {d.relative:.1e}", d.relative)
            for d in named
        ]


def _is_later_and_larger(result: StepResult, judged: StepResult) -> bool:
    larger = any(result.distance(aspect) > _LARGER * judged.distance(aspect) for aspect in ASPECTS)
    return result.step > judged.step and larger


def _find_causes(different: Sequence[_Topology], start: Start) -> None:
    """Make the experiments that tell why topologies differ, and name the causes.

    They are made in the steps that are examined.
    """
    first: list[tuple[VerifyJob, Evidence]] = []
    for topology in different:
        job = topology.job
        examined = topology.examined
        assert examined is not None
        cases = tuple(first_experiments(job.spec, job.topology, examined.step))
        evidence = Evidence(examined, {}, {}, job.folder, job.spec.config)
        first.append((replace(job, cases=cases), evidence))
    _experiment(first, start)

    further: list[tuple[VerifyJob, Evidence]] = []
    for job, evidence in first:
        if is_clear(evidence):
            continue
        _, subject = job.spec.build({})
        names = wanted_experiments(evidence, job.topology)
        cases = tuple(
            further_experiments(job.spec, job.topology, evidence.main.step, names, subject.data)
        )
        subject.close()
        if cases:
            further.append((replace(job, cases=cases), evidence))
    _experiment(further, start)

    for topology, (job, evidence) in zip(different, first, strict=True):
        cause = cause_of(evidence)
        # If every bit must be equal, rounding is an error.
        is_error = cause.is_error or job.spec.exact
        topology.outcome.causes[:] = [replace(cause, is_error=is_error)]
        topology.deviations = evidence.deviations


def _experiment(wanted: Sequence[tuple[VerifyJob, Evidence]], start: Start) -> None:
    """Take the cases of jobs in one process and on ranks, and add the results to the evidence."""
    if not wanted:
        return
    left_out = record([(job.spec, job.cases, job.folder) for job, _ in wanted], start)
    jobs = []
    for (job, evidence), missing in zip(wanted, left_out, strict=True):
        evidence.leave_out(missing)
        taken = tuple(
            case for case in job.cases if case.name not in missing and case.name != NUDGED
        )
        jobs.append(replace(job, cases=taken))
    start(_compare, (jobs,), jobs[0].ranks)
    for job, (_, evidence) in zip(jobs, wanted, strict=True):
        for case in job.cases:
            results = _results(job, case.name)
            if isinstance(results, str):
                evidence.left_out[case.name] = first_line(results)
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
            call = partial(worker.record, spec, case, folder)
            run_isolated(call, _end_of_record(folder, case), 0, limit, alone=True)


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
