"""Says how a topology's step differs from the reference's.

Each rank reports what it found (`RankReport`), and `combine_reports` makes one `StepResult` of all
reports. The second half of the file says in words where a step deviates first: in samples, options
of the optimizer, or part by part as the experiments showed.

Tests: tests/verify/test_updates.py, tests/verify/test_faults.py
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import listed
from lockstep.verify.algebra import NOT_REDUCED, Relation
from lockstep.verify.comparison_result import Difference
from lockstep.verify.experiments import FORCED
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
    tensors = _compared_tensors(reports, reference)
    updates = [report.facts.update for report in reports]
    differences = [
        *_samples(reports, reference.samples),
        *_scalar("loss", reports, reference.loss, 0.0 if exact else SCALAR_TOLERANCE),
        *_scalar("norm", reports, reference.norm, 0.0 if exact else norm_limit),
        *_skipped(reports, reference),
        *(tensor.difference() for tensor in tensors if tensor.differs),
    ]
    for text, ranks in differing_options(updates, reference.update):
        differences.append(Difference("optimizer", text, math.inf, ranks=ranks))
    within_bounds = [each for each in tensors if each.kind == "gradient" and not each.differs]
    return StepResult(
        step,
        differences=differences,
        unsynchronized=_unsynchronized(reports),
        seeds={report.rank: report.seed for report in reports},
        rounding=max((gradient.relative for gradient in within_bounds), default=0.0),
        same_bits=not differences and all(tensor.excess == 0.0 for tensor in tensors),
        fingerprints=_total_fingerprints(reports),
        flows=[report.flow for report in reports if report.flow is not None],
        outputs=[report.facts.outputs for report in reports],
        updates=updates,
        right_update=reference.update,
    )


@dataclass(frozen=True)
class _ComparedTensor:
    """A tensor of one kind, compared on all ranks that hold it, or a shard of it."""

    kind: str
    name: str
    pieces: dict[int, TensorDifference]  # rank → difference
    norm: float  # of the reference's gradient; 1 for a tensor that has none

    @property
    def excess(self) -> float:
        """Largest ratio of an element's difference to its bound."""
        return max(piece.excess for piece in self.pieces.values())

    @property
    def missing(self) -> bool:
        """True if it exists on one side only, on any rank."""
        return any(piece.missing for piece in self.pieces.values())

    @property
    def differs(self) -> bool:
        """True if it differs by more than rounding."""
        return self.excess > 1.0 or self.missing

    @property
    def relative(self) -> float:
        """Norm of the largest difference on a rank, relative to the gradient."""
        largest = max(piece.square for piece in self.pieces.values())
        return math.sqrt(largest) / max(self.norm, 1e-300)

    def difference(self) -> Difference:
        """Return how it differs, and on which ranks."""
        ranks = sorted(
            rank for rank, piece in self.pieces.items() if piece.excess > 1.0 or piece.missing
        )
        relation = _on_ranks({rank: self.pieces[rank].relation for rank in ranks})
        return Difference(
            self.kind, self.name, self.relative, self.excess, ranks, self.missing, relation
        )


def _compared_tensors(reports: Sequence[RankReport], reference: StepFacts) -> list[_ComparedTensor]:
    """Return all tensors that ranks have compared: by kind, each in the order of the backward pass.

    What has no gradient in the reference, as a buffer, comes after, by name.
    """
    tensors = []
    for kind in ("start", "gradient", "value", "buffer"):
        names = {name for report in reports for name in report.pieces.get(kind, {})}
        with_gradient = [name for name in reversed(reference.norms) if name in names]
        for name in (*with_gradient, *sorted(names - set(with_gradient))):
            pieces = {
                report.rank: report.pieces[kind][name]
                for report in reports
                if name in report.pieces.get(kind, {})
            }
            tensors.append(_ComparedTensor(kind, name, pieces, reference.norms.get(name, 1.0)))
    return tensors


def _skipped(reports: Sequence[RankReport], reference: StepFacts) -> list[Difference]:
    """Return a difference if ranks left an update out that the reference made, or vice versa."""
    ranks = [report.rank for report in reports if report.facts.skipped != reference.skipped]
    if not ranks:
        return []
    return [Difference("norm", "the update was skipped", math.inf, ranks=ranks)]


def _unsynchronized(reports: Sequence[RankReport]) -> list[str]:
    """Return the parameters whose gradients are not the same on all replicas of a shard."""
    fingerprints: dict[tuple[tuple[int, ...], str], set[int]] = {}
    for report in reports:
        for name, fingerprint in report.fingerprints.items():
            fingerprints.setdefault((report.replica, name), set()).add(fingerprint)
    return sorted({name for (_, name), values in fingerprints.items() if len(values) > 1})


def _total_fingerprints(reports: Sequence[RankReport]) -> dict[str, int]:
    """Return the sum of the ranks' fingerprints of each gradient: two runs of a step have one."""
    totals: Counter[str] = Counter()
    for report in reports:
        totals.update(report.fingerprints)
    return dict(totals)


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
    clauses = [f"{relation} on {name_ranks(having_it)}" for relation, having_it in ranks.items()]
    return Relation(", ".join(clauses), next(iter(ranks)).kind)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 1`, or `ranks 0, 1`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _samples(reports: Sequence[RankReport], expected: Mapping[int, str]) -> list[Difference]:
    """Return a difference if ranks ran other micro-batches than the reference."""
    hashes: dict[int, str] = {}  # micro-batch → hash of its samples, on the first rank with it
    doubled = []
    for report in reports:
        for index, text in report.facts.samples.items():
            if hashes.setdefault(index, text) != text:
                doubled.append(index)
    wrong = [index for index in expected if index in hashes and hashes[index] != expected[index]]
    if not wrong and not doubled and len(hashes) == len(expected):
        return []
    if sorted(hashes.values()) == sorted(expected.values()) and not doubled:
        what = "the same micro-batches in another order"
    elif len(hashes) != len(expected):
        what = f"{len(hashes)} micro-batches instead of {len(expected)}"
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
    """Return a difference if a number of the step is off by more than `limit`, relatively."""
    values = {report.rank: getattr(report.facts, aspect) for report in reports}
    off = {
        rank: abs(value - expected) / max(abs(expected), 1e-300)
        for rank, value in values.items()
        if value != expected and not (math.isnan(value) and math.isnan(expected))
    }
    ranks = sorted(rank for rank, relative in off.items() if not relative <= limit)
    if not ranks:
        return []
    first = ranks[0]
    text = f"{values[first]:.9g} instead of {expected:.9g}"
    excess = off[first] / limit if limit else math.inf
    return [Difference(aspect, text, off[first], excess, ranks)]


def differing_options(
    updates: Sequence[UpdateFacts], right: UpdateFacts
) -> list[tuple[str, list[int]]]:
    """Return (text, ranks) for each option of the optimizer that is not the reference's."""
    # (option, this rank's value, the reference's) → the parameters and ranks that have it so, each
    # once and in order
    parameters: dict[tuple[str, str, str], dict[str, None]] = {}
    ranks: dict[tuple[str, str, str], dict[int, None]] = {}
    for rank, update in enumerate(updates):
        if not update.called or not right.called:
            continue
        for name, mine in update.options.items():
            reference = right.options.get(name, {})
            if not mine or not reference:
                continue
            for key in dict.fromkeys((*reference, *mine)):
                if mine.get(key) == reference.get(key):
                    continue
                option = (key, str(mine.get(key)), str(reference.get(key)))
                parameters.setdefault(option, {})[name] = None
                ranks.setdefault(option, {})[rank] = None
    texts = []
    for option, names in parameters.items():
        key, mine_text, right_text = option
        key_in_words = "the learning rate (lr)" if key == "lr" else key
        of_which = "" if len(names) == len(right.options) else f" for {listed(list(names))}"
        text = f"{key_in_words} {mine_text} instead of {right_text}{of_which}"
        texts.append((text, list(ranks[option])))
    return texts


GONE = 1e-2  # an experiment that leaves less than this fraction of a difference has removed it


@dataclass
class Evidence:
    """All that is known about one topology's difference."""

    main: StepResult  # the first step that differs, in the case `main`
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
        gradient = min(1.0, self.main.distance("gradient"))
        if self.main.has("gradient") and result.rounding > GONE * gradient:
            return False
        result = replace(
            result,
            differences=[
                each
                for each in result.differences
                if not (each.aspect == "buffer" and each.name in left_out)
            ],
        )
        aspects: tuple[str, ...] = ("loss", "gradient", "value", "buffer")
        if not self.main.has(*aspects):
            aspects = ("norm",)
        if not any(self.main.distance(aspect) for aspect in aspects):
            return False
        return all(self._is_gone(aspect, result) for aspect in aspects)

    def _is_gone(self, aspect: str, result: StepResult) -> bool:
        """Return whether an experiment leaves less than `GONE` of an aspect's difference.

        A gradient that is off by 0.3 is explained if 0.003 are left at most; one that is off by 50,
        if 0.01 are. A loss may keep its rounding.
        """
        limit = GONE * min(1.0, self.main.distance(aspect))
        if aspect == "loss":
            limit = max(limit, 4 * SCALAR_TOLERANCE)
        return result.distance(aspect) <= limit

    def facts(self, name: str) -> StepFacts | None:
        """Return the reference's facts of an experiment; None if it was not made."""
        step = self.tried[name].step if name in self.tried else self.main.step
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
        if self.main.has("loss"):
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
    first = e.main.first
    assert first is not None
    others = [a for a in ASPECTS if a != first.aspect and e.main.has(a)]
    how = f" {first.relation}" if first.relation is not None else f" on {name_ranks(first.ranks)}"
    text = f"the first that differs is the {first.aspect} ({first.name}){how}"
    return text + (f", and so do {listed(others)}" if others else "")


def located(e: Evidence) -> str:
    """Return a clause on the first part that deviates; "" if none does."""
    deviations = e.deviations
    if not deviations:
        return ""
    first = deviations[0]
    # The rank on which it is wrong, if only some are: the relation of the first.
    same_part = [
        d
        for d in deviations
        if (d.stage, d.module, d.what) == (first.stage, first.module, first.what)
    ]
    name = first.module or "the model"
    module = f"{name} ({first.kind})" if first.kind else name
    part = {
        FORWARD: f"the {first.what} of {module}",
        LOSS: f"the {first.what} of a micro-batch, from the same outputs",
        BACKWARD: f"the {first.what} of {module}, from the same gradients",
        REDUCTION: f"the reduced gradient of {name}, of the same gradients on each rank,",
    }[first.stage]
    text = f"; {first.stage}: {part} {first.relation} on {name_ranks(ranks_of(same_part))}"
    batches = sorted({d.micro_batch for d in same_part if d.micro_batch >= 0})
    if batches:
        plural = "es" if len(batches) > 1 else ""
        text += f", micro-batch{plural} {', '.join(map(str, batches[:8]))}"
    if first.note:
        text += f" ({first.note})"
    others = dict.fromkeys(d.module or "the model" for d in deviations if d.module != first.module)
    if others:
        text += f"; also {listed(list(others))}"
    return text


def ranks_of(deviations: Sequence[Deviation]) -> list[int]:
    """Return the ranks on which parts deviate."""
    return sorted({deviation.rank for deviation in deviations})
