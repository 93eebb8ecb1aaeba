"""Compares a script's steps on several ranks with those of one process that is given the same samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.diagnose.known_errors import recognise
from lockstep.errors import LockstepError, RunError
from lockstep.verify.script.fixes import UNKNOWN, ScriptCause, cause
from lockstep.verify.script.gradients import (
    GradientEvidence,
    Vector,
    accumulation_cause,
    computation_cause,
    coupling_cause,
    reduction_cause,
    relative,
    shared_cause,
    sizes_of,
    vector,
    weighing_cause,
)
from lockstep.verify.script.outcome import ScriptDifference, ScriptOutcome
from lockstep.verify.script.ranks import (
    hang_cause,
    is_cut_by_script,
    loop_causes,
    replicas_cause,
    seen_on_ranks,
    settings_cause,
    uneven_steps,
)
from lockstep.verify.script.record import LOCKSTEP, RecordedStep, ScriptRecord, World
from lockstep.verify.script.runs import Feed, HangError, ScriptRuns, is_stored, one_after_another, step_batches, united

_ROUNDING = 2e-5  # relative difference that needs no explanation in float32
_ROUNDING_16 = 2e-2  # the same for parameters of 16 bits
_CEILING = 1e-2  # a difference above it is never rounding
_NUDGES = 10.0  # how many times as far as changed last bits do a difference may be
_MOST_PARTS = 8  # processes that are started for the parts of one step


def judge_script(runs: ScriptRuns, ranks: int) -> ScriptOutcome:
    """Run a script on a number of ranks and as one process, and compare them."""
    outcome = ScriptOutcome(ranks)
    try:
        _Judgement(runs, outcome).judge()
    except HangError as hang:
        framework = next((record.framework for record in hang.records if record is not None), outcome.framework)
        outcome.causes.append(hang_cause(hang.records, hang.places, framework))
        outcome.failed = outcome.causes[-1].text
    except LockstepError as error:
        outcome.failed = "\n".join([str(error), *getattr(error, "__notes__", [])])
        _add_crash(runs, outcome, str(error).splitlines()[0])
    return outcome


def _add_crash(runs: ScriptRuns, outcome: ScriptOutcome, text: str) -> None:
    """Say whether one process runs what several ranks don't."""
    try:
        runs.alone("as it is, since the ranks failed", [{}])
    except LockstepError:
        outcome.notices.append("one process fails, too")
        return
    known = recognise(text)
    if known is not None and known.name == "a peer is gone":  # else the error of the rank that failed is reported
        text = f"a rank has ended, and another still needs it: {text}"
        outcome.causes.append(cause("uneven steps", text, "the script's own error", outcome.framework))
    else:
        text = f"the script runs as one process, and not on {outcome.ranks} ranks: {text}"
        outcome.causes.append(ScriptCause("crash", text, "the script's own error"))


class _Judgement:
    """Everything that is run for one number of ranks."""

    def __init__(self, runs: ScriptRuns, outcome: ScriptOutcome) -> None:
        self.runs, self.outcome, self.ranks = runs, outcome, outcome.ranks
        self.records: list[ScriptRecord] = []
        self.world = World([])
        self.joined: dict[str, int] = {}
        self.folder = Path()
        self.rounding = _ROUNDING
        self.given: dict[str, Any] = {}  # what each run of one process is given, but for its samples
        self.feed: Feed = {}

    def judge(self) -> None:
        outcome = self.outcome
        self._take("as it is")
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
        outcome.causes += loop_causes(self.records)
        outcome.causes += self._seen_on_ranks()
        uneven = uneven_steps(self.records, outcome.framework)
        if uneven is not None:
            outcome.causes.append(uneven)
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

    def _take(self, what: str, **changes: Any) -> None:
        """Run the ranks, whose records are judged from now on."""
        self.folder, self.records = self.runs.world(self.ranks, what, **changes)
        self.world = World(self.records, self.joined)

    def _seen_on_ranks(self) -> list[ScriptCause]:
        """Return what ranks show; what looks wrong is right where a script cuts its model over them by itself."""
        found = seen_on_ranks(self.world)
        if any(one.is_error for one in found) and len(self.world.units) == self.ranks:
            try:
                probe = self._alone("as it is", [{}], first=self._first(), steps=1)[0]
            except LockstepError:
                return found
            if probe.joined:
                self.joined = probe.joined
                self.world = World(self.records, self.joined)
                return seen_on_ranks(self.world)
        return found

    def _undo(self) -> None:
        """Run the ranks once more without what differs by itself."""
        again: dict[str, Any] = {}
        what = []
        if any(draw.moved for record in self.records for step in record.steps for draw in step.draws):
            again["mean_draws"] = self.given["mean_draws"] = True
            before = self.records
            self._take("without random numbers", **again)
            if all(map(_equal_losses, before, self.records)):  # as where the probability of dropout is 0
                self.outcome.causes = [found for found in self.outcome.causes if found.kind != "random numbers"]
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
            self._take(" and ".join(what), **again)

    def _first(self) -> dict[str, list[Any]]:
        """Return the first values of each parameter on each rank."""
        ranks = self.world.tensors(lambda record: record.first)
        return {name: [rank[name] for rank in ranks if name in rank] for name in ranks[0]}

    def _reference(self) -> ScriptRecord | None:
        """Return one process's record, given the ranks' samples, first values and settings."""
        shared = is_cut_by_script(self.world)
        self.feed = united(self.world, shared=shared)
        if not is_stored(self.feed, self.folder):
            self.feed = {}
            self.outcome.notices.append("samples could not be stored: one process reads its own")
        readers = self.world.leaders[: 1 if shared else None]
        sizes = {
            loader: sum(len(r.batches[loader][0]) for r in readers if r.batches.get(loader))
            for loader in self.records[0].batches
        } if self.feed else {}  # fmt: skip
        settings = [step.settings for step in self.records[0].steps]
        self.given |= {"first": self._first(), "settings": tuple(settings), "steps": self.outcome.steps}
        self.given |= {"samples": self.folder, "sizes": {k: v for k, v in sizes.items() if v}}
        try:
            reference = self._alone("given the samples of all ranks", [self.feed])[0]
        except LockstepError as error:
            self.outcome.not_judged = (
                f"one process, with which ranks are compared, does not run the script: {str(error).splitlines()[0]}"
            )
            return None
        loader = self.records[0].training_loader
        mine, theirs, units = self.records[0].passes[:1], reference.passes[:1], len(self.world.units)
        if self.feed and loader is not None and mine and theirs == [mine[0] * units] and units > 1:
            self.given["sizes"] = {}
            self.feed = one_after_another(self.world)
            reference = self._alone("given the samples of each rank in turn", [self.feed])[0]
            self.outcome.notices.append(
                f"as written, {self.ranks} ranks accumulate over {mine[0]} micro-batches a step and one process over "
                f"{theirs[0]}: the same global batch"
            )
        elif self.feed and loader is not None:
            self._say_batch(reference, loader, readers)
        if not reference.steps:
            self.outcome.not_judged = "one process took no step"
        elif not self.feed or loader is None:
            self._check_inputs(reference)
        elif not self._is_split() and reference.passes != self.records[0].passes[: self.outcome.steps]:
            self.outcome.not_judged = f"one process takes {theirs[0]} micro-batches a step, a rank {mine[0]}"
        return None if self.outcome.not_judged else reference

    def _is_split(self) -> bool:
        return any(len(at) == 1 for at in self.feed.values())

    def _say_batch(self, reference: ScriptRecord, loader: int, readers: Sequence[ScriptRecord]) -> None:
        size = sum(len(record.batches[loader][0]) for record in readers if record.batches.get(loader))
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
            units = [record.steps[number] for record in self.world.leaders]
            right = reference.steps[number]
            mine, theirs = [sum(map(len, step.inputs)) for step in units], sum(map(len, right.inputs))
            total = sum(step.elements for step in units) % 2**64
            if not mine[0]:
                self.outcome.not_judged = "the samples come from no DataLoader, and the model has no inputs to compare"
                return
            if right.elements not in (total, units[0].elements if len(set(mine)) == 1 else total):
                self.outcome.not_judged = (
                    f"in step {number + 1}, one process trains on {theirs} samples and {self.ranks} ranks on "
                    f"{sum(mine)}, which are not the same; they don't come from a DataLoader, through which one "
                    "process could get them; an argument such as {16/n} holds a global batch of 16 on n ranks"
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
            moved = [self._distances(number, World([nudged]), reference) for number in range(len(nudged.steps))]
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

    def _distances(self, number: int, world: World, reference: ScriptRecord) -> tuple[float, float]:
        """Return how far the ranks' gradients are off, and their updates."""
        mine, right = self._gradients(number, world), self._gradients(number, World([reference]))[0]
        gradient = max(relative(one, right) for one in mine)
        return gradient, max(self._updates(number, world, reference))

    def _gradients(self, number: int, world: World, *, clipped: bool = False) -> list[Vector]:
        def pick(record: ScriptRecord) -> Any:
            step = record.steps[number]
            return step.gradients if clipped or not step.unclipped else step.unclipped

        return [vector(one, self._sizes) for one in world.tensors(pick)]

    def _updates(self, number: int, world: World, reference: ScriptRecord) -> list[float]:
        one_process = World([reference])
        values = one_process.tensors(lambda record: record.steps[number].values)
        sizes = sizes_of(values)
        right = vector(values[0], sizes)
        if number:
            before = one_process.tensors(lambda record: record.steps[number - 1].values)[0]
        else:
            before = {name: ranks[0] for name, ranks in self.given["first"].items()}
        moved = max(float(np.linalg.norm(right - vector(before, sizes))), 1e-300)
        ranks = world.tensors(lambda record: record.steps[number].values)
        return [float(np.linalg.norm(vector(one, sizes) - right)) / moved for one in ranks]

    def _first_difference(
        self, reference: ScriptRecord, limits: Sequence[tuple[float, float]]
    ) -> tuple[ScriptDifference | None, float]:
        rounding = 0.0
        for number in range(min(self.outcome.steps, len(reference.steps))):
            step = reference.steps[number]
            self._size(step)
            for clipped in (False, True):
                right = self._gradients(number, World([reference]), clipped=clipped)[0]
                for rank, mine in enumerate(self._gradients(number, self.world, clipped=clipped)):
                    off = relative(mine, right)
                    if off > limits[number][0]:
                        name = self._farthest(mine, right)
                        aspect = "clipped gradients" if clipped and step.unclipped else "gradients"
                        return ScriptDifference(number, aspect, name, off, rank), rounding
                    rounding = max(rounding, off)
            for rank, off in enumerate(self._updates(number, self.world, reference)):
                if off > limits[number][1]:
                    return ScriptDifference(number, "weights", "", off, rank), rounding
        return None, rounding

    def _size(self, step: RecordedStep) -> None:
        """Compare from now on the gradients that a step of one process has."""
        pieces = {**step.unclipped, **step.gradients}
        self._sizes = {name: piece.local.numel() for name, piece in pieces.items()}

    def _farthest(self, mine: Vector, right: Vector) -> str:
        begin, worst = 0, ("", -1.0)
        for name, size in self._sizes.items():
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
        found = replicas_cause(self.world, first.step)
        if found is None and aspect == "clipped gradients":
            text = "the gradients are equal before they are clipped, and differ afterwards"
            found = cause("clipping", text, "gradients when clipping began, and when the optimizer stepped", framework)
        elif found is None and aspect == "gradients":
            causes = self._gradient_causes(first, reference)
            if causes:
                outcome.causes += causes
                return
        if found is None:
            text = "none was shown; one process has the ranks' samples, first values and settings"
            found = ScriptCause(UNKNOWN, text, "comparison with one process")
        outcome.causes.append(found)

    def _gradient_causes(self, first: ScriptDifference, reference: ScriptRecord) -> list[ScriptCause]:
        evidence = self._evidence(first.step, reference)
        if not evidence.own:
            found = self._statistics_cause(first) or shared_cause(evidence)
            return [] if found is None else [found]
        found = reduction_cause(evidence)
        if found is not None:
            same = relative(evidence.mean, evidence.reference) < _CEILING / _NUDGES
            weighed = None if same else weighing_cause(evidence)
            return [found] if weighed is None else [found, weighed]
        found = weighing_cause(evidence) or self._statistics_cause(first)
        if found is None:
            found = self._computation_cause(first, evidence) or self._micro_batch_cause(first, evidence)
        return [] if found is None else [found]

    def _evidence(self, number: int, reference: ScriptRecord) -> GradientEvidence:
        """Return a step's gradients, with those of each unit's samples alone."""
        units = [unit[0] for unit in self.world.units]
        mine = self._gradients(number, self.world)
        own = []
        if all(set(record.steps[number].own) >= set(self._sizes) for record in self.records):
            # A rank that shares a model with others holds its own part of it.
            tensors = self.world.tensors(lambda record: record.steps[number].own)
            own = [vector(tensors[rank], self._sizes) for rank in units] if len(units) == self.ranks else []
        elif (at := self._at(number)) is not None and len(units) > 1:
            own = [gradients for gradients, _ in self._alone_on_each(number, at)]
        right = self._gradients(number, World([reference]))[0]
        ranks = [mine[rank] for rank in units] if own else mine
        return GradientEvidence(self._sizes, ranks, right, own, self.outcome.framework)

    def _at(self, number: int) -> tuple[int, range] | None:
        """Return the loader and batches of a step, if one process can be given parts of them."""
        at = step_batches(self.records[0], number)
        limited = len(self.world.units) <= _MOST_PARTS and not is_cut_by_script(self.world)
        return at if self.feed and not self._is_split() and limited else None

    def _alone_on_each(self, number: int, at: tuple[int, range]) -> list[tuple[Vector, ScriptRecord]]:
        return self._parts(number, at, [[[(unit[0], i)] for i in at[1]] for unit in self.world.units])

    def _computation_cause(self, first: ScriptDifference, evidence: GradientEvidence) -> ScriptCause | None:
        """Compare what each rank computes from its samples with what one process does."""
        at = self._at(first.step)
        if at is None or len(self.world.units) == 1:
            return None
        alone = self._alone_on_each(first.step, at)
        gradients, records = [one for one, _ in alone], [record for _, record in alone]
        found = computation_cause(evidence, gradients, self.world.leaders, records, first.step)
        if found is None and len(at[1]) == 1:
            found = coupling_cause(evidence, gradients)
        return found

    def _micro_batch_cause(self, first: ScriptDifference, evidence: GradientEvidence) -> ScriptCause | None:
        """Judge micro-batches one by one: each may weigh its ranks otherwise."""
        at, units = self._at(first.step), self.world.units
        if at is None or len(at[1]) == 1 or len(units) * len(at[1]) > _MOST_PARTS:
            return None
        micro_batches = self._parts(first.step, at, [[self.feed[at[0], i]] * len(at[1]) for i in at[1]])
        given = [[[(unit[0], i)]] * len(at[1]) for i in at[1] for unit in units]
        every = [gradient for gradient, _ in self._parts(first.step, at, given)]
        for place, (right, _) in enumerate(micro_batches):
            parts = every[place * len(units) : (place + 1) * len(units)]
            found = weighing_cause(GradientEvidence(self._sizes, parts, right, parts, evidence.framework))
            if found is not None:
                return found
        return None

    def _parts(
        self, step: int, at: tuple[int, range], given: Sequence[Sequence[Sequence[tuple[int, int]]]]
    ) -> list[tuple[Vector, ScriptRecord]]:  # fmt: skip
        """Return a step's gradient of one process for each of `given`: the samples of each of its batches."""
        feeds = [{**self.feed, **{(at[0], i): list(s) for i, s in zip(at[1], one, strict=True)}} for one in given]
        records = self._alone("given parts of the samples alone", feeds, steps=step + 1)
        return [(self._gradients(step, World([record]))[0], record) for record in records]

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
        world = World(records, self.joined)
        feed = united(world, shared=is_cut_by_script(world))
        reference = self._alone("with running statistics", [feed], **changes)[0]
        right = self._gradients(first.step, World([reference]))[0]
        if any(relative(mine, right) > _ROUNDING * 50 for mine in self._gradients(first.step, world)):
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
        self._size(reference.steps[0])
        given = [[samples] * len(batches) for samples in (together, *(self.feed[loader, i] for i in batches))]
        (whole, _), *micro_batches = self._parts(0, at, given)
        parts = [gradient for gradient, _ in micro_batches]
        step = self._gradients(0, World([reference]))[0]
        if relative(step, whole) > _CEILING / _NUDGES:
            found = accumulation_cause(step, whole, parts, self.outcome.framework)
            if found is not None:
                self.outcome.causes.append(found)


def _equal_losses(one: ScriptRecord, other: ScriptRecord) -> bool:
    return [step.losses for step in one.steps] == [step.losses for step in other.steps]
