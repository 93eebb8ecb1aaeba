"""Compares a script's steps on several ranks with those of one process on equal samples.

`_Judgement.judge` is the whole way:

    the ranks, as they are                  what they show by themselves is named (causes/ranks.py)
    without what is other by nature         draws, autocast, first values
    one process, with the ranks' samples    one_process.py
    the first difference between the two    explained (causes/explanation.py)
    what makes up for each other            excused (causes/excuses.py)

What one process is given stands in `ScriptComparison.given` and `.feed`, and what all runs are
without in `.conditions`.

Tests: tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import replace

from lockstep.errors import LockstepError, RunError, first_line, listed
from lockstep.verify.algebra import CEILING
from lockstep.verify.comparison_result import Cause, Outcome, PartDifference
from lockstep.verify.script.causes.cause_lines import LineEvidence, name_lines
from lockstep.verify.script.causes.excuses import (
    excuse_factors_that_cancel,
    excuse_schedules_of_other_lengths,
)
from lockstep.verify.script.causes.explanation import explain
from lockstep.verify.script.causes.ranks import loop_causes, seen_on_ranks
from lockstep.verify.script.causes.replicas import networks_apart, replicas_apart
from lockstep.verify.script.causes.settings import settings_cause
from lockstep.verify.script.causes.trials import try_accumulation
from lockstep.verify.script.causes.unfinished import crash_cause, hang_cause, uneven_steps_cause
from lockstep.verify.script.comparison import NUDGES, ROUNDING, ScriptComparison
from lockstep.verify.script.observed.draws import drawn_apart
from lockstep.verify.script.one_process import reference_of
from lockstep.verify.script.record import LOCKSTEP, TORCH, ScriptRecord, casts_of
from lockstep.verify.script.runs import HangError, Runs
from lockstep.verify.script.signs import signs_of
from lockstep.verify.script.task import AS_IT_IS, GivenValues
from lockstep.verify.script.world import World

_ROUNDING_16 = 2e-2  # the same for parameters of 16 bits
_EXACT_HOOK = "allreduce_hook"  # of torch: what DistributedDataParallel does without a hook


def judge_script(runs: Runs, ranks: int) -> Outcome:
    """Run a script on a number of ranks and as one process, and compare them."""
    outcome = Outcome(f"{ranks} ranks", ranks, framework=TORCH)
    judgement = _Judgement(runs, outcome)
    try:
        judgement.judge()
    except HangError as hang:
        framework = next(
            (record.framework for record in hang.records if record is not None), outcome.framework
        )
        judgement.note_hang(hang)
        outcome.causes.append(hang_cause(hang.records, hang.locations, framework))
        outcome.fail(outcome.causes[-1].text)
    except LockstepError as error:
        outcome.fail("\n".join([str(error), *getattr(error, "__notes__", [])]))
        _explain_crash(runs, outcome, first_line(error))
    step = 0 if outcome.first is None else outcome.first.step
    evidence = LineEvidence(judgement.records, step, judgement.differing, judgement.traced)
    name_lines(outcome, evidence)
    outcome.describe(judgement.off, _drawn(outcome, judgement.off))
    outcome.signs.update(signs_of(outcome))
    return outcome


def _drawn(outcome: Outcome, sizes: dict[str, float]) -> list[PartDifference]:
    """Return the parts to draw: the modules and parameters that differ.

    First come the modules in which a difference begins, then the parameters whose gradients differ,
    beginning with that of the first difference.
    """
    modules = dict.fromkeys(cause.module for cause in outcome.causes if cause.module)
    text = "its output differs, and that of modules before it does not"
    parts = [PartDifference("" if name == "the model" else name, text, 1.0) for name in modules]
    first = "" if outcome.first is None else outcome.first.name
    wrong = [name for name, off in sizes.items() if off > ROUNDING]
    wrong.sort(key=lambda name: name != first)
    for name in wrong:
        off = sizes[name]
        parts.append(PartDifference(name, f"gradient differs by {off:.1e}", off))
    return parts


def _explain_crash(runs: Runs, outcome: Outcome, text: str) -> None:
    """Add why the ranks failed: whether one process fails, too, or a rank has left.

    A mistake of the loop shows in one process, too, where nothing waits for a gradient that does
    not come.
    """
    try:
        records = runs.alone("as it is, since the ranks failed")
    except LockstepError:
        outcome.notices.append("one process fails, too")
        return
    outcome.causes.extend(loop_causes(records))
    outcome.causes.append(crash_cause(text, outcome.ranks, outcome.framework))


def _broadcasts(records: Sequence[ScriptRecord]) -> list[str]:
    """Return what losses broadcast, by line, on any rank."""
    by_line = {line: text for record in records for line, text in record.broadcasts.items()}
    return [f"{line}: {text}" if line else text for line, text in by_line.items()]


class _Judgement(ScriptComparison):
    """Judges one number of ranks: runs the script as often as it takes, and fills the outcome."""

    def judge(self) -> None:
        """Run the script as often as it takes, and fill the outcome."""
        outcome = self.outcome
        self.take("as it is")
        outcome.take_steps(self._fewest_steps(), self.records[0].framework)
        if outcome.framework == LOCKSTEP:
            outcome.leave_open(
                "the script trains with Lockstep's own step, which `lockstep verify CONFIG`"
                " compares part by part; in Python, lockstep.verify.verify takes a function that"
                " makes model and data"
            )
            return
        outcome.notices.extend(_broadcasts(self.records))
        outcome.causes.extend(loop_causes(self.records))
        outcome.causes.extend(self._seen_on_ranks())
        uneven = uneven_steps_cause(self.records, outcome.framework)
        if uneven is not None:
            outcome.causes.append(uneven)
        self._undo()
        reference = reference_of(self)
        if reference is not None:
            self._judge_by(reference)
        if outcome.not_judged:
            outcome.causes.extend(
                replicas_apart(self.world, outcome.steps)
                or networks_apart(self.world, outcome.steps)
            )

    def note_hang(self, hang: HangError) -> None:
        """Keep what ranks had recorded when they hung, for the lines of causes."""
        self.records = [record for record in hang.records if record is not None] or self.records

    def _judge_by(self, reference: ScriptRecord) -> None:
        """Compare the ranks with one process that has their samples."""
        outcome = self.outcome
        cause = settings_cause(self.records, reference)
        if cause is not None:
            outcome.causes.append(cause)
        self._compare(reference)
        excuse_factors_that_cancel(self)
        excuse_schedules_of_other_lengths(self, reference)
        if not outcome.not_judged and self.records[0].passes[0] > 1:
            accumulation = try_accumulation(self, reference)
            if accumulation is not None:
                outcome.causes.append(accumulation)

    def _fewest_steps(self) -> int:
        """Return the steps that every rank has taken; RunError if there are none."""
        steps = min(len(record.steps) for record in self.records)
        if steps:
            return steps
        anywhere = "any rank" if self.ranks > 1 else "the rank"
        raise RunError(
            f"no call of optimizer.step() was seen on {anywhere}",
            why=(
                "the script ended before its first step, trains in processes of its own, or without"
                " torch.optim"
            ),
            fix=(
                "verify a script that torchrun can start, and give it the arguments with which it"
                " trains"
            ),
        )

    def _seen_on_ranks(self) -> list[Cause]:
        """Return what ranks show.

        What looks wrong is right where a script cuts its model over them by itself.
        """
        causes = seen_on_ranks(self.world)
        has_error = any(cause.is_error for cause in causes)
        if not has_error or len(self.world.units) != self.ranks:
            return causes
        try:
            first = self.on_ranks([record.first for record in self.records])
            probe = self.alone("as it is", [{}], given=GivenValues(first=first), steps=1)[0]
        except LockstepError:
            return causes
        if not probe.joined:
            return causes
        self.joined = probe.joined
        self.world = World(self.records, self.joined)
        return seen_on_ranks(self.world)

    def _undo(self) -> None:
        """Run the ranks again without what is other by nature: draws, autocast, first values."""
        if self._draw_in_forward_passes():
            self.conditions = replace(self.conditions, mean_draws=True)
            losses = self._losses()
            self.take("without random numbers")
            if losses == self._losses():  # as where the probability of dropout is 0
                self._drop_causes("random numbers")

        # All others are undone by one run, which these words name.
        clauses = [*self._without_casts(), *self._without_hooks()]
        given = AS_IT_IS
        if any(cause.kind == "first values" for cause in self.outcome.causes):
            given = GivenValues(first=self.on_ranks([record.first for record in self.records]))
            clauses.append("with rank 0's first values")
        if clauses:
            self.take(" and ".join(clauses), given)

    def _without_casts(self) -> list[str]:
        """Let further runs compute in 32 bits where layers cast to 16; return what is left out."""
        casts = casts_of(self.records)
        if casts:
            self.conditions = replace(self.conditions, full_precision=True)
            self.outcome.notices.append(
                f"without {listed(casts)}: 16 bits round differently in batches of another size"
            )
            return [f"without {listed(casts)}"]
        steps = [step for record in self.records for step in record.steps]
        if any("16" in dtype for step in steps for dtype in step.dtypes):
            self.rounding = _ROUNDING_16
            self.outcome.notices.append(
                f"weights of 16 bits: differences below {_ROUNDING_16:.0%} are not judged"
            )
        return []

    def _without_hooks(self) -> list[str]:
        """Let further runs reduce without torch's communication hooks; return what is left out."""
        hooks = {name for record in self.records for name, of_torch in record.hooks if of_torch}
        hooks.discard(_EXACT_HOOK)
        if not hooks:
            return []
        self.conditions = replace(self.conditions, plain_reduction=True)
        names = listed(sorted(hooks))
        self.outcome.notices.append(
            f"without {names}: it sends gradients with less precision, and ranks differ by what it"
            " leaves out"
        )
        return [f"without {names}"]

    def _draw_in_forward_passes(self) -> bool:
        """Return whether a forward pass has moved a generator of random numbers."""
        steps = [step for record in self.records for step in record.steps]
        return any(draw.moved for step in steps for draw in step.draws)

    def _drop_causes(self, kind: str) -> None:
        self.outcome.causes[:] = [cause for cause in self.outcome.causes if cause.kind != kind]

    def _losses(self) -> list[list[list[float]]]:
        return [[step.losses for step in record.steps] for record in self.records]

    def _compare(self, reference: ScriptRecord) -> None:
        """Find the first difference that is more than rounding, and explain it."""
        limits = [(self.rounding, self.rounding * 50)] * self.outcome.steps
        first, rounding = self.first_difference(reference, limits)
        self._say_draws(reference)
        if first is not None and reference.unkeyed:
            self._compare_with_mean(reference, limits)
            return
        if first is not None and self.each_alone and self._exchange_before(first.step):
            self.outcome.leave_open(
                "the loop reads without a loader, and ranks exchange tensors before the backward"
                " pass, which one process for each rank can't do"
            )
            return
        updates_on_its_own = not self.each_alone  # else it was given the ranks' gradients
        if first is not None and updates_on_its_own and (first.step or first.aspect == "weights"):
            # Adam, for one, makes whole updates of gradients that are nothing but rounding.
            self.give_gradients()
            reference = self.alone("given the ranks' gradients for its updates", [self.feed])[0]
            text = (
                f"left to itself, one process has {first.aspect} in step {first.step + 1} that"
                f" differ by {first.relative:.0e}: its optimizer was given the ranks' gradients,"
                " and its own were compared"
            )
            self.outcome.notices.append(text)
            first, rounding = self.first_difference(reference, limits)
        if first is not None and first.relative <= CEILING:
            moved = self._moved_by_last_bits(reference)
            most_moved = max(moved[first.step])
            if most_moved > CEILING / NUDGES and first.relative <= NUDGES * most_moved:
                self.outcome.leave_open(
                    f"{first.aspect} of step {first.step + 1} differ by {first.relative:.0e}, and"
                    f" changed last bits move those of one process by {most_moved:.0e}"
                )
                return
            limits = [
                (max(ROUNDING, NUDGES * of_gradients), max(ROUNDING * 50, NUDGES * of_updates))
                for of_gradients, of_updates in moved
            ]
            first, rounding = self.first_difference(reference, limits)
        self.outcome.compare(first, rounding)
        if first is not None:
            if not self.feed and not self.each_alone:
                self.take_each_alone(reference)  # so that the part of each rank can be taken
            explain(self, first, reference)

    def _exchange_before(self, number: int) -> bool:
        """Return whether ranks exchange tensors for a loss, up to a step."""
        steps = [step for record in self.records for step in record.steps[: number + 1]]
        return any(step.exchanges for step in steps)

    def _moved_by_last_bits(self, reference: ScriptRecord) -> list[tuple[float, float]]:
        """Return how far changed last bits of weights move gradients and updates, step by step."""
        if self.each_alone:
            mean = self.mean_of_ranks(nudged=True)
            assert mean is not None
            nudged = mean
        else:
            nudged = self.alone("with other last bits in its weights", [self.feed], nudged=True)[0]
        world = World([nudged])
        return [self.distances(number, world, reference) for number in range(len(nudged.steps))]

    def _say_draws(self, reference: ScriptRecord) -> None:
        """Say what the loop draws on each rank, and that one process was given it."""
        places = drawn_apart([record.draws for record in self.world.leaders])
        joined = [place for place in places if place not in reference.unkeyed]
        if joined:
            self.outcome.notices.append(
                f"each rank draws its own {listed(joined, 5)}: one process was given the ranks'"
                " numbers with their samples"
            )

    def _compare_with_mean(
        self, reference: ScriptRecord, limits: Sequence[tuple[float, float]]
    ) -> None:
        """Compare ranks with one process for each, given that rank's samples and random numbers.

        A number for a whole batch can't be given to one process that has the batches of all ranks.
        """
        places = listed(list(dict.fromkeys(reference.unkeyed)), 5)
        text = f"each rank draws its own {places} for a whole batch"
        mean = self.mean_of_ranks()
        if mean is None:
            self.outcome.leave_open(f"{text}, which one process can't be given")
            return
        first, rounding = self.first_difference(mean, limits)
        self.outcome.compare(first, rounding)
        text += (
            ", which the batch of all ranks can't have at once: the mean of one process for each"
            " rank was compared, given its samples and numbers"
        )
        by = "the numbers that ranks and one process drew, by the line that drew them"
        kind = "random numbers"
        self.outcome.causes.append(Cause(kind, text, [by], is_error=False, column=kind))
        if first is not None:
            explain(self, first, mean)
