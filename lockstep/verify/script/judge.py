"""Compares a script's steps on several ranks with those of one process that is given the same samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError, RunError
from lockstep.verify.script.causes import (
    EXACT,
    UNKNOWN,
    GradientEvidence,
    ScriptCause,
    Vector,
    accumulation_cause,
    cause,
    gradient_cause,
    relative,
    replicas_cause,
    seen_on_ranks,
    settings_cause,
)
from lockstep.verify.script.record import LOCKSTEP, TORCH, Pieces, ScriptRecord, Tensors, by_rank
from lockstep.verify.script.runs import Feed, ScriptRuns, is_stored, one_after_another, step_batches, united

COLUMNS = ("samples", "random numbers", "first values", "settings", "gradients", "weights")
_ROUNDING = 2e-5  # relative difference that needs no explanation in float32
_ROUNDING_16 = 2e-2  # the same for parameters of 16 bits
_CEILING = 1e-2  # a difference above it is never rounding
_NUDGES = 10.0  # how many times as far as changed last bits do a difference may be
_MOST_PARTS = 8  # processes that are started for the parts of one step
_STEP_COLUMNS = ("gradients", "weights")  # in the order in which a step computes them


@dataclass
class ScriptDifference:
    """The first difference: `aspect` is a column, `relative` its size."""

    step: int
    aspect: str
    name: str
    relative: float
    rank: int | None = None


@dataclass
class ScriptOutcome:
    """Steps of a script on a number of ranks, compared with one process.

    Attributes:
        steps: number of steps that were compared.
        framework: whose loop it is.
        first: the first difference that is left when random numbers, first values and settings are equal.
        rounding: the largest difference of a gradient that is none.
        causes: of this and of other differences.
        notices: what the comparison takes for granted.
        failed: the error, if the script could not be run.
        not_judged: why gradients and weights can't be compared; empty: they were.
    """

    ranks: int
    steps: int = 0
    framework: str = TORCH
    first: ScriptDifference | None = None
    rounding: float = 0.0
    causes: list[ScriptCause] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    failed: str = ""
    not_judged: str = ""

    @property
    def passed(self) -> bool:
        """Return whether the ranks train what one process trains, but for what is other by nature."""
        return not self.failed and not self.not_judged and not any(found.is_error for found in self.causes)

    def mark(self, column: str) -> str:
        """Return the table's sign for a column."""
        if self.failed or self.framework == LOCKSTEP:
            return "-"
        if column not in _STEP_COLUMNS:
            found = [one for one in self.causes if one.column == column]
            return "✓" if not found else "✗" if any(one.is_error for one in found) else "≈"
        if self.not_judged:
            return "?"
        found = [one for one in self.causes if one.column in _STEP_COLUMNS]
        if not found:
            return "✓"
        first = self.first.aspect if self.first is not None else _STEP_COLUMNS[0]
        if _STEP_COLUMNS.index(column) < _STEP_COLUMNS.index(first):
            return "✓"
        return "✗" if any(one.is_error for one in found) else "≈"


def judge_script(runs: ScriptRuns, ranks: int) -> ScriptOutcome:
    """Run a script on a number of ranks and as one process, and compare them."""
    outcome = ScriptOutcome(ranks)
    try:
        _Judgement(runs, outcome).judge()
    except LockstepError as error:
        outcome.failed = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return outcome


class _Judgement:
    """Everything that is run for one number of ranks."""

    def __init__(self, runs: ScriptRuns, outcome: ScriptOutcome) -> None:
        self.runs, self.outcome, self.ranks = runs, outcome, outcome.ranks
        self.records: list[ScriptRecord] = []
        self.folder = Path()
        self.rounding = _ROUNDING
        self.given: dict[str, Any] = {}  # what each run of one process is given, but for its samples
        self.feed: Feed = {}

    def judge(self) -> None:
        outcome = self.outcome
        self.folder, self.records = self.runs.world(self.ranks, "as it is")
        steps = min(len(record.steps) for record in self.records)
        if not steps:
            raise RunError(
                "no call of optimizer.step() was seen on " + ("any rank" if self.ranks > 1 else "the rank"),
                why="the script ended before its first step, trains in processes of its own, or without torch.optim",
                fix="verify a script that torchrun can start, and give it the arguments with which it trains",
            )
        outcome.steps, outcome.framework = steps, self.records[0].framework
        if outcome.framework == LOCKSTEP:
            outcome.not_judged = (
                "the script trains with Lockstep's own step, which `lockstep verify CONFIG` compares part by part; in "
                "Python, lockstep.verify.verify takes a function that makes model and data"
            )
            return
        outcome.causes += seen_on_ranks(self.records)
        self._undo()
        reference = self._reference()
        if reference is None:
            return
        found = settings_cause(self.records, reference)
        if found is not None:
            outcome.causes.append(found)
        self._compare(reference)
        if not outcome.not_judged and self.records[0].passes[0] > 1:
            self._check_accumulation(reference)

    def _undo(self) -> None:
        """Run the ranks once more without what differs by itself."""
        again: dict[str, Any] = {}
        what = []
        if any(draw.moved for record in self.records for step in record.steps for draw in step.draws):
            again["mean_draws"] = self.given["mean_draws"] = True
            _, records = world = self.runs.world(self.ranks, "without random numbers", **again)
            if all(map(_equal_losses, self.records, records)):  # as where the probability of dropout is 0
                self.outcome.causes = [found for found in self.outcome.causes if found.kind != "random numbers"]
            self.folder, self.records = world
        dtypes = {dtype for record in self.records for step in record.steps for dtype in step.dtypes}
        if any("autocast" in dtype for dtype in dtypes):
            again["full_precision"] = self.given["full_precision"] = True
            what.append("without autocast")
            self.outcome.notices.append("without autocast: 16 bits round differently in batches of another size")
        elif any("16" in dtype for dtype in dtypes):
            self.rounding = _ROUNDING_16
            self.outcome.notices.append(f"weights of 16 bits: differences below {_ROUNDING_16:.0%} are not judged")
        if any(found.kind == "first values" for found in self.outcome.causes):
            again["first"] = self._first()
            what.append("with rank 0's first values")
        if what:
            self.folder, self.records = self.runs.world(self.ranks, " and ".join(what), **again)

    def _first(self) -> Tensors:
        return by_rank([record.first for record in self.records])[0]

    def _reference(self) -> ScriptRecord | None:
        """Return one process's record, given the ranks' samples, first values and settings."""
        self.feed = united(self.records)
        if not is_stored(self.feed, self.folder):
            self.feed = {}
            self.outcome.notices.append("samples could not be stored: one process reads its own")
        sizes = {
            loader: sum(len(r.batches[loader][0]) for r in self.records if r.batches.get(loader))
            for loader in self.records[0].batches
        } if self.feed else {}  # fmt: skip
        settings = [step.settings for step in self.records[0].steps]
        self.given |= {"first": self._first(), "settings": tuple(settings), "steps": self.outcome.steps}
        self.given |= {"samples": self.folder, "sizes": {k: v for k, v in sizes.items() if v}}
        reference = self._alone("given the samples of all ranks", [self.feed])[0]
        loader = self.records[0].training_loader
        mine, theirs = self.records[0].passes[:1], reference.passes[:1]
        if self.feed and loader is not None and mine and theirs == [mine[0] * self.ranks]:
            self.given["sizes"] = {}
            self.feed = one_after_another(self.records)
            reference = self._alone("given the samples of each rank in turn", [self.feed])[0]
            self.outcome.notices.append(
                f"as written, {self.ranks} ranks accumulate over {mine[0]} micro-batches a step and one process over "
                f"{theirs[0]}: the same global batch"
            )
        elif self.feed and loader is not None:
            self._say_batch(reference, loader)
        if not reference.steps:
            self.outcome.not_judged = "one process took no step"
        elif not self.feed or loader is None:
            self._check_inputs(reference)
        elif not self._is_split() and reference.passes != self.records[0].passes[: self.outcome.steps]:
            self.outcome.not_judged = f"one process takes {theirs[0]} micro-batches a step, a rank {mine[0]}"
        return None if self.outcome.not_judged else reference

    def _is_split(self) -> bool:
        return any(len(at) == 1 for at in self.feed.values())

    def _say_batch(self, reference: ScriptRecord, loader: int) -> None:
        size = sum(len(record.batches[loader][0]) for record in self.records if record.batches.get(loader))
        written = reference.asked.get(loader)
        passes = self.records[0].passes[0]
        if written is None or written == size:
            said = f"{size * passes} samples a step on any number of ranks"
        else:
            said = (
                f"as written, one process takes {written * passes} samples a step, and {self.ranks} ranks take "
                f"{size * passes}: one process was given the {size * passes} together"
            )
        self.outcome.notices.append(said)

    def _check_inputs(self, reference: ScriptRecord) -> None:
        """Judge a script that reads its samples without a loader only where one process reads the same."""
        for number in range(self.outcome.steps):
            mine = sorted(row for r in self.records for rows in r.steps[number].inputs for row in rows)
            theirs = sorted(row for rows in reference.steps[number].inputs for row in rows)
            if not mine or mine != theirs:
                self.outcome.not_judged = (
                    f"in step {number + 1}, one process trains on {len(theirs)} samples and {self.ranks} ranks on "
                    f"{len(mine)}, which are not the same; they don't come from a DataLoader, through which one "
                    "process could get them; an argument such as {16/n} holds a global batch of 16 on n ranks"
                    if mine
                    else "the samples come from no DataLoader, and the model has no inputs by position to compare"
                )
                return

    def _alone(self, what: str, feeds: Sequence[Feed], **changes: Any) -> list[ScriptRecord]:
        return self.runs.alone(what, [{**self.given, **changes, "feed": feed} for feed in feeds])

    # ---- comparing ----

    def _compare(self, reference: ScriptRecord) -> None:
        """Find the first difference and its cause."""
        first, rounding = self._first_difference(reference, [(self.rounding, self.rounding * 50)] * self.outcome.steps)
        if first is not None and first.relative <= _CEILING:
            nudged = self._alone("with other last bits in its weights", [self.feed], nudged=True)[0]
            moved = [self._distances(number, [nudged], reference) for number in range(len(nudged.steps))]
            if max(moved[first.step]) > _CEILING / _NUDGES and first.relative <= _NUDGES * max(moved[first.step]):
                self.outcome.not_judged = (
                    f"{first.aspect} of step {first.step + 1} differ by {first.relative:.0e}, and changed last bits "
                    f"move those of one process by {max(moved[first.step]):.0e}"
                )
                return
            limits = [(max(_ROUNDING, _NUDGES * g), max(_ROUNDING * 50, _NUDGES * w)) for g, w in moved]
            first, rounding = self._first_difference(reference, limits)
        self.outcome.first, self.outcome.rounding = first, rounding
        if first is not None:
            self._explain(first, reference)

    def _distances(self, number: int, records: Sequence[ScriptRecord], reference: ScriptRecord) -> tuple[float, float]:
        """Return how far the ranks' gradients are off, and their updates."""
        mine, right = self._gradients(number, records), self._gradients(number, [reference])[0]
        gradient = max(relative(one, right) for one in mine)
        return gradient, max(self._updates(number, records, reference))

    def _gradients(self, number: int, records: Sequence[ScriptRecord], *, clipped: bool = False) -> list[Vector]:
        steps = [record.steps[number] for record in records]
        pieces: list[Pieces] = [step.gradients if clipped or not step.unclipped else step.unclipped for step in steps]
        return [_vector(one, self._shapes) for one in by_rank(pieces)]

    def _updates(self, number: int, records: Sequence[ScriptRecord], reference: ScriptRecord) -> list[float]:
        shapes = _shapes([record.steps[number].values for record in (reference,)])
        right = _vector(by_rank([reference.steps[number].values])[0], shapes)
        before = self._before(number, [reference], shapes)[0]
        moved = max(float(np.linalg.norm(right - before)), 1e-300)
        mine = [_vector(one, shapes) for one in by_rank([record.steps[number].values for record in records])]
        return [float(np.linalg.norm(one - right)) / moved for one in mine]

    def _before(self, number: int, records: Sequence[ScriptRecord], shapes: dict[str, int]) -> list[Vector]:
        if number:
            return [_vector(one, shapes) for one in by_rank([record.steps[number - 1].values for record in records])]
        first = self.given["first"]
        return [_vector({name: first[name] for name in first if name in shapes}, shapes)]

    def _first_difference(
        self, reference: ScriptRecord, limits: Sequence[tuple[float, float]]
    ) -> tuple[ScriptDifference | None, float]:
        rounding = 0.0
        for number in range(min(self.outcome.steps, len(reference.steps))):
            step = reference.steps[number]
            self._shapes = _shapes([step.gradients, step.unclipped])
            for clipped in (False, True):
                right = self._gradients(number, [reference], clipped=clipped)[0]
                for rank, mine in enumerate(self._gradients(number, self.records, clipped=clipped)):
                    off = relative(mine, right)
                    if off > limits[number][0]:
                        name = self._farthest(mine, right)
                        aspect = "clipped gradients" if clipped and step.unclipped else "gradients"
                        return ScriptDifference(number, aspect, name, off, rank), rounding
                    rounding = max(rounding, off)
            for rank, off in enumerate(self._updates(number, self.records, reference)):
                if off > limits[number][1]:
                    return ScriptDifference(number, "weights", "", off, rank), rounding
        return None, rounding

    def _farthest(self, mine: Vector, right: Vector) -> str:
        begin, worst = 0, ("", -1.0)
        for name, size in self._shapes.items():
            off = float(np.linalg.norm((mine - right)[begin : begin + size]))
            worst = max(worst, (name, off), key=lambda pair: pair[1])
            begin += size
        return worst[0]

    # ---- causes ----

    def _explain(self, first: ScriptDifference, reference: ScriptRecord) -> None:
        outcome, framework = self.outcome, self.outcome.framework
        aspect, first.aspect = first.aspect, first.aspect.removeprefix("clipped ")
        if aspect == "weights" and any(one.column == "settings" for one in outcome.causes):
            own = [record.steps[first.step].settings for record in self.records]
            if any(other != own[0] for other in own):
                return  # one process steps with rank 0's settings
        found = replicas_cause(self.records, first.step)
        if found is None and aspect == "clipped gradients":
            text = "the gradients are equal before they are clipped, and differ afterwards"
            found = cause("clipping", text, "gradients when clipping began, and when the optimizer stepped", framework)
        elif found is None and aspect == "gradients":
            found = self._gradient_cause(first, reference) or self._statistics_cause(first)
        if found is None:
            text = "none was shown; one process has the ranks' samples, first values and settings"
            found = ScriptCause(UNKNOWN, text, "comparison with one process")
        outcome.causes.append(found)

    def _gradient_cause(self, first: ScriptDifference, reference: ScriptRecord) -> ScriptCause | None:
        at = step_batches(self.records[0], first.step)
        if at is None or not self.feed or self._is_split() or self.ranks > _MOST_PARTS:
            return None
        parts = self._parts(first.step, at, [[[(rank, i)] for i in at[1]] for rank in range(self.ranks)])
        mine, right = self._gradients(first.step, self.records), self._gradients(first.step, [reference])[0]
        names = list(self._shapes.items())
        found = gradient_cause(GradientEvidence(names, mine, right, parts), self.outcome.framework)
        if found is not None or len(at[1]) == 1 or self.ranks * len(at[1]) > _MOST_PARTS:
            return found
        # Each micro-batch may weigh its ranks otherwise: they are judged one by one.
        micro_batches = self._parts(first.step, at, [[self.feed[at[0], i]] * len(at[1]) for i in at[1]])
        every = self._parts(
            first.step, at, [[[(rank, i)]] * len(at[1]) for i in at[1] for rank in range(self.ranks)]
        )  # fmt: skip
        parted = [every[begin : begin + self.ranks] for begin in range(0, len(every), self.ranks)]
        means: list[Vector] = [sum(parts, np.zeros_like(parts[0])) / self.ranks for parts in parted]
        if any(relative(one, sum(means, np.zeros_like(one)) / len(means)) > EXACT for one in mine):
            return None
        for mean, whole, parts in zip(means, micro_batches, parted, strict=True):
            found = gradient_cause(GradientEvidence(names, [mean], whole, parts), self.outcome.framework)
            if found is not None:
                return found
        return None

    def _parts(
        self, step: int, at: tuple[int, range], given: Sequence[Sequence[Sequence[tuple[int, int]]]]
    ) -> list[Vector]:  # fmt: skip
        """Return the gradient of a step of one process for each of `given`: the samples of each of its batches."""
        feeds = [{**self.feed, **{(at[0], i): list(s) for i, s in zip(at[1], one, strict=True)}} for one in given]
        records = self._alone("given parts of the samples alone", feeds, steps=step + 1)
        return [self._gradients(step, [record])[0] for record in records]

    def _statistics_cause(self, first: ScriptDifference) -> ScriptCause | None:
        """Undo batch normalisation on both sides."""
        if not self.records[0].normalises:
            return None
        undone: dict[str, Any] = {key: self.given[key] for key in ("mean_draws", "full_precision") if key in self.given}
        undone |= {"fixed_statistics": True, "first": self.given["first"]}
        folder, records = self.runs.world(self.ranks, "with running statistics", **undone)
        if any(len(record.steps) <= first.step for record in records):
            return None
        changes = {"fixed_statistics": True, "samples": folder}
        reference = self._alone("with running statistics", [united(records)], **changes)[0]
        right = self._gradients(first.step, [reference])[0]
        if any(relative(mine, right) > _ROUNDING * 50 for mine in self._gradients(first.step, records)):
            return None
        text = (
            "batch normalisation uses the mean and variance of each rank's samples, and not of all samples of the step"
        )
        by = "with running statistics on both sides, the gradients are equal"
        return cause("batch statistics", text, by, self.outcome.framework, is_error=False)

    def _check_accumulation(self, reference: ScriptRecord) -> None:
        """Compare one process's first step with that of its samples in one batch."""
        at = step_batches(self.records[0], 0)
        if at is None or not self.feed or self._is_split() or len(at[1]) > _MOST_PARTS:
            return
        loader, batches = at
        together = [pair for i in batches for pair in self.feed[loader, i]]
        self._shapes = _shapes([reference.steps[0].gradients])
        given = [[samples] * len(batches) for samples in (together, *(self.feed[loader, i] for i in batches))]
        whole, *micro_batches = self._parts(0, at, given)
        step = self._gradients(0, [reference])[0]
        if relative(step, whole) > _CEILING / _NUDGES:
            found = accumulation_cause(step, whole, micro_batches, self.outcome.framework)
            if found is not None:
                self.outcome.causes.append(found)


def _equal_losses(one: ScriptRecord, other: ScriptRecord) -> bool:
    return [step.losses for step in one.steps] == [step.losses for step in other.steps]


def _shapes(pieces: Sequence[Pieces]) -> dict[str, int]:
    """Return the elements of each tensor of one process."""
    return {name: piece.local.numel() for one in pieces for name, piece in one.items()}


def _vector(tensors: Tensors, shapes: dict[str, int]) -> Vector:
    """Return tensors as one vector; what is missing is 0, and what FSDP1 pads is left out."""
    parts = []
    for name, size in shapes.items():
        flat = tensors[name].flatten()[:size].double().numpy() if name in tensors else np.zeros(0)
        parts.append(np.pad(flat, (0, size - len(flat))))
    return np.concatenate(parts) if parts else np.zeros(0)
