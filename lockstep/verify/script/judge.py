"""Compares a script's steps on several ranks with those of one process on equal samples.

`_Judgement.judge` is the whole way: the ranks as they are, without what is other by nature (draws,
autocast, first values), then one process with the ranks' samples, and the first difference between
the two. What one process is given stands in `ScriptComparison.given` and `.feed`, and what all runs
are without in `.conditions`; `explain` (explanation.py) names the cause.

Tests: tests/verify/test_script.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.diagnose import recognise
from lockstep.errors import LockstepError, RunError, first_line, listed
from lockstep.verify.algebra import CEILING
from lockstep.verify.comparison_result import Cause, Outcome, PartDifference
from lockstep.verify.script.causes.cause_lines import LineEvidence, name_lines
from lockstep.verify.script.comparison import NUDGES, ROUNDING, ScriptComparison
from lockstep.verify.script.observed.draws import drawn_apart
from lockstep.verify.script.causes.explanation import check_accumulation, explain
from lockstep.verify.script.causes.fixes import script_cause
from lockstep.verify.script.causes.gradients import SUM
from lockstep.verify.script.causes.ranks import (
    LEARNING_RATE,
    hang_cause,
    loop_causes,
    replicas_apart,
    seen_on_ranks,
    settings_cause,
)
from lockstep.verify.script.record import (
    LOCKSTEP,
    TORCH,
    ScriptRecord,
    batch_file,
    casts_of,
    names_by_order,
)
from lockstep.verify.script.runs import HangError, Runs, one_after_another, united
from lockstep.verify.script.causes.samples_of_ranks import is_cut_by_script
from lockstep.verify.script.signs import signs_of
from lockstep.verify.script.task import AS_IT_IS, GivenValues
from lockstep.verify.script.observed.untrained import networks_apart
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
    known = recognise(text)
    # else the error of the rank that failed is reported
    if known is not None and known.name == "a peer is gone":
        text = f"a rank has ended, and another still needs it: {text}"
        outcome.causes.append(
            script_cause("uneven steps", text, "the script's own error", outcome.framework)
        )
    else:
        text = f"the script runs as one process, and not on {outcome.ranks} ranks: {text}"
        outcome.causes.append(Cause("crash", text, ["the script's own error"]))


def _broadcasts(records: Sequence[ScriptRecord]) -> list[str]:
    """Return what losses broadcast, by line, on any rank."""
    by_line = {line: text for record in records for line, text in record.broadcasts.items()}
    return [f"{line}: {text}" if line else text for line, text in by_line.items()]


def _size_of_batch(readers: Sequence[ScriptRecord], loader: int) -> int:
    """Return the samples in the first batch of a loader, over the ranks that read."""
    batches = [record.batches.get(loader) for record in readers]
    return sum(len(read[0]) for read in batches if read)


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
        self._compare_numbers_of_steps()
        self._undo()
        reference = self._reference()
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
        self._excuse_factors_that_cancel()
        self._excuse_schedules_of_other_lengths(reference)
        if not outcome.not_judged and self.records[0].passes[0] > 1:
            check_accumulation(self, reference)

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

    def _compare_numbers_of_steps(self) -> None:
        """Add a cause if a rank has taken fewer steps than another."""
        steps = [len(record.steps) for record in self.records]
        fewest = steps.index(min(steps))
        most = steps.index(max(steps))
        if steps[fewest] < steps[most]:
            text = (
                f"rank {fewest} took {steps[fewest]} steps, and rank {most} has taken {steps[most]}"
            )
            by = "the optimizer's steps on each rank"
            self.outcome.causes.append(
                script_cause("uneven steps", text, by, self.outcome.framework)
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
        given = AS_IT_IS  # in the next run of the ranks
        clauses = []  # what the run is called
        if self._draw_in_forward_passes():
            self.conditions = replace(self.conditions, mean_draws=True)
            losses = self._losses()
            self.take("without random numbers")
            if losses == self._losses():  # as where the probability of dropout is 0
                self._drop_causes("random numbers")

        dtypes = {
            dtype for record in self.records for step in record.steps for dtype in step.dtypes
        }
        casts = casts_of(self.records)
        if casts:
            self.conditions = replace(self.conditions, full_precision=True)
            clauses.append(f"without {listed(casts)}")
            self.outcome.notices.append(
                f"without {listed(casts)}: 16 bits round differently in batches of another size"
            )
        elif any("16" in dtype for dtype in dtypes):
            self.rounding = _ROUNDING_16
            self.outcome.notices.append(
                f"weights of 16 bits: differences below {_ROUNDING_16:.0%} are not judged"
            )

        hooks = {name for record in self.records for name, of_torch in record.hooks if of_torch}
        hooks.discard(_EXACT_HOOK)
        if hooks:
            self.conditions = replace(self.conditions, plain_reduction=True)
            clauses.append(f"without {listed(sorted(hooks))}")
            self.outcome.notices.append(
                f"without {listed(sorted(hooks))}: it sends gradients with less precision, and"
                " ranks differ by what it leaves out"
            )

        if any(cause.kind == "first values" for cause in self.outcome.causes):
            given = GivenValues(first=self.on_ranks([record.first for record in self.records]))
            clauses.append("with rank 0's first values")

        if clauses:
            self.take(" and ".join(clauses), given)

    def _draw_in_forward_passes(self) -> bool:
        """Return whether a forward pass has moved a generator of random numbers."""
        steps = [step for record in self.records for step in record.steps]
        return any(draw.moved for step in steps for draw in step.draws)

    def _drop_causes(self, kind: str) -> None:
        self.outcome.causes[:] = [cause for cause in self.outcome.causes if cause.kind != kind]

    def _losses(self) -> list[list[list[float]]]:
        return [[step.losses for step in record.steps] for record in self.records]

    def _reference(self) -> ScriptRecord | None:
        """Return one process's record, given the ranks' samples, first values and settings.

        None if it can't be compared with the ranks; the outcome says why.
        """
        shared = is_cut_by_script(self.world)
        readers = self.world.leaders[: 1 if shared else None]
        self._give_samples(readers, shared=shared)
        self._give_state()
        try:
            reference = self.alone("given the samples of all ranks", [self.feed])[0]
        except LockstepError as error:
            text = "one process, with which ranks are compared, does not run the script: "
            return self._reference_of_each_rank(None, text + first_line(error))
        if reference.names:
            self.given = replace(self.given, names=reference.names)
        names = names_by_order(reference, self.records[0])
        if names:
            self.given = replace(self.given, names=names)
            reference = self.alone("with the ranks' names of its parameters", [self.feed])[0]
        reference = self._accumulating_as_ranks(reference, readers)
        why = self._why_not_compared(reference)
        return self._reference_of_each_rank(reference, why) if why else reference

    def _reference_of_each_rank(
        self, written: ScriptRecord | None, why: str
    ) -> ScriptRecord | None:
        """Return the mean of one process for each rank, where one can't be given all their samples.

        `why`: it can't be; the outcome says so if there is no such mean either.
        """
        mean = self.take_each_alone(written)
        if mean is None:
            self.outcome.leave_open(why)
            return None
        self.each_alone = True
        text = (
            "samples come from no DataLoader: the mean of one process for each rank is compared,"
            " given the random numbers that the rank drew, the places from which it read, and the"
            " numbers of Python and NumPy of which it made its tensors"
        )
        by = "the inputs of the models, the same on each rank and in its process"
        self.outcome.causes.append(Cause("samples", text, [by], is_error=False, column="samples"))
        return mean

    def _give_samples(self, readers: Sequence[ScriptRecord], *, shared: bool) -> None:
        """Let one process read the ranks' samples, as far as they could be stored.

        `shared`: all ranks read the same batches, of which one process takes a single one.
        """
        self.feed = united(self.world, shared=shared)
        files = [
            batch_file(self.folder, rank, loader, index)
            for (loader, _), batches in self.feed.items()
            for rank, index in batches
        ]
        if not all(file.exists() for file in files):
            self.feed = {}
            self.outcome.notices.append("samples could not be stored: one process reads its own")
        loaders = self.records[0].batches if self.feed else {}
        sizes = {loader: _size_of_batch(readers, loader) for loader in loaders}
        self.given = replace(
            self.given,
            samples=self.folder,
            sizes={loader: size for loader, size in sizes.items() if size},
        )

    def _give_state(self) -> None:
        """Let one process start from the ranks' first values, with their settings and draws."""
        leaders = [unit[0] for unit in self.world.units]
        self.given = replace(
            self.given,
            first=self.on_ranks([record.first for record in self.records]),
            settings=tuple(step.settings for step in self.records[0].steps),
            draws={rank: self.records[rank].draws for rank in leaders},
            order=tuple(self.records[0].steps[0].order),
        )

    def _accumulating_as_ranks(
        self, reference: ScriptRecord, readers: Sequence[ScriptRecord]
    ) -> ScriptRecord:
        """Return the record of one process that has the ranks' global batch in each step.

        A script with a fixed global batch accumulates over more micro-batches on fewer ranks: two
        ranks with 4 micro-batches a step each are one process with 8, which gets the batches of
        the ranks one after another, and not together.
        """
        units = len(self.world.units)
        of_rank = self.records[0].passes[:1]  # micro-batches of the first step
        of_process = reference.passes[:1]
        makes_up = bool(of_rank) and units > 1 and of_process == [of_rank[0] * units]
        loader = self.records[0].training_loader
        if not self.feed:
            if not makes_up:
                return reference
            self.given = replace(self.given, in_turn=True)
            return self.alone("given each rank's random numbers in turn", [self.feed])[0]
        if loader is None:
            return reference
        if not makes_up:
            self._say_batch(reference, loader, readers)
            return reference
        self.given = replace(self.given, sizes={})
        self.feed = one_after_another(self.world)
        self.in_turn = True
        reference = self.alone("given the samples of each rank in turn", [self.feed])[0]
        self.outcome.notices.append(
            f"as written, {self.ranks} ranks accumulate over {of_rank[0]} micro-batches a step and"
            f" one process over {of_process[0]}: the same global batch"
        )
        return reference

    def _why_not_compared(self, reference: ScriptRecord) -> str:
        """Return why one process, which trains on other samples, can't be compared; or empty."""
        reads_by_loader = self.records[0].training_loader is not None
        if not reference.steps:
            return "one process took no step"
        if not self.feed or not (reads_by_loader or self._begins_alike(reference)):
            return self._other_inputs(reference)
        if not self.in_turn and reference.passes != self.records[0].passes[: self.outcome.steps]:
            return (
                f"one process takes {reference.passes[0]} micro-batches a step, a rank"
                f" {self.records[0].passes[0]}"
            )
        return ""

    def _say_batch(
        self, reference: ScriptRecord, loader: int, readers: Sequence[ScriptRecord]
    ) -> None:
        """Say how many samples a step has, and whether one process as written has as many."""
        size = _size_of_batch(readers, loader)
        written = reference.asked.get(loader)
        passes = self.records[0].passes[0]
        if written is None or written == size:
            notice = f"{size * passes} samples a step on any number of ranks"
        else:
            notice = (
                f"as written, one process takes {written * passes} samples a step, and {self.ranks}"
                f" ranks take {size * passes}: one process was given the {size * passes} together"
            )
        self.outcome.notices.append(notice)

    def _begins_alike(self, reference: ScriptRecord) -> bool:
        """Return whether one process begins with the samples of all ranks.

        Its first forward pass is compared with those of the ranks.
        """
        ranks = [
            row
            for record in self.world.leaders
            for rows in record.steps[0].inputs[:1]
            for row in rows
        ]
        return bool(ranks) and sorted(ranks) == sorted(
            row for rows in reference.steps[0].inputs[:1] for row in rows
        )

    def _other_inputs(self, reference: ScriptRecord) -> str:
        """Say which samples one process reads that ranks do not, without a loader; or nothing."""
        for number in range(self.outcome.steps):
            units = [record.steps[number] for record in self.world.leaders]
            right = reference.steps[number]
            mine = [sum(map(len, step.inputs)) for step in units]
            theirs = sum(map(len, right.inputs))
            total = sum(step.elements for step in units) % 2**64
            if not mine[0]:
                return "the samples come from no DataLoader, and the model has no inputs to compare"
            if right.elements not in (total, units[0].elements if len(set(mine)) == 1 else total):
                return (
                    f"in step {number + 1}, one process trains on {theirs} samples and {self.ranks}"
                    " ranks on "
                    f"{sum(mine)}, which are not the same; they don't come from a DataLoader,"
                    " through which one "
                    "process could get them; an argument such as {16/n} holds a global batch of 16"
                    " on n ranks"
                )
        return ""

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

    def _excuse_factors_that_cancel(self) -> None:
        """Take a learning rate and a gradient for right where one makes up for the other.

        A mean over ranks divides a summed loss by their number, and the rate may be multiplied by
        it. Where the update is linear in the gradient, as that of SGD, one process with its own
        rate and its own gradients has the same weights.
        """
        causes = [cause for cause in self.outcome.causes if cause.is_error]
        if self.each_alone or {cause.kind for cause in causes} != {LEARNING_RATE, SUM}:
            return
        given = replace(self.given, settings=(), gradients=())
        own = self.alone("with its own settings", [self.feed], given=given)[0]
        steps = range(self.outcome.steps)
        if len(own.steps) < len(steps) or any(
            max(self.updates(number, self.world, own)) > 50 * self.rounding for number in steps
        ):
            return
        for cause in causes:
            self._excuse(
                cause,
                "rate and gradient make up for each other: one process with its own has the same"
                " weights",
                by="weights after each step, of one process with its own learning rate",
            )

    def _excuse(self, cause: Cause, why: str, *, by: str) -> None:
        """Keep a cause as something that is not an error, with the reason and how it was found."""
        self.outcome.causes.remove(cause)
        excused = replace(
            cause,
            text=f"{cause.text}; {why}",
            found_by=[*cause.found_by, by],
            is_error=False,
        )
        self.outcome.causes.append(excused)

    def _excuse_schedules_of_other_lengths(self, reference: ScriptRecord) -> None:
        """Take a learning rate for right whose schedule is as long as a rank's loader.

        Numbers of batches are rounded: of 25 samples two ranks have 4 and 3 batches of 4, and one
        process has 4 of 8. One process whose loaders say that they have a rank's number of batches
        then steps with the rate of the ranks.
        """
        causes = [cause for cause in self.outcome.causes if cause.is_error]
        if self.each_alone or [cause.kind for cause in causes] != [LEARNING_RATE]:
            return
        of_ranks = [_batches_of_loaders(record) for record in self.records]
        tried = [_batches_of_loaders(reference, self.given.sizes)]
        for choose in (min, max):
            lengths = {
                loader: choose(of_rank.get(loader, 0) for of_rank in of_ranks)
                for loader in of_ranks[0]
            }
            if not all(lengths.values()) or lengths in tried:
                continue
            tried.append(lengths)
            given = replace(self.given, settings=(), gradients=(), lengths=lengths)
            what = f"with loaders of {listed(sorted(map(str, set(lengths.values()))))} batches"
            own = self.alone(what, [self.feed], given=given)[0]
            if settings_cause(self.records, own) is not None:
                continue
            self._excuse(
                causes[0],
                "the schedule is as long as a rank's loader: one process, whose number of batches"
                " is rounded otherwise, has the same rate with that length",
                by="the rate of one process whose loaders say that they are as long as a rank's",
            )
            return

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


def _batches_of_loaders(
    record: ScriptRecord, sizes: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Return how many batches each training loader has, where `len` says it.

    `sizes`: of the batches with which loaders were made, where the script asked for others.
    """
    made_with = {**record.asked, **(sizes or {})}
    return {
        loader: record.lengths[loader][0] // made_with[loader]
        for loader in record.training_loaders
        if loader in record.lengths and made_with.get(loader)
    }
