"""Compares two scripts that should be the same training, A and B, on the same number of ranks.

Both run as they are first. Where their gradients and weights agree in each step, they are the same
training, whatever else differs. Where they do not, B is given what A had (given.py), each of these
by itself where several differ (differences.py): first values, samples, random numbers, settings.
What is named made the difference, and without it there is none:

    A                      B                         B, given A's settings      cause
    step 1: weights w      step 1: weights w'        step 1: weights w          settings

What is left is computed otherwise: the first operation that differs is shown.

Tests: tests/verify/test_pair.py
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.errors import LockstepError, RunError, first_line, listed
from lockstep.verify.algebra import CEILING
from lockstep.verify.comparison_result import DIFFERENT, EQUAL, NOT_RUN, Cause, Difference, Outcome
from lockstep.verify.script.causes.operations import first_operation
from lockstep.verify.script.comparison import NUDGES, ROUNDING, ScriptComparison
from lockstep.verify.script.pairs.differences import (
    missing_parameters,
    other_precision,
    other_settings,
    pairing,
)
from lockstep.verify.script.pairs.given import ValuesOfA, gradients_by_step
from lockstep.verify.script.pairs.losses import PairedLosses
from lockstep.verify.script.record import AUTOCAST, ScriptRecord, casts_of, names_by_order
from lockstep.verify.script.runs import Runs
from lockstep.verify.script.task import AS_WRITTEN, Conditions, GivenValues
from lockstep.verify.script.world import World, with_complete_tensors

PAIR_COLUMNS = ("samples", "random numbers", "first values", "settings", "gradients", "weights")
_SAMPLES = "samples of A"  # folder
_LATER = ("gradients", "weights")  # columns of what a step computes


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
    given = pairing(pair.records, pair.records_a)
    what = "B, given A's " + listed(list(given))
    _, records_b = pair.runs.world(ranks, what, pair.of_a.given(given), pair.conditions)
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
        self.of_a = ValuesOfA([], folder, [], {}, folder / _SAMPLES)  # until both have run

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
        missing = missing_parameters(self.records, self.records_a)
        if missing is not None:
            self.outcome.causes.append(missing)
            return
        self._explain(first)

    def run_both(self) -> None:
        """Run A and B as they are, and learn the names of their parameters."""
        folder_of_a, self.records_a = self._run_a("as it is")
        self.take("B, as it is")
        names = names_by_order(self.records[0], self.records_a[0])
        if names:
            self.take("B, with A's names of its parameters", GivenValues(names=names))
        self.of_a = replace(
            self.of_a,
            records=self.records_a,
            folder=folder_of_a,
            records_of_b=self.records,
            names=names,
        )

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
            zip(with_complete_tensors(records_b), with_complete_tensors(records_a), strict=True)
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
        self.give(first=first)

    def _moved(
        self, nudged: Sequence[ScriptRecord], records_a: Sequence[ScriptRecord]
    ) -> list[tuple[float, float]]:
        """Return how far changed last bits move A's gradients and weights, step by step."""
        steps = self.steps_of(nudged, records_a)
        pairs = list(
            zip(with_complete_tensors(nudged), with_complete_tensors(records_a), strict=True)
        )
        moved = []
        for number in range(steps):
            each = []
            for of_b, of_a in pairs:
                self.size(of_a.steps[number])
                self._begin_from(of_a)
                each.append(self.distances(number, World([of_b]), of_a))
            moved.append((max(off for off, _ in each), max(off for _, off in each)))
        return moved

    def _compare_lengths(self) -> None:
        steps_b = min(len(record.steps) for record in self.records)
        steps_a = min(len(record.steps) for record in self.records_a)
        if steps_b != steps_a:
            text = f"A takes {steps_a} steps, and B {steps_b}"
            by = "the optimizer's steps"
            self.outcome.causes.append(Cause("number of steps", text, [by], column="weights"))

    # ---- causes ----

    def _explain(self, first: Difference) -> None:
        """Find what makes the difference: what B is given, what both are run without, or B."""
        differing = pairing(self.records, self.records_a)
        settings = other_settings(self.records, self.records_a, self.outcome.steps)
        if settings:
            differing["settings"] = settings
        records_a = self.records_a
        without = self._run_without(differing)
        if without:
            _, records_a = self._run_a(listed(without))
        gradients = gradients_by_step(records_a)
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
        precision = other_precision(self.records, self.records_a)
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
        given = replace(self.of_a.given(kinds), gradients=gradients)
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
            name_in_a, name_in_b = (
                records[0].steps[left.step].optimizer for records in (records_a, self.records)
            )
            text = (
                f"{name_in_b} in B makes another update than {name_in_a} in A, of the same"
                " gradients"
            )
            by = "updates with the same gradients"
            self.outcome.causes.append(Cause("optimizer", text, [by], column="weights"))
            return
        if left.aspect == "clipped gradients":
            left.name_without_clipping()
            text = "the gradients are equal before they are clipped, and differ afterwards"
            by = "gradients when clipping began, and when the optimizer stepped"
            self.outcome.causes.append(Cause("clipping", text, [by]))
            return
        operation = self._operation_that_differs(left, kinds)
        if operation:
            self.outcome.locate(f"the first operation that differs: {operation}")
        text = f"from the same values and samples B computes another gradient of {left.name}"
        by = "a step of B, given what A has before it"
        self.outcome.causes.append(Cause("computation", text, [by]))

    def _operation_that_differs(self, left: Difference, kinds: Sequence[str]) -> str:
        """Run both with each operation traced, and return the first that differs, or why not."""
        how = "with each operation traced"
        conditions = replace(self.conditions, traced=True)
        try:
            _, traced_a = self._run_a(how, traced=True)
            given = self.of_a.given(kinds)
            _, traced_b = self.runs.world(self.ranks, f"B, {how}", given, conditions)
        except LockstepError as error:  # what is compiled may not be traced
            return f"operations can't be traced: {first_line(error)}"
        rank = left.ranks[0]
        step_of_b, step_of_a = (records[rank].steps[left.step] for records in (traced_b, traced_a))
        differs = first_operation(step_of_b.operations, step_of_a.operations, "A")
        return "" if differs is None else differs.text


def _column(kind: str) -> str:
    return kind if kind in PAIR_COLUMNS else "gradients"
