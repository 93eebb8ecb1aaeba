"""Compares the gradients and updates of a script's ranks with those of one process.

`ScriptComparison` runs the ranks (`take`) and one process (`alone`), which is `given` what the
ranks had, and reads a `feed` of their samples; both under the same `conditions`. Vectors of all
gradients (vectors.py) are compared; causes/explanation.py says why they differ.

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import LockstepError, RunError
from lockstep.verify.algebra import Values, distance, mean_of
from lockstep.verify.comparison_result import Difference, Outcome
from lockstep.verify.script.causes.operations import OperationDifference
from lockstep.verify.script.causes.samples_of_ranks import is_cut_by_script
from lockstep.verify.script.feeds import Feed, TrainedBatches, step_batches
from lockstep.verify.script.flows import is_same_flow
from lockstep.verify.script.observed.reads import reads_to_give
from lockstep.verify.script.record import Pieces, RecordedStep, ScriptRecord, TensorPiece
from lockstep.verify.script.runs import Runs
from lockstep.verify.script.task import AS_IT_IS, AS_WRITTEN, GivenValues
from lockstep.verify.script.vectors import is_same, slices_of, vector
from lockstep.verify.script.world import World

ROUNDING = 2e-5  # relative difference that needs no explanation in float32
NUDGES = 10.0  # how many times as far as changed last bits do a difference may be
MOST_PARTS = 8  # processes that are started for the parts of one step


class ScriptComparison:
    """The ranks of a script, and what one process is given to be compared with them."""

    def __init__(self, runs: Runs, outcome: Outcome) -> None:
        self.runs = runs
        self.outcome = outcome
        self.ranks = outcome.ranks
        self.records: list[ScriptRecord] = []
        self.world = World([])
        self.joined: dict[str, int] = {}
        self.folder = Path()
        self.rounding = ROUNDING
        # what each run of one process is given, but for its samples
        self.given = AS_IT_IS
        # of each further run: without what is other by nature, as draws and autocast
        self.conditions = AS_WRITTEN
        self.feed: Feed = {}
        self.in_turn = False  # whether one process takes the ranks' batches one after another
        # whether ranks are compared with the mean of one process for each: without a loader
        self.each_alone = False
        # of each rank without a loader, what a process is given of its draws and its reads
        self._own_values: list[GivenValues] = []
        self.sizes: dict[str, int] = {}  # of the gradients that are compared
        # step → as `alone_on_each` has found
        self._on_each: dict[int, list[tuple[Values, ScriptRecord]]] = {}
        # parameter → size of its difference, where a gradient differs
        self.off: dict[str, float] = {}
        # what tells the lines of causes, once a difference is explained
        self.differing: OperationDifference | None = None
        self.rank_that_differs = 0
        self.traced: list[ScriptRecord] = []  # the ranks, with each operation

    def take(self, what: str, given: GivenValues = AS_IT_IS) -> None:
        """Run the ranks, whose records are judged from now on."""
        self.folder, self.records = self.runs.world(self.ranks, what, given, self.conditions)
        self.world = World(self.records, self.joined)

    def give(self, **values: Any) -> None:
        """Give one process these values from now on (the fields of `GivenValues`)."""
        self.given = replace(self.given, **values)

    def feed_samples(self, feed: Feed, *, in_turn: bool = False) -> None:
        """Feed one process these samples of the ranks from now on.

        `in_turn`: the batches of the ranks come one after another.
        """
        self.feed = feed
        self.in_turn = in_turn

    def note_each_alone(self) -> None:
        """Compare the ranks with the mean of one process for each from now on."""
        self.each_alone = True

    def rerun(self, what: str, number: int, **conditions: bool) -> tuple[Path, list[ScriptRecord]]:
        """Run the ranks once more, up to a step, with some conditions besides.

        They start from the same first values.
        """
        given = GivenValues(first=self.given.first)
        changed = replace(self.conditions, **conditions)
        return self.runs.world(self.ranks, what, given, changed, number + 1)

    def on_ranks(self, pieces: Sequence[Pieces]) -> dict[str, list[Any]]:
        """Return each parameter's value, or another tensor of it, on each rank."""
        ranks = self.world.tensors(pieces)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: [rank[name] for rank in ranks if name in rank] for name in names}

    def alone(
        self,
        what: str,
        feeds: Sequence[Feed],
        *,
        given: GivenValues | None = None,
        steps: int | None = None,
        **conditions: bool,
    ) -> list[ScriptRecord]:
        """Run the script as one process for each of the feeds.

        It takes the steps of the ranks, or `steps`, with what is `given`, or else `self.given`.
        """
        values = self.given if given is None else given
        return self.runs.alone(
            what,
            [replace(values, feed=feed) for feed in feeds],
            replace(self.conditions, **conditions),
            self.outcome.steps if steps is None else steps,
        )

    def distances(self, number: int, world: World, reference: ScriptRecord) -> tuple[float, float]:
        """Return how far the ranks' gradients are off, and their updates."""
        right = self.gradients(number, World([reference]))[0]
        off = max(distance(mine, right) for mine in self.gradients(number, world))
        return off, max(self.updates(number, world, reference))

    def gradients(self, number: int, world: World, *, clipped: bool = False) -> list[Values]:
        """Return the gradients of a step as each rank sees them, before or after clipping."""
        steps = [record.steps[number] for record in world.records]
        pieces = [
            step.gradients if clipped or not step.unclipped else step.unclipped for step in steps
        ]
        return [vector(tensors, self.sizes) for tensors in world.tensors(pieces)]

    def updates(self, number: int, world: World, reference: ScriptRecord) -> list[float]:
        """Return how far each rank's updated weights are off, relative to the update."""
        one_process = World([reference])
        values = one_process.tensors([reference.steps[number].values])[0]
        sizes = {name: tensor.numel() for name, tensor in values.items()}
        right = vector(values, sizes)
        if number:
            before = one_process.tensors([reference.steps[number - 1].values])[0]
        else:
            before = {name: ranks[0] for name, ranks in self.given.first.items()}
        moved = max(float(np.linalg.norm(right - vector(before, sizes))), 1e-300)
        ranks = world.tensors([record.steps[number].values for record in world.records])
        return [float(np.linalg.norm(vector(mine, sizes) - right)) / moved for mine in ranks]

    def first_difference(
        self, reference: ScriptRecord, limits: Sequence[tuple[float, float]]
    ) -> tuple[Difference | None, float]:
        """Return the first difference, and the largest before it.

        `limits`: of each step's gradients and updates.
        """
        largest = 0.0
        for number in range(min(self.outcome.steps, len(reference.steps))):
            limit_of_gradients, limit_of_updates = limits[number]
            self.size(reference.steps[number])
            for clipped in (False, True):
                right = self.gradients(number, World([reference]), clipped=clipped)[0]
                for rank, mine in enumerate(self.gradients(number, self.world, clipped=clipped)):
                    off = distance(mine, right)
                    if off > limit_of_gradients:
                        records = (reference, *self.world.records)
                        clips = any(record.steps[number].unclipped for record in records)
                        aspect = "clipped gradients" if clipped and clips else "gradients"
                        name = self._note_gradients_off(mine, right)
                        return Difference(aspect, name, off, ranks=[rank], step=number), largest
                    largest = max(largest, off)
            for rank, off in enumerate(self.updates(number, self.world, reference)):
                if off > limit_of_updates:
                    return Difference("weights", "", off, ranks=[rank], step=number), largest
        return None, largest

    def _note_gradients_off(self, mine: Values, right: Values) -> str:
        """Note how far each parameter's gradient is off, and return the name of the farthest.

        Farthest is the one that adds most to the distance of all gradients: a large relative
        difference of a small gradient does not count for much.
        """
        slices = slices_of(self.sizes)
        self.off = {name: distance(mine[part], right[part]) for name, part in slices.items()}
        norms = {name: float(np.linalg.norm((mine - right)[part])) for name, part in slices.items()}
        return max(norms, key=lambda name: norms[name])

    def size(self, step: RecordedStep) -> None:
        """Compare from now on the gradients that a step of one process has."""
        pieces = {**step.unclipped, **step.gradients}
        self.sizes = {name: piece.local.numel() for name, piece in pieces.items()}

    def can_take_parts(self) -> bool:
        """Return whether one process can be given the samples of each unit alone."""
        is_limited = len(self.world.units) <= MOST_PARTS and not is_cut_by_script(self.world)
        has_parts = bool(self._own_values) or (bool(self.feed) and not self.in_turn)
        return has_parts and is_limited

    def alone_on_each(self, number: int) -> list[tuple[Values, ScriptRecord]]:
        """Return a step's gradient of one process on the samples of each unit, traced if it can be.

        It is computed once.
        """
        if number not in self._on_each:
            try:
                self._on_each[number] = self._alone_on_each(number, traced=True)
            except LockstepError:  # what is compiled may not be traced
                self._on_each[number] = self._alone_on_each(number)
        return self._on_each[number]

    def repeat_parts(self, number: int, right: Values) -> None:
        """Give one process the samples of each unit several times, if it needs as many as all have.

        A script may compute by the number of its samples, as a weight that grows with those that
        were seen. Then the mean of the gradients of parts is not that of all samples, unless each
        part has as many.

        Args:
            number: of the step.
            right: the gradient of one process with all samples.
        """
        trained = step_batches(self.records[0], number)
        if trained is None or not self.can_take_parts() or len(self.world.units) == 1:
            return
        alone = self.alone_on_each(number)
        if is_same(mean_of([gradient for gradient, _ in alone]), right):
            return
        with suppress(LockstepError):
            repeated = self._alone_on_each(number, times=len(self.world.units))
            parts = [gradient for gradient, _ in repeated]
            if is_same(mean_of(parts), right):
                pairs = zip(alone, repeated, strict=True)
                self._on_each[number] = [
                    (gradient, _with_outputs_of(record, of_part, number))
                    for (_, of_part), (gradient, record) in pairs
                ]

    def _alone_on_each(
        self, number: int, *, traced: bool = False, times: int = 1
    ) -> list[tuple[Values, ScriptRecord]]:
        """Return a step's gradient of one process on the samples of each unit, `times` over."""
        trained = step_batches(self.records[0], number)
        if trained is not None:
            units = self.world.units
            feeds = [[[(unit[0], at)] * times for at in trained.indices] for unit in units]
            return self.parts(number, trained, feeds, traced=traced)
        # A batch serves several steps, or a step takes batches of several loaders: a process is
        # given its unit's samples throughout, and updates with the gradients of all ranks.
        given = replace(self.given, gradients=self._gradients_of_ranks())
        what = "given each rank's samples alone"
        records = self._alone_for_units(
            what, given, steps=number + 1, traced=traced, traced_whole=traced and not self.feed
        )
        self._check_steps(records, number, what)
        return [(self.gradients(number, World([record]))[0], record) for record in records]

    def _unit_feeds(self) -> list[Feed]:
        """Return what gives one process the samples of each unit alone, in every step."""
        return [
            {
                at: [part for part in parts if part[0] == unit[0]]
                for at, parts in self.feed.items()
                if any(part[0] == unit[0] for part in parts)
            }
            for unit in self.world.units
        ]

    def _alone_for_units(
        self, what: str, given: GivenValues, *, steps: int | None = None, **conditions: bool
    ) -> list[ScriptRecord]:
        """Run one process for each unit, given its samples, or what it draws and reads itself."""
        if not self._own_values:
            return self.alone(what, self._unit_feeds(), given=given, steps=steps, **conditions)
        of_units = [replace(given, draws=own.draws, reads=own.reads) for own in self._own_values]
        return self.runs.alone(
            what,
            of_units,
            replace(self.conditions, **conditions),
            self.outcome.steps if steps is None else steps,
        )

    def take_each_alone(self, written: ScriptRecord | None) -> ScriptRecord | None:
        """Return the mean of one process for each rank, where samples come from no loader.

        A process is given what its rank drew while it trained, and the places from which it read;
        and if it does not have the rank's samples then, what was drawn before, too. None if it does
        not have them even so.

        `written`: the record of one process that reads as the script is written; None: it fails.
        """
        ranks = [unit[0] for unit in self.world.units]
        if len(ranks) != self.ranks or len(ranks) == 1 or len(ranks) > MOST_PARTS:
            return None
        if any(record.batches for record in self.records):
            return None
        reads = [record.reads for record in self.records]
        given_reads: list[dict[Any, Any]] = [{} for _ in ranks]
        if written is not None:
            given_reads = reads_to_give(reads, written.reads)
        kept = self.given
        for has_early in (False, True):
            self._own_values = [
                GivenValues(
                    draws={rank: [*(record.early if has_early else []), *record.draws]},
                    reads=given_reads[rank],
                )
                for rank, record in enumerate(self.records)
            ]
            with suppress(LockstepError):
                mean = self._mean_of_units(self._have_the_samples)
                if mean is not None:
                    return mean
        self._own_values = []
        self.given = kept
        return None

    def _have_the_samples(self, records: Sequence[ScriptRecord]) -> bool:
        """Return whether each process gives its models what its rank gives them, in all steps."""
        for mine, right in zip(self.world.leaders, records, strict=True):
            if len(right.steps) < self.outcome.steps:
                return False
            steps = zip(mine.steps[: self.outcome.steps], right.steps, strict=False)
            if not all(_has_the_samples(other, step) for step, other in steps):
                return False
        return True

    def mean_of_ranks(self, *, nudged: bool = False) -> ScriptRecord | None:
        """Return the mean of one process for each unit, given its samples and random numbers.

        Their optimizers are given the ranks' gradients. None if samples can't be given so.
        """
        if not self.can_take_parts() or len(self.world.units) == 1:
            return None
        return self._mean_of_units(lambda _: True, nudged=nudged)

    def _mean_of_units(
        self, are_right: Callable[[Sequence[ScriptRecord]], bool], **conditions: bool
    ) -> ScriptRecord | None:
        """Return the mean of one process for each unit; None if they are not right."""
        self.give_gradients()
        what = "given each rank's samples and random numbers"
        records = self._alone_for_units(what, self.given, **conditions)
        if not are_right(records):
            return None
        steps = zip(*(record.steps for record in records), strict=False)
        means = [
            _mean_step(of_units, self.given.gradients[number])
            for number, of_units in enumerate(steps)
        ]
        return replace(records[0], steps=means, unkeyed=[])

    def note_traced(self, records: list[ScriptRecord]) -> None:
        """Keep the ranks' records with each operation, for the lines of causes."""
        self.traced = records

    def note_operation(self, rank: int, difference: OperationDifference) -> None:
        """Keep the first operation that differs, and on which rank."""
        self.rank_that_differs = rank
        self.differing = difference

    def give_gradients(self) -> None:
        """Let the optimizers of one process use the ranks' gradients from now on."""
        self.give(gradients=self._gradients_of_ranks())

    def _gradients_of_ranks(self) -> list[dict[str, list[Any]]]:
        """Return the gradients of each step, by parameter, on each rank."""
        steps = zip(*(record.steps[: self.outcome.steps] for record in self.records), strict=True)
        return [self.on_ranks([step.gradients for step in ranks]) for ranks in steps]

    def parts(
        self,
        step: int,
        trained: TrainedBatches,
        samples: Sequence[Sequence[Sequence[tuple[int, int]]]],
        *,
        traced: bool = False,
    ) -> list[tuple[Values, ScriptRecord]]:
        """Return a step's gradient on one process for each member of `samples`.

        A member lists, for each batch that the step trains on, the (rank, batch) whose samples it
        gets; batches of other steps have those of all ranks.
        """
        feeds = []
        for of_batches in samples:
            feed = dict(self.feed)
            for index, of_batch in zip(trained.indices, of_batches, strict=True):
                feed[trained.loader, index] = list(of_batch)
            feeds.append(feed)
        what = "given parts of the samples alone"
        records = self.alone(what, feeds, steps=step + 1, traced=traced)
        self._check_steps(records, step, what)
        return [(self.gradients(step, World([record]))[0], record) for record in records]

    def _check_steps(self, records: Sequence[ScriptRecord], step: int, what: str) -> None:
        """Raise RunError if a process has not taken a step."""
        if any(len(record.steps) <= step for record in records):
            raise RunError(
                f"one process, {what}, took fewer than {step + 1} steps",
                why="the ranks took them: the number of steps depends on how samples are cut",
                fix="let the script take a number of steps, whatever batches a rank has",
            )


def _with_outputs_of(record: ScriptRecord, other: ScriptRecord, number: int) -> ScriptRecord:
    """Return the record of one process with modules' outputs of another in a step.

    Those of the first are of more samples, and so are its operations, which are left out.
    """
    step = replace(record.steps[number], flow=other.steps[number].flow, operations=[])
    return replace(record, steps=[*record.steps[:number], step, *record.steps[number + 1 :]])


def _has_the_samples(step: RecordedStep, right: RecordedStep) -> bool:
    """Return whether models got what they got in another step, as far as their inputs tell.

    Inputs that were computed have other last bits, which the outputs of modules show as rounding.
    """
    is_seen = any(map(len, right.inputs)) and len(step.losses) == len(right.losses)
    is_same = step.has_inputs_of(right) or is_same_flow(step.flow, right.flow)
    return is_seen and is_same


def _mean_step(
    steps: Sequence[RecordedStep], of_ranks: Mapping[str, Sequence[Tensor]]
) -> RecordedStep:
    """Return a step with the mean of the gradients of several processes.

    Where they clip them, the clipped ones are those of the ranks: a norm of a mean is not the mean
    of norms.
    """
    means = _mean_of_pieces([step.unclipped or step.gradients for step in steps])
    own = _mean_of_pieces([step.own for step in steps])
    if not steps[0].unclipped:
        return replace(steps[0], gradients=means, own=own)
    clipped = {
        name: TensorPiece(of_ranks[name][0], piece.shape)
        for name, piece in steps[0].gradients.items()
        if name in of_ranks
    }
    return replace(steps[0], unclipped=means, gradients=clipped, own=own)


def _mean_of_pieces(several: Sequence[Pieces]) -> Pieces:
    """Return the mean of whole tensors by name, over all; one that lacks it has zeros there."""
    means = {}
    for name, piece in several[0].items():
        values = [pieces[name].local for pieces in several if name in pieces]
        means[name] = TensorPiece(torch.stack(values).sum(0) / len(several), piece.shape)
    return means
