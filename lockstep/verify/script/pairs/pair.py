"""Compares two scripts that should be the same training, A and B, on the same number of ranks.

Both run as they are first. Where their gradients and weights agree in each step, they are the same
training, whatever else differs. Where they do not, B is given what A had, each of these by itself
where several differ: first values, samples, random numbers, settings. What is named made the
difference, and without it there is none:

    A                      B                         B, given A's settings      cause
    step 1: weights w      step 1: weights w'        step 1: weights w          settings

What is left is computed otherwise: the first operation that differs is shown.

Tests: tests/verify/test_pair.py
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from lockstep.errors import LockstepError, RunError, first_line, listed
from lockstep.verify.algebra import CEILING
from lockstep.verify.comparison_result import DIFFERENT, EQUAL, NOT_RUN, Cause, Difference, Outcome
from lockstep.verify.script.comparison import NUDGES, ROUNDING, ScriptComparison
from lockstep.verify.script.observed.draws import LoopDraw
from lockstep.verify.script.causes.operations import first_operation
from lockstep.verify.script.record import (
    AUTOCAST,
    Pieces,
    ScriptRecord,
    TensorPiece,
    batch_file,
    casts_of,
    names_by_order,
)
from lockstep.verify.script.runs import Feed, Runs, step_batches
from lockstep.verify.script.task import AS_WRITTEN, Conditions, GivenValues
from lockstep.verify.script.world import World

PAIR_COLUMNS = ("samples", "random numbers", "first values", "settings", "gradients", "weights")
_SAMPLES = "samples of A"  # folder
_LATER = ("gradients", "weights")  # columns of what a step computes


@dataclass
class PairedLosses:
    """Losses of two runs on the same samples and random numbers, step by step."""

    b: list[float]  # of B
    a: list[float]  # of A

    @property
    def difference(self) -> float:
        """The mean of B's loss minus A's."""
        return fmean(self.differences)

    @property
    def differences(self) -> list[float]:
        """B's loss minus A's, of each step."""
        return [b - a for b, a in zip(self.b, self.a, strict=True)]

    @property
    def error(self) -> float:
        """The standard error of the mean difference."""
        return _standard_error(self.differences)

    @property
    def unpaired_error(self) -> float:
        """The standard error if the steps of the runs had nothing in common."""
        return math.hypot(_standard_error(self.b), _standard_error(self.a))


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def compare_scripts(a: Runs, b: Runs, ranks: int, folder: Path) -> Outcome:
    """Compare what B trains with what A trains, on a number of ranks each.

    `folder` takes what B is given.
    """
    outcome = Outcome(f"{ranks} rank{'s' * (ranks != 1)}", ranks)
    pair = _Pair(a, b, outcome, folder)
    try:
        pair.judge()
    except LockstepError as error:
        outcome.fail("\n".join([str(error), *getattr(error, "__notes__", [])]))
    outcome.describe(pair.off, [])
    outcome.signs.update({column: _sign(outcome, column) for column in PAIR_COLUMNS})
    return outcome


def paired_losses(a: Runs, b: Runs, ranks: int, folder: Path) -> tuple[PairedLosses, list[str]]:
    """Return the losses of A, and of B given A's samples and random numbers, and what was given.

    Raises RunError: they took no step in common.
    """
    pair = _Pair(a, b, Outcome("", ranks), folder, Conditions(keyed_passes=True))
    pair.run_both()
    given = pair.pairing()
    what = "B, given A's " + listed(list(given))
    _, records_b = pair.runs.world(ranks, what, pair.values_of_a(given), pair.conditions)
    steps = pair.steps_of(records_b, pair.records_a)

    def losses(records: Sequence[ScriptRecord]) -> list[float]:
        return [fmean(sum(record.steps[at].losses) for record in records) for at in range(steps)]

    return PairedLosses(losses(records_b), losses(pair.records_a)), list(given)


def _sign(outcome: Outcome, column: str) -> str:
    if outcome.failed:
        return NOT_RUN
    if any(cause.column == column for cause in outcome.causes):
        return DIFFERENT
    first = outcome.first
    if first is None or column not in _LATER or outcome.passed:
        return EQUAL
    return EQUAL if _LATER.index(column) < _LATER.index(first.aspect) else DIFFERENT


class _Pair(ScriptComparison):
    """B is what is judged, and A is right."""

    def __init__(
        self,
        a: Runs,
        b: Runs,
        outcome: Outcome,
        folder: Path,
        conditions: Conditions = AS_WRITTEN,
    ) -> None:
        super().__init__(b, outcome)
        self.conditions = conditions  # of both
        self.a = a
        self.records_a: list[ScriptRecord] = []
        self.names: dict[str, str] = {}  # B's name of a parameter → A's
        self.samples = folder / _SAMPLES
        self.folder_a = folder

    def judge(self) -> None:
        """Run both as often as it takes, and fill the outcome."""
        self.run_both()
        steps = self.steps_of(self.records, self.records_a)
        self.outcome.take_steps(steps, self.records[0].framework)
        first, rounding, same_bits = self.difference(self.records, self.records_a)
        self.outcome.compare(first, rounding, same_bits=same_bits)
        if first is None:
            self._compare_lengths()
            return
        missing = self._missing_parameters()
        if missing is not None:
            self.outcome.causes.append(missing)
            return
        self._explain(first)

    def run_both(self) -> None:
        """Run A and B as they are, and learn the names of their parameters."""
        self.folder_a, self.records_a = self._run_a("as it is")
        self.take("B, as it is")
        self.names = names_by_order(self.records[0], self.records_a[0])
        if self.names:
            self.take("B, with A's names of its parameters", GivenValues(names=self.names))

    def _run_a(self, how: str, **conditions: bool) -> tuple[Path, list[ScriptRecord]]:
        """Run A under the conditions of both, and some besides."""
        return self.a.world(
            self.ranks, f"A, {how}", conditions=replace(self.conditions, **conditions)
        )

    def steps_of(self, records_b: Sequence[ScriptRecord], records_a: Sequence[ScriptRecord]) -> int:
        """Return how many steps all ranks of both have taken."""
        steps = min(len(record.steps) for record in chain(records_b, records_a))
        if not steps:
            which = "A" if any(not record.steps for record in records_a) else "B"
            raise RunError(
                f"no call of optimizer.step() was seen in {which}",
                why="it ended before its first step, or trains without torch.optim",
                fix="give it the arguments with which it trains",
            )
        return steps

    def difference(
        self, records_b: Sequence[ScriptRecord], records_a: Sequence[ScriptRecord]
    ) -> tuple[Difference | None, float, bool]:
        """Return the first difference, the largest before it, and whether all bits are the same."""
        steps = self.steps_of(records_b, records_a)
        limits = [(ROUNDING, ROUNDING * 50)] * steps
        first, rounding, same = self._first_of_ranks(records_b, records_a, limits)
        if first is None or first.relative > CEILING:
            return first, rounding, same
        _, nudged = self._run_a("with other last bits in its weights", nudged=True)
        limits = [
            (max(ROUNDING, NUDGES * gradients), max(ROUNDING * 50, NUDGES * weights))
            for gradients, weights in self._moved(nudged, records_a)
        ]
        return self._first_of_ranks(records_b, records_a, limits)

    def _first_of_ranks(
        self,
        records_b: Sequence[ScriptRecord],
        records_a: Sequence[ScriptRecord],
        limits: Sequence[tuple[float, float]],
    ) -> tuple[Difference | None, float, bool]:
        """Compare each rank of B with the same rank of A, by complete tensors."""
        differences: list[Difference] = []
        largest = 0.0
        same = True
        outcome = self.outcome
        outcome.take_steps(len(limits), outcome.framework)
        for rank, (of_b, of_a) in enumerate(
            zip(_as_seen(records_b), _as_seen(records_a), strict=True)
        ):
            self.world = World([of_b])
            self._begin_from(of_a)
            first, rounding = self.first_difference(of_a, limits)
            exact, _ = self.first_difference(of_a, [(0.0, 0.0)] * len(limits))
            same &= exact is None
            largest = max(largest, rounding)
            if first is not None:
                differences.append(replace(first, ranks=[rank]))
        self.world = World(self.records)
        order = ("gradients", "clipped gradients", "weights")
        differences.sort(key=lambda each: (each.step, order.index(each.aspect)))
        return differences[0] if differences else None, largest, same

    def _begin_from(self, of_a: ScriptRecord) -> None:
        """Measure updates from the first values of a rank of A."""
        first = {name: [piece.local] for name, piece in of_a.first.items()}
        self.given = replace(self.given, first=first)

    def _moved(
        self, nudged: Sequence[ScriptRecord], records_a: Sequence[ScriptRecord]
    ) -> list[tuple[float, float]]:
        """Return how far changed last bits move A's gradients and weights, step by step."""
        steps = self.steps_of(nudged, records_a)
        pairs = list(zip(_as_seen(nudged), _as_seen(records_a), strict=True))
        moved = []
        for number in range(steps):
            each = []
            for of_b, of_a in pairs:
                self.size(of_a.steps[number])
                self._begin_from(of_a)
                each.append(self.distances(number, World([of_b]), of_a))
            moved.append((max(off for off, _ in each), max(off for _, off in each)))
        return moved

    # ---- what differs between A and B ----

    def _compare_lengths(self) -> None:
        steps_b = min(len(record.steps) for record in self.records)
        steps_a = min(len(record.steps) for record in self.records_a)
        if steps_b != steps_a:
            text = f"A takes {steps_a} steps, and B {steps_b}"
            by = "the optimizer's steps"
            self.outcome.causes.append(Cause("number of steps", text, [by], column="weights"))

    def _missing_parameters(self) -> Cause | None:
        """Return the cause if A and B do not have the same parameters."""
        if not self.records[0].first and self.records_a[0].first:
            text = "B's model is in evaluation mode when it trains"
            return Cause("evaluation mode", text, ["the mode of each model that is called"])
        shapes = [
            {name: piece.shape for record in records for name, piece in record.first.items()}
            for records in (self.records_a, self.records)
        ]
        other = [name for name in shapes[0] if shapes[0][name] != shapes[1].get(name)]
        more = [name for name in shapes[1] if name not in shapes[0]]
        if not other and not more:
            return None
        parts = [f"B has no parameter like A's {listed(other, 5)}"] if other else []
        parts += [f"A has none like B's {listed(more, 5)}"] if more else []
        by = "names and shapes of the parameters"
        return Cause("parameters", "; ".join(parts), [by], column="first values")

    def pairing(self) -> dict[str, str]:
        """Return what B can be given of A where it differs: what it is → what is known of it."""
        texts = {
            "first values": self._other_first_values(),
            "samples": self._other_samples(),
            "random numbers": self._other_draws(),
        }
        return {kind: text for kind, text in texts.items() if text}

    def _other_first_values(self) -> str:
        pairs = zip(_as_seen(self.records), _as_seen(self.records_a), strict=True)
        for of_b, of_a in pairs:
            wrong = [
                name
                for name, piece in of_a.first.items()
                if name not in of_b.first or not torch.equal(piece.local, of_b.first[name].local)
            ]
            if wrong:
                return f"B starts from other values of {listed(wrong, 5)} than A"
        return ""

    def _other_samples(self) -> str:
        for rank, (of_b, of_a) in enumerate(zip(self.records, self.records_a, strict=True)):
            for number in range(min(len(of_b.steps), len(of_a.steps))):
                read = [_samples_read(record, number) for record in (of_b, of_a)]
                passed = [record.steps[number].elements for record in (of_b, of_a)]
                if read[0] != read[1] and passed[0] != passed[1]:
                    where = f" on rank {rank}" if rank else ""
                    return f"B trains on other samples than A in step {number + 1}{where}"
        return ""

    def _other_draws(self) -> str:
        """Return what the loop or a forward pass of B draws otherwise than A; empty if nothing."""
        for of_b, of_a in zip(self.records, self.records_a, strict=True):
            for draw, other in zip(of_b.draws, _as_drawn(of_a, of_b), strict=False):
                if draw.outside and other is not None and not draw.has_value_of(other):
                    return f"{draw.place} draws other numbers than A"
            steps = zip(of_b.steps, of_a.steps, strict=False)
            passes = chain.from_iterable(zip(m.draws, r.draws, strict=False) for m, r in steps)
            for pass_of_b, pass_of_a in passes:
                names = [
                    name
                    for name in pass_of_b.moved
                    if pass_of_b.before[name] != pass_of_a.before.get(name)
                ]
                if names or pass_of_b.moved != pass_of_a.moved:
                    drawn = listed(sorted({*pass_of_b.moved, *pass_of_a.moved}))
                    return f"a forward pass of B draws other numbers than A's from {drawn}'s"
        return ""

    def _other_settings(self) -> str:
        for number in range(self.outcome.steps):
            of_b = self.records[0].steps[number].settings
            of_a = self.records_a[0].steps[number].settings
            for group, other in zip(of_b, of_a, strict=False):
                for key in sorted({*group} & {*other}):  # another optimizer has others
                    if group[key] != other[key]:
                        name = "the learning rate" if key == "lr" else key
                        return (
                            f"{name} is {group[key]} in B and {other[key]} in A, in step"
                            f" {number + 1}"
                        )
        return ""

    def _other_precision(self) -> str:
        for of_b, of_a in zip(self.records, self.records_a, strict=True):
            for step_of_b, step_of_a in zip(of_b.steps, of_a.steps, strict=False):
                if step_of_b.dtypes != step_of_a.dtypes:
                    return (
                        f"B computes with {listed(sorted(step_of_b.dtypes))}, and A with"
                        f" {listed(sorted(step_of_a.dtypes))}"
                    )
        return ""

    # ---- what B is given ----

    def values_of_a(self, kinds: Collection[str]) -> GivenValues:
        """Return what B is given: each rank's own of A, of some kinds."""
        given = GivenValues(names=self.names, by_rank=True)
        if "first values" in kinds:
            given = replace(given, first=self._first_values())
        if "samples" in kinds:
            given = replace(given, feed=self._feed(), samples=self.samples)
        if "random numbers" in kinds:
            draws = {
                rank: [draw for draw in _as_drawn(of_a, of_b) if draw is not None]
                for rank, (of_b, of_a) in enumerate(zip(self.records, self.records_a, strict=True))
            }
            given = replace(given, draws=draws)
        if "settings" in kinds:
            settings = tuple(step.settings for step in self.records_a[0].steps)
            given = replace(given, settings=settings)
        return given

    def _first_values(self) -> dict[str, list[Any]]:
        """Return A's first values on each rank, of the parameters that B has in the same shape."""
        firsts = []
        for of_b, of_a in zip(_as_seen(self.records), _as_seen(self.records_a), strict=True):
            shapes = {name: piece.shape for name, piece in of_b.first.items()}
            firsts.append(
                {name: one for name, one in of_a.first.items() if shapes.get(name) == one.shape}
            )
        return _by_rank(firsts)

    def _feed(self) -> Feed:
        """Return the feed that gives each batch of B the samples that A had in that step.

        A step of A may take more and smaller batches.
        """
        self.samples.mkdir(exist_ok=True)
        feed: Feed = {}
        for rank, (of_b, of_a) in enumerate(zip(self.records, self.records_a, strict=True)):
            for number in range(min(len(of_b.steps), len(of_a.steps))):
                batches_b = step_batches(of_b, number)
                batches_a = step_batches(of_a, number)
                if (
                    batches_b is None
                    or batches_a is None
                    or len(batches_a.indices) % len(batches_b.indices)
                ):
                    return {}
                each = len(batches_a.indices) // len(batches_b.indices)  # batches of A for one of B
                for position, index in enumerate(batches_b.indices):
                    indices_of_a = batches_a.indices[position * each : (position + 1) * each]
                    feed[batches_b.loader, index] = [
                        (rank, index_of_a) for index_of_a in indices_of_a
                    ]
                    for index_of_a in indices_of_a:
                        link = batch_file(self.samples, rank, batches_b.loader, index_of_a)
                        link.unlink(missing_ok=True)
                        file = batch_file(self.folder_a, rank, batches_a.loader, index_of_a)
                        link.symlink_to(file)
        return feed

    # ---- causes ----

    def _explain(self, first: Difference) -> None:
        """Find what makes the difference: what B is given, what both are run without, or B."""
        differing = self.pairing()
        settings = self._other_settings()
        if settings:
            differing["settings"] = settings
        records_a = self.records_a
        without = self._run_without(differing)
        if without:
            _, records_a = self._run_a(listed(without))
        gradients = _by_rank_and_step(records_a)
        left = self._left(list(differing), records_a, gradients)
        if left is None:
            causes = self._needed(differing, records_a, gradients)
            self.outcome.causes.extend(causes)
            if not causes:
                self._pass_for_rounding(first)
            return
        by = "the values of A and of B before the step"
        self.outcome.causes.extend(
            Cause(kind, text, [by], column=_column(kind)) for kind, text in differing.items()
        )
        self.outcome.compare(left, self.outcome.rounding)
        self._say_computed(left, list(differing), records_a)

    def _run_without(self, differing: dict[str, str]) -> list[str]:
        """Let both run without dropout, or without 16 bits, where these differ."""
        without = []
        drew = any(
            draw.moved for record in self.records for step in record.steps for draw in step.draws
        )
        if "random numbers" in differing and drew:
            self.conditions = replace(self.conditions, mean_draws=True)
            without.append("without random numbers in forward passes")
        precision = self._other_precision()
        if precision:
            differing["precision"] = precision
            self.conditions = replace(self.conditions, full_precision=True)
            without.append(f"without {listed(casts_of(self.records) or [AUTOCAST])}")
        return without

    def _left(
        self,
        kinds: Sequence[str],
        records_a: Sequence[ScriptRecord],
        gradients: Sequence[dict[str, list[Any]]],
    ) -> Difference | None:
        """Return the first difference that is left when B is given A's own of some kinds.

        Its optimizer is given A's gradients, too: one that makes whole updates of rounding shows
        nothing.
        """
        what = f"B, given A's {listed([*kinds, 'gradients'])}"
        given = replace(self.values_of_a(kinds), gradients=gradients)
        _, records_b = self.runs.world(self.ranks, what, given, self.conditions)
        return self.difference(records_b, records_a)[0]

    def _needed(
        self,
        differing: dict[str, str],
        records_a: Sequence[ScriptRecord],
        gradients: Sequence[dict[str, list[Any]]],
    ) -> list[Cause]:
        """Return what makes a difference by itself, when B is given all the rest."""
        causes = []
        undoes = "B, given A's, computes what A computes"
        ran_anew = self.conditions != AS_WRITTEN  # without dropout, or without 16 bits
        for kind, text in differing.items():
            rest = [other for other in differing if other != kind]
            is_given = kind not in ("random numbers", "precision") or not ran_anew
            if rest and is_given and self._left(rest, records_a, gradients) is None:
                continue
            causes.append(Cause(kind, text, [undoes], column=_column(kind)))
        return causes

    def _pass_for_rounding(self, first: Difference) -> None:
        self.outcome.notices.append(
            f"left to itself, B has {first.aspect} in step {first.step + 1} that differ by"
            f" {first.relative:.0e}: its optimizer was given A's gradients, and its own were"
            " compared"
        )
        self.outcome.compare(None, self.outcome.rounding)

    def _say_computed(
        self, left: Difference, kinds: Sequence[str], records_a: Sequence[ScriptRecord]
    ) -> None:
        """Add what B computes otherwise, from the same values."""
        if left.aspect == "weights":
            names = [records[0].steps[left.step].optimizer for records in (records_a, self.records)]
            text = (
                f"{names[1]} in B makes another update than {names[0]} in A, of the same gradients"
            )
            self.outcome.causes.append(
                Cause("optimizer", text, ["updates with the same gradients"], column="weights")
            )
            return
        if left.aspect == "clipped gradients":
            left.name_without_clipping()
            text = "the gradients are equal before they are clipped, and differ afterwards"
            by = "gradients when clipping began, and when the optimizer stepped"
            self.outcome.causes.append(Cause("clipping", text, [by]))
            return
        try:
            how = "with each operation traced"
            _, traced_a = self._run_a(how, traced=True)
            given = self.values_of_a(kinds)
            conditions = replace(self.conditions, traced=True)
            _, traced_b = self.runs.world(self.ranks, f"B, {how}", given, conditions)
            rank = left.ranks[0]
            records_b, theirs = (records[rank].steps[left.step] for records in (traced_b, traced_a))
            differs = first_operation(records_b.operations, theirs.operations, "A")
            operation = "" if differs is None else differs.text
        except LockstepError as error:  # what is compiled may not be traced
            operation = f"operations can't be traced: {first_line(error)}"
        if operation:
            self.outcome.locate(f"the first operation that differs: {operation}")
        text = f"from the same values and samples B computes another gradient of {left.name}"
        by = "a step of B, given what A has before it"
        self.outcome.causes.append(Cause("computation", text, [by]))


def _column(kind: str) -> str:
    return kind if kind in PAIR_COLUMNS else "gradients"


def _as_seen(records: Sequence[ScriptRecord]) -> list[ScriptRecord]:
    """Return the records of ranks with complete tensors, as each rank sees them."""
    world = World(records)

    def complete(ranks: Sequence[Pieces]) -> list[Pieces]:
        return [
            {name: TensorPiece(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}
            for tensors in world.tensors(ranks)
        ]

    steps = min(len(record.steps) for record in records)
    of_steps = []
    for number in range(steps):
        of_ranks = [record.steps[number] for record in records]
        parts = [
            complete([getattr(step, kind) for step in of_ranks])
            for kind in ("unclipped", "gradients", "values")
        ]
        of_steps.append(
            [
                replace(step, unclipped=unclipped, gradients=gradients, values=values)
                for step, unclipped, gradients, values in zip(of_ranks, *parts, strict=True)
            ]
        )
    firsts = complete([record.first for record in records])
    return [
        replace(record, first=first, steps=[each[rank] for each in of_steps])
        for rank, (record, first) in enumerate(zip(records, firsts, strict=True))
    ]


def _by_rank(ranks: Sequence[Pieces]) -> dict[str, list[Any]]:
    """Return each name's tensor on each rank; None where a rank has none."""
    names = dict.fromkeys(name for pieces in ranks for name in pieces)
    return {
        name: [pieces[name].local if name in pieces else None for pieces in ranks] for name in names
    }


def _by_rank_and_step(records: Sequence[ScriptRecord]) -> list[dict[str, list[Any]]]:
    seen = _as_seen(records)
    return [
        _by_rank([record.steps[number].gradients for record in seen])
        for number in range(len(seen[0].steps))
    ]


def _samples_read(record: ScriptRecord, number: int) -> list[str]:
    """Return the samples of a step, in order; without a loader the rows of the model's inputs."""
    trained = step_batches(record, number)
    if trained is None:
        return [row for rows in record.steps[number].inputs for row in rows]
    batches = record.batches[trained.loader]
    return [sample for index in trained.indices for sample in batches[index]]


def _as_drawn(of_a: ScriptRecord, of_b: ScriptRecord) -> list[LoopDraw | None]:
    """Return what A has drawn in place of each draw of B, keyed by B's batches and lines.

    A draw is the one of the same name and number for the same batch.
    """
    waiting: dict[tuple[int, str], list[LoopDraw]] = {}  # (batch, line) → A's draws, in order
    for draw in of_a.draws:
        waiting.setdefault((draw.batch[1], draw.name), []).append(draw)
    drawn: list[LoopDraw | None] = []
    for draw in of_b.draws:
        drawn_by_a = waiting.get((draw.batch[1], draw.name), [])
        drawn.append(replace(draw, value=drawn_by_a.pop(0).value) if drawn_by_a else None)
    return drawn
