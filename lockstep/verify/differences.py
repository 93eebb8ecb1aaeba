"""Says how a topology's step differs from the reference's.

Each rank reports, and rank 0 combines what they found.

The evidence of a difference also holds what experiments showed; in words, where the step deviates
first.

Tests: tests/verify/test_updates.py, tests/verify/test_faults.py
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import listed
from lockstep.verify.algebra import NOT_REDUCED, Relation
from lockstep.verify.experiments import FORCED
from lockstep.verify.outcome import Difference
from lockstep.verify.recorded_flow import (
    BACKWARD,
    FORWARD,
    LOSS,
    REDUCTION,
    STAGES,
    Deviation,
    RankFlow,
)
from lockstep.verify.trace import StepFacts, Trace, UpdateFacts

# Compared aspects, in the order in which a step computes them: an earlier difference causes the
# later ones.
ASPECTS = ("start", "samples", "loss", "norm", "gradient", "optimizer", "value", "buffer")
SCALAR_TOLERANCE = 1e-6  # relative, of a loss or a norm in plain mode


@dataclass(frozen=True)
class TensorDifference:
    """One tensor on one rank, compared with the reference's."""

    # largest ratio of an element's difference to its bound; above 1 is too much
    excess: float = 0.0
    square: float = 0.0  # sum of the squared differences
    missing: bool = False  # the tensor exists on one side only
    # of a wrong gradient to the reference's; None if it was not looked for
    relation: Relation | None = None


@dataclass
class RankReport:
    """Results of one rank in one step."""

    rank: int
    replica: tuple[int, ...]  # ranks with the same number hold replicas of the same tensors
    facts: StepFacts  # of its step; samples are those that this rank ran
    pieces: dict[str, dict[str, TensorDifference]]  # kind → name → difference
    fingerprints: dict[str, int]  # parameter → fingerprint of this rank's gradient
    seed: int  # of this rank's random numbers
    not_comparable: str  # the reason if the comparison is not meaningful, else ""
    flow: RankFlow | None  # what it found part by part, if that was compared


@dataclass
class StepResult:
    """One step of one topology."""

    step: int
    # above rounding, by aspect, in backward order
    differences: list[Difference] = field(default_factory=list)
    # parameters whose gradients differ between replicas
    unsynchronized: list[str] = field(default_factory=list)
    seeds: dict[int, int] = field(default_factory=dict)  # rank → seed of its random numbers
    rounding: float = 0.0  # largest relative difference of a gradient within its bound
    same_bits: bool = True  # whether nothing differs at all
    fingerprints: dict[str, int] = field(default_factory=dict)
    # what each rank found part by part, if that was compared
    flows: list[RankFlow] = field(default_factory=list)
    # of each rank, as in `StepFacts`
    outputs: list[list[tuple[str, int]]] = field(default_factory=list)
    module: str = ""  # module, numbers: as in `CompleteSequences`
    numbers: bool = False
    # updates, right_update: of each rank, and of the reference, as in `StepFacts`
    updates: list[UpdateFacts] = field(default_factory=list)
    right_update: UpdateFacts = field(default_factory=UpdateFacts)

    def has(self, *aspects: str) -> bool:
        """Return whether one of the aspects differs."""
        return any(d.aspect in aspects for d in self.differences)

    def distance(self, aspect: str) -> float:
        """Return the largest relative difference in an aspect; 0 if all are within bounds."""
        return max(
            (math.inf if d.missing else d.relative for d in self.differences if d.aspect == aspect),
            default=0.0,
        )

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of `ASPECTS`."""
        return min(self.differences, key=lambda d: ASPECTS.index(d.aspect), default=None)


def combine_reports(
    step: int,
    reports: Sequence[RankReport],
    reference: StepFacts,
    norm_limit: float,
    *,
    exact: bool,
) -> StepResult:
    """Combine all ranks' reports of one step.

    The norm may differ by `norm_limit`, relatively, unless `exact`.
    """
    result = StepResult(step, seeds={report.rank: report.seed for report in reports})
    result.flows = [report.flow for report in reports if report.flow is not None]
    result.outputs = [report.facts.outputs for report in reports]
    result.updates = [report.facts.update for report in reports]
    result.right_update = reference.update
    result.differences += _samples(reports, reference.samples)
    for aspect, limit in (("loss", SCALAR_TOLERANCE), ("norm", norm_limit)):
        result.differences += _scalar(
            aspect, reports, getattr(reference, aspect), 0.0 if exact else limit
        )
    skipped = [report.rank for report in reports if report.facts.skipped != reference.skipped]
    if skipped:
        result.differences.append(
            Difference("norm", "the update was skipped", math.inf, ranks=skipped)
        )
    for kind in ("start", "gradient", "value", "buffer"):
        names = {name for report in reports for name in report.pieces.get(kind, {})}
        # in the order of the backward pass
        known = [name for name in reversed(reference.norms) if name in names]
        for name in (*known, *sorted(names - set(known))):
            pieces = {
                r.rank: r.pieces[kind][name] for r in reports if name in r.pieces.get(kind, {})
            }
            relative = math.sqrt(max(p.square for p in pieces.values())) / max(
                reference.norms.get(name, 1.0), 1e-300
            )
            worst = max(p.excess for p in pieces.values())
            missing = any(p.missing for p in pieces.values())
            result.same_bits &= worst == 0.0
            if worst > 1.0 or missing:
                ranks = sorted(rank for rank, p in pieces.items() if p.excess > 1.0 or p.missing)
                how = _on_ranks({rank: pieces[rank].relation for rank in ranks})
                result.differences.append(
                    Difference(kind, name, relative, worst, ranks, missing, how)
                )
            elif kind == "gradient":
                result.rounding = max(result.rounding, relative)
    for text, ranks in differing_options(result.updates, reference.update):
        result.differences.append(Difference("optimizer", text, math.inf, ranks=ranks))
    result.same_bits &= not result.differences
    held: dict[tuple[tuple[int, ...], str], set[int]] = {}
    for report in reports:
        for name, value in report.fingerprints.items():
            held.setdefault((report.replica, name), set()).add(value)
            result.fingerprints[name] = result.fingerprints.get(name, 0) + value
    result.unsynchronized = sorted({name for (_, name), values in held.items() if len(values) > 1})
    return result


def _on_ranks(by_rank: Mapping[int, Relation | None]) -> Relation | None:
    """Return how a tensor relates to the reference's, on which ranks; None if it is not known.

    It is of the kind of the first rank's.
    """
    ranks: dict[Relation, list[int]] = {}
    for rank, relation in by_rank.items():
        if relation is not None:
            ranks.setdefault(relation, []).append(rank)
    if not ranks:
        return None
    clauses = [f"{relation} on {name_ranks(which)}" for relation, which in ranks.items()]
    return Relation(", ".join(clauses), next(iter(ranks)).kind)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 1`, or `ranks 0, 1`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _samples(reports: Sequence[RankReport], expected: Mapping[int, str]) -> list[Difference]:
    """Return a difference if ranks ran other micro-batches than the reference."""
    seen: dict[int, str] = {}
    doubled = []
    for report in reports:
        for index, text in report.facts.samples.items():
            if seen.setdefault(index, text) != text:
                doubled.append(index)
    wrong = [index for index in expected if index in seen and seen[index] != expected[index]]
    if not wrong and not doubled and len(seen) == len(expected):
        return []
    if sorted(seen.values()) == sorted(expected.values()) and not doubled:
        what = "the same micro-batches in another order"
    elif len(seen) != len(expected):
        what = f"{len(seen)} micro-batches instead of {len(expected)}"
    elif doubled:
        what = f"ranks do not agree on micro-batch {doubled[0]}"
    else:
        what = (
            f"{len(wrong)} of {len(expected)} micro-batches hold other samples, the first of them"
            f" is {wrong[0]}"
        )
    ranks = sorted(
        {r.rank for r in reports for i, text in r.facts.samples.items() if expected.get(i) != text}
    )
    return [Difference("samples", what, math.inf, ranks=ranks)]


def _scalar(
    aspect: str, reports: Sequence[RankReport], expected: float, limit: float
) -> list[Difference]:
    found = {report.rank: getattr(report.facts, aspect) for report in reports}
    off = {
        rank: abs(value - expected) / max(abs(expected), 1e-300)
        for rank, value in found.items()
        if value != expected and not (math.isnan(value) and math.isnan(expected))
    }
    ranks = sorted(rank for rank, relative in off.items() if not relative <= limit)
    if not ranks:
        return []
    text = f"{found[ranks[0]]:.9g} instead of {expected:.9g}"
    return [
        Difference(aspect, text, off[ranks[0]], off[ranks[0]] / limit if limit else math.inf, ranks)
    ]


def differing_options(
    updates: Sequence[UpdateFacts], right: UpdateFacts
) -> list[tuple[str, list[int]]]:
    """Return (text, ranks) for each option of the optimizer that is not the reference's."""
    found: dict[tuple[str, str, str], tuple[dict[str, None], list[int]]] = {}
    for rank, update in enumerate(updates):
        for name, mine in update.options.items() if update.called and right.called else ():
            theirs = right.options.get(name, {})
            for key in dict.fromkeys((*theirs, *mine)) if theirs and mine else ():
                if mine.get(key) != theirs.get(key):
                    names, ranks = found.setdefault(
                        (key, str(mine.get(key)), str(theirs.get(key))), ({}, [])
                    )
                    names[name] = None
                    ranks += [] if rank in ranks else [rank]
    texts = []
    for (key, mine_text, right_text), (names, ranks) in found.items():
        of_all = len(names) == len(right.options)
        option = "the learning rate (lr)" if key == "lr" else key
        what = "" if of_all else f" for {listed(list(names))}"
        texts.append((f"{option} {mine_text} instead of {right_text}{what}", ranks))
    return texts


GONE = 1e-2  # an experiment that leaves less than this fraction of a difference has removed it


@dataclass
class Evidence:
    """All that is known about one topology's difference."""

    found: StepResult  # the first step that differs, in the main run
    tried: dict[str, StepResult]  # experiment → the topology's result
    left_out: dict[str, str]  # experiment that could not be made → reason
    folder: Path  # of the reference's traces
    config: Config  # of the run

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Note experiments that could not be made, each with the reason."""
        self.left_out |= reasons

    def agrees(self, name: str, left_out: Collection[str] = ()) -> bool:
        """Return whether the experiment was made, and the difference disappears in it.

        Buffers in `left_out` may still differ.

        Rounding counts: a difference that is not larger than the experiment's rounding is not
        explained by it. The norm does if it differs alone: else it follows from the gradients, and
        an experiment may be without clipping.
        """
        result = self.tried.get(name)
        if result is None or result.has("start"):
            return False
        if self.found.has("gradient") and result.rounding > GONE * min(
            1.0, self.found.distance("gradient")
        ):
            return False
        aspects = ("loss", "gradient", "value", "buffer")
        was = {
            a: self.found.distance(a) for a in (aspects if self.found.has(*aspects) else ("norm",))
        }
        written = [d for d in result.differences if d.aspect == "buffer" and d.name in left_out]
        result = replace(result, differences=[d for d in result.differences if d not in written])
        left = {aspect: result.distance(aspect) for aspect in was}
        least = {"loss": 4 * SCALAR_TOLERANCE}
        return any(was.values()) and all(
            left[a] <= max(GONE * min(1.0, was[a]), least.get(a, 0.0)) for a in was
        )

    def facts(self, name: str) -> StepFacts | None:
        """Return the reference's facts of an experiment; None if it was not made."""
        step = self.tried[name].step if name in self.tried else self.found.step
        try:
            return Trace(self.folder / name).facts(step)
        except FileNotFoundError:
            return None

    @property
    def flows(self) -> list[RankFlow]:
        """The findings of each rank, part by part; empty if that was not possible."""
        return self.tried[FORCED].flows if FORCED in self.tried else []

    @property
    def all_deviations(self) -> list[Deviation]:
        """The parts that deviate by themselves on any rank, in the order of a step."""
        every = [deviation for flow in self.flows for deviation in flow.deviations]
        return sorted(
            every, key=lambda deviation: (STAGES.index(deviation.stage), deviation.micro_batch)
        )

    @property
    def deviations(self) -> list[Deviation]:
        """The deviations that can be the cause.

        One in a forward pass or in a loss makes another loss: it is not the cause where losses
        agree.
        """
        if self.found.has("loss"):
            return self.all_deviations
        return [d for d in self.all_deviations if d.stage not in (FORWARD, LOSS)]

    @property
    def not_reduced(self) -> set[str]:
        """The parameters that have a rank's own sum in place of the reduced gradient."""
        return {
            d.module
            for d in self.deviations
            if d.stage == REDUCTION and d.relation.kind == NOT_REDUCED
        }


def first_seen(e: Evidence) -> str:
    """Return a clause on what differs first in the step, and on which ranks."""
    first = e.found.first
    assert first is not None
    others = [a for a in ASPECTS if a != first.aspect and e.found.has(a)]
    how = f" {first.relation}" if first.relation is not None else f" on {name_ranks(first.ranks)}"
    text = f"the first that differs is the {first.aspect} ({first.name}){how}"
    return text + (f", and so do {listed(others)}" if others else "")


def located(e: Evidence) -> str:
    """Return a clause on the first part that deviates; "" if none does."""
    found = e.deviations
    if not found:
        return ""
    first = found[0]
    alike = [
        d for d in found if (d.stage, d.module, d.what) == (first.stage, first.module, first.what)
    ]
    # The rank on which it is wrong, if only some are: the relation of the first.
    name = first.module or "the model"
    module = f"{name} ({first.kind})" if first.kind else name
    what = {
        FORWARD: f"the {first.what} of {module}",
        LOSS: f"the {first.what} of a micro-batch, from the same outputs",
        BACKWARD: f"the {first.what} of {module}, from the same gradients",
        REDUCTION: f"the reduced gradient of {name}, of the same gradients on each rank,",
    }[first.stage]
    text = f"; {first.stage}: {what} {first.relation} on {name_ranks(ranks_of(alike))}"
    batches = sorted({d.micro_batch for d in alike if d.micro_batch >= 0})
    if batches:
        text += (
            f", micro-batch{'es' if len(batches) > 1 else ''} {', '.join(map(str, batches[:8]))}"
        )
    text += f" ({first.note})" if first.note else ""
    others = list(
        dict.fromkeys((d.module or "the model") for d in found if d.module != first.module)
    )
    return text + (f"; also {listed(others)}" if others else "")


def ranks_of(found: Sequence[Deviation]) -> list[int]:
    """Return the ranks on which parts deviate."""
    return sorted({deviation.rank for deviation in found})
