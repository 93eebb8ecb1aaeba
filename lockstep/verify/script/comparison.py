"""Compares the gradients and updates of ranks with those of one process.

It also explains the first difference.

A cause is named by what undoes the difference, or makes it.

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.errors import LockstepError, RunError, listed
from lockstep.verify.algebra import CEILING, Values, distance, mean_of
from lockstep.verify.outcome import UNKNOWN, Cause, Difference, Outcome
from lockstep.verify.script import gradients
from lockstep.verify.script.fixes import NORMALISATION, script_cause
from lockstep.verify.script.gradients import GradientEvidence, vector
from lockstep.verify.script.operations import (
    OperationDifference,
    TracedOperation,
    difference_keys,
    earliest,
    first_operation,
    first_operation_of_part,
    line_that_couples,
)
from lockstep.verify.script.ranks import is_cut_by_script, replicas_cause
from lockstep.verify.script.record import (
    Pieces,
    RecordedStep,
    ScriptRecord,
    TensorPiece,
    World,
)
from lockstep.verify.script.reduction import reduction_cause
from lockstep.verify.script.runs import Feed, Runs, step_batches, united

ROUNDING = 2e-5  # relative difference that needs no explanation in float32
NUDGES = 10.0  # how many times as far as changed last bits do a difference may be
MOST_PARTS = 8  # processes that are started for the parts of one step
# What ranks are run without, and must be in each further run of them.
_UNDONE = ("mean_draws", "full_precision", "plain_reduction", "first")


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
        self.given: dict[str, Any] = {}
        self.feed: Feed = {}
        self.in_turn = False  # whether one process takes the ranks' batches one after another
        self.sizes: dict[str, int] = {}  # of the gradients that are compared
        # step → as `alone_on_each` has found
        self._on_each: dict[int, list[tuple[Values, ScriptRecord]]] = {}
        # parameter → size of its difference, where a gradient differs
        self.off: dict[str, float] = {}
        # what tells the lines of causes, once a difference is explained
        self.differing: OperationDifference | None = None
        self.rank_that_differs = 0
        self.traced: list[ScriptRecord] = []  # the ranks, with each operation

    def take(self, what: str, **changes: Any) -> None:
        """Run the ranks, whose records are judged from now on."""
        self.folder, self.records = self.runs.world(self.ranks, what, **changes)
        self.world = World(self.records, self.joined)

    def on_ranks(self, pieces: Sequence[Pieces]) -> dict[str, list[Any]]:
        """Return each parameter's value, or another tensor of it, on each rank."""
        ranks = self.world.tensors(pieces)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: [rank[name] for rank in ranks if name in rank] for name in names}

    def alone(self, what: str, feeds: Sequence[Feed], **changes: Any) -> list[ScriptRecord]:
        """Run the script as one process for each of the feeds."""
        return self.runs.alone(what, [{**self.given, **changes, "feed": feed} for feed in feeds])

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
        return [vector(one, self.sizes) for one in world.tensors(pieces)]

    def updates(self, number: int, world: World, reference: ScriptRecord) -> list[float]:
        """Return how far each rank's updated weights are off, relative to the update."""
        one_process = World([reference])
        values = one_process.tensors([reference.steps[number].values])[0]
        sizes = {name: tensor.numel() for name, tensor in values.items()}
        right = vector(values, sizes)
        if number:
            before = one_process.tensors([reference.steps[number - 1].values])[0]
        else:
            before = {name: ranks[0] for name, ranks in self.given["first"].items()}
        moved = max(float(np.linalg.norm(right - vector(before, sizes))), 1e-300)
        ranks = world.tensors([record.steps[number].values for record in world.records])
        return [float(np.linalg.norm(vector(one, sizes) - right)) / moved for one in ranks]

    def first_difference(
        self, reference: ScriptRecord, limits: Sequence[tuple[float, float]]
    ) -> tuple[Difference | None, float]:
        """Return the first difference, and the largest before it.

        `limits`: of each step's gradients and updates.
        """
        rounding = 0.0
        for number in range(min(self.outcome.steps, len(reference.steps))):
            step = reference.steps[number]
            self.size(step)
            clips = any(one.steps[number].unclipped for one in (reference, *self.world.records))
            for clipped in (False, True):
                right = self.gradients(number, World([reference]), clipped=clipped)[0]
                for rank, mine in enumerate(self.gradients(number, self.world, clipped=clipped)):
                    off = distance(mine, right)
                    if off > limits[number][0]:
                        aspect = "clipped gradients" if clipped and clips else "gradients"
                        slices = gradients.slices_of(self.sizes)
                        distances = {
                            n: float(np.linalg.norm((mine - right)[at])) for n, at in slices.items()
                        }
                        name = max(distances, key=lambda name: distances[name])
                        self.off = {n: distance(mine[at], right[at]) for n, at in slices.items()}
                        return Difference(aspect, name, off, ranks=[rank], step=number), rounding
                    rounding = max(rounding, off)
            for rank, off in enumerate(self.updates(number, self.world, reference)):
                if off > limits[number][1]:
                    return Difference("weights", "", off, ranks=[rank], step=number), rounding
        return None, rounding

    def size(self, step: RecordedStep) -> None:
        """Compare from now on the gradients that a step of one process has."""
        pieces = {**step.unclipped, **step.gradients}
        self.sizes = {name: piece.local.numel() for name, piece in pieces.items()}

    def can_take_parts(self) -> bool:
        """Return whether one process can be given the samples of each unit alone."""
        is_limited = len(self.world.units) <= MOST_PARTS and not is_cut_by_script(self.world)
        return bool(self.feed) and not self.in_turn and is_limited

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

    def _alone_on_each(self, number: int, **changes: Any) -> list[tuple[Values, ScriptRecord]]:
        at = step_batches(self.records[0], number)
        if at is not None:
            given = [[[(unit[0], i)] for i in at[1]] for unit in self.world.units]
            return self.parts(number, at, given, **changes)
        # A batch serves several steps, or a step takes batches of several loaders: a process is
        # given its unit's samples throughout, and updates with the gradients of all ranks.
        changes |= {"steps": number + 1, "gradients": self._gradients_of_ranks()}
        records = self.alone("given each rank's samples alone", self._unit_feeds(), **changes)
        self._check_steps(records, number, "given each rank's samples alone")
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

    def mean_of_ranks(self) -> ScriptRecord | None:
        """Return the mean of one process for each unit, given its samples and random numbers.

        Their optimizers are given the ranks' gradients. None if samples can't be given so.
        """
        if not self.can_take_parts() or len(self.world.units) == 1:
            return None
        self.give_gradients()
        what = "given each rank's samples and random numbers"
        records = self.alone(what, self._unit_feeds())
        steps = zip(*(record.steps for record in records), strict=False)
        means = [
            _mean_step(of_units, self.given["gradients"][number])
            for number, of_units in enumerate(steps)
        ]
        return replace(records[0], steps=means)

    def give_gradients(self) -> None:
        """Let the optimizers of one process use the ranks' gradients from now on."""
        self.given["gradients"] = self._gradients_of_ranks()

    def _gradients_of_ranks(self) -> list[dict[str, list[Any]]]:
        """Return the gradients of each step, by parameter, on each rank."""
        steps = zip(*(record.steps[: self.outcome.steps] for record in self.records), strict=True)
        return [self.on_ranks([step.gradients for step in ranks]) for ranks in steps]

    def parts(
        self,
        step: int,
        at: tuple[int, range],
        given: Sequence[Sequence[Sequence[tuple[int, int]]]],
        **changes: Any,
    ) -> list[tuple[Values, ScriptRecord]]:
        """Return a step's gradient on one process for each member of `given`.

        A member lists the samples of each batch of the step.
        """
        feeds = [
            {**self.feed, **{(at[0], i): list(s) for i, s in zip(at[1], one, strict=True)}}
            for one in given
        ]
        what = "given parts of the samples alone"
        records = self.alone(what, feeds, steps=step + 1, **changes)
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


def _mean_step(steps: Sequence[RecordedStep], of_ranks: dict[str, list[Any]]) -> RecordedStep:
    """Return a step with the mean of the gradients of several processes.

    Where they clip them, the clipped ones are those of the ranks: a norm of a mean is not the mean
    of norms.
    """
    pieces = [step.unclipped or step.gradients for step in steps]
    means = {}
    for name, piece in pieces[0].items():
        values = [each[name].local for each in pieces if name in each]
        total = torch.stack(values).sum(0)
        means[name] = TensorPiece(total / len(pieces), piece.shape)
    if not steps[0].unclipped:
        return replace(steps[0], gradients=means)
    clipped = {
        name: TensorPiece(of_ranks[name][0], piece.shape)
        for name, piece in steps[0].gradients.items()
        if name in of_ranks
    }
    return replace(steps[0], unclipped=means, gradients=clipped)


def _first_operation(c: ScriptComparison, first: Difference, evidence: GradientEvidence) -> str:
    """Return the first operation of a step that differs on a rank from one process on its samples.

    Empty if that can't be told.
    """
    if not c.can_take_parts():
        return ""
    undone = {key: c.given[key] for key in _UNDONE if key in c.given}
    try:
        _, records = c.runs.world(c.ranks, "with each operation traced", **undone, traced=True)
    except LockstepError:  # what is compiled may not be traced
        return ""
    c.traced = records
    alone = c.alone_on_each(first.step)
    traced: dict[int, tuple[list[TracedOperation], list[TracedOperation]]] = {}
    shared = c.world.units[0] if len(c.world.units) == 1 < c.ranks else []
    if shared:
        return _first_operation_of_stages(c, first, records, alone[0][1])
    for unit, (_, one) in zip(c.world.units, alone, strict=True):
        if len(records[unit[0]].steps) <= first.step or len(one.steps) <= first.step:
            return ""
        mine = records[unit[0]].steps[first.step].operations
        if not mine:
            return ""
        traced[unit[0]] = mine, one.steps[first.step].operations
    wrong = _ranks_that_compute_otherwise(c, evidence, [gradient for gradient, _ in alone])
    excused = set()
    if 0 < len(wrong) < len(traced):
        # What ranks with the right gradient do otherwise, too, is not what makes it wrong.
        for rank in traced.keys() - set(wrong):
            excused |= difference_keys(*traced[rank])
    ranks = wrong if excused else list(traced)
    found = {
        rank: first_operation(*traced[rank], excused=excused) or first_operation(*traced[rank])
        for rank in ranks
    }
    first_of_all = earliest(found)
    if first_of_all is not None:
        rank, c.differing = first_of_all
        return f"the first operation that differs, on rank {rank}: {c.differing.text}"
    return (
        "no operation of a rank differs from those of one process on its samples: ranks part where"
        " their gradients are combined"
    )


def _first_operation_of_stages(
    c: ScriptComparison, first: Difference, records: Sequence[ScriptRecord], alone: ScriptRecord
) -> str:
    """Return the first operation that differs on ranks with other layers of one model.

    Layers that are cut compute other values on each rank: nothing is compared then.
    """
    steps = [record.steps[first.step : first.step + 1] for record in (*records, alone)]
    pieces = [piece for record in records for piece in record.first.values()]
    if not all(steps) or c.world.joined or any(piece.cuts or piece.flat for piece in pieces):
        return ""
    right = steps[-1][0].operations
    for rank, (step,) in enumerate(steps[:-1]):
        found = first_operation_of_part(step.operations, right)
        if found is not None:
            c.differing = found
            c.rank_that_differs = rank
            return f"the first operation that differs, on rank {rank}: {found.text}"
    return ""


def _ranks_that_compute_otherwise(
    c: ScriptComparison, evidence: GradientEvidence, alone: Sequence[Values]
) -> list[int]:
    """Return the ranks whose own gradient is not that of one process on their samples."""
    pairs = zip(c.world.units, evidence.own, alone, strict=False)
    return [unit[0] for unit, mine, right in pairs if not gradients.is_same(mine, right)]


def explain(c: ScriptComparison, first: Difference, reference: ScriptRecord) -> None:
    """Add the first operation that differs, and the causes of the first difference."""
    outcome = c.outcome
    if first.aspect == "gradients":
        evidence = _evidence(c, first.step, reference)
        outcome.locate(_first_operation(c, first, evidence))
    framework = c.outcome.framework
    aspect = first.aspect
    first.name_without_clipping()
    if aspect == "weights" and any(one.column == "settings" for one in outcome.causes):
        own = [record.steps[first.step].settings for record in c.records]
        if any(other != own[0] for other in own):
            return  # one process steps with rank 0's settings
    found = replicas_cause(c.world, first.step)
    if found is None and aspect == "clipped gradients":
        text = "the gradients are equal before they are clipped, and differ afterwards"
        by = "gradients when clipping began, and when the optimizer stepped"
        found = script_cause("clipping", text, by, framework)
    elif found is None and aspect == "gradients":
        causes = _gradient_causes(c, first, evidence)
        if causes:
            outcome.causes.extend(causes)
            return
    if found is None:
        text = "none was shown; one process has the ranks' samples, first values and settings"
        found = Cause(UNKNOWN, text, ["comparison with one process"])
    outcome.causes.append(found)


def _gradient_causes(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> list[Cause]:
    """Return why the gradients of ranks differ: how they were added, or what was."""
    found = _hook_cause(c, first, evidence)
    if found is not None:
        return [found]
    found = _early_clipping_cause(c, first, evidence)
    if found is not None:
        return [found]
    if not evidence.own:
        found = _statistics_cause(c, first) or gradients.shared_cause(evidence)
        found = found or _stage_cause(c)
        return [] if found is None else [found]
    found = reduction_cause(evidence)
    if found is not None:
        same = distance(mean_of(evidence.own), evidence.reference) < CEILING / NUDGES
        weighed = None if same else gradients.weighing_cause(evidence)
        return [found] if weighed is None else [found, weighed]
    found = gradients.weighing_cause(evidence) or _statistics_cause(c, first)
    if found is None or found.kind == NORMALISATION:
        # Weights of ranks may look like unequal counts: then one process on a rank's samples has
        # that rank's gradient.
        found = _computation_cause(c, first, evidence) or found
    if found is None:
        found = _coupling_cause(c, first, evidence) or _micro_batch_cause(c, first, evidence)
    return [] if found is None else [found]


def _hook_cause(c: ScriptComparison, first: Difference, evidence: GradientEvidence) -> Cause | None:
    """Return the cause if ranks without the script's own communication hook are right."""
    names = sorted(
        {name for record in c.records for name, of_torch in record.hooks if not of_torch}
    )
    if not names:
        return None
    undone = {key: c.given[key] for key in _UNDONE if key in c.given} | {"plain_reduction": True}
    _, records = c.runs.world(c.ranks, f"without {listed(names)}", **undone)
    if any(len(record.steps) <= first.step for record in records):
        return None
    plain = c.gradients(first.step, World(records, c.joined))
    if any(distance(mine, evidence.reference) > CEILING / NUDGES for mine in plain):
        return None
    text = (
        f"the communication hook {listed(names)} makes another gradient of the ranks' own than"
        " their mean"
    )
    by = "ranks whose DistributedDataParallel has no hook have the gradient of one process"
    return script_cause("communication hook", text, by, evidence.framework)


def _early_clipping_cause(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if ranks clip gradients of their own, whose mean they step with.

    Until they are clipped, these have the mean that one process has.
    """
    if not all(record.steps[first.step].unclipped for record in c.records):
        return None
    when_clipped = evidence.ranks
    used = c.gradients(first.step, c.world, clipped=True)
    if all(gradients.is_same(other, when_clipped[0]) for other in when_clipped[1:]):
        return None
    if not all(gradients.is_same(other, used[0]) for other in used[1:]):
        return None
    if distance(mean_of(when_clipped), evidence.reference) > CEILING / NUDGES:
        return None
    text = (
        "each rank clips its own gradient, by a norm of its own, before the gradients are averaged:"
        " a norm of a mean is not the mean of norms"
    )
    by = "the mean of the ranks' gradients when clipping begins is the gradient of one process"
    return script_cause("clipping", text, by, evidence.framework)


def _evidence(c: ScriptComparison, number: int, reference: ScriptRecord) -> GradientEvidence:
    """Return a step's gradients: of the ranks, of one process, of each unit's samples alone."""
    units = [unit[0] for unit in c.world.units]
    mine = c.gradients(number, c.world)
    own = []
    # A parameter whose gradient some ranks have is not used by the others.
    seen = {name for record in c.records for name in record.steps[number].own}
    if seen >= set(c.sizes) and all(record.steps[number].own for record in c.records):
        # A rank that shares a model with others holds its own part of it.
        tensors = c.world.tensors([record.steps[number].own for record in c.records])
        own = [vector(tensors[rank], c.sizes) for rank in units] if len(units) == c.ranks else []
    elif len(units) > 1 and c.can_take_parts():
        own = _own_by_losses(c, number, c.alone_on_each(number), mine)
    right = c.gradients(number, World([reference]))[0]
    ranks = [mine[rank] for rank in units] if own else mine
    return GradientEvidence(c.sizes, ranks, right, own, c.outcome.framework)


def _own_by_losses(
    c: ScriptComparison,
    number: int,
    alone: Sequence[tuple[Values, ScriptRecord]],
    mine: Sequence[Values],
) -> list[Values]:
    """Return the gradient of each unit's own samples, where hooks do not see it (FSDP).

    It is that of one process on these samples, times the rank's loss over that of the process: a
    rank may divide by a count of all ranks. Empty if that does not make the ranks' gradient.
    """
    own = []
    is_scaled = False
    for unit, (gradient, record) in zip(c.world.units, alone, strict=True):
        there = np.array(c.records[unit[0]].steps[number].losses)
        here = np.array(record.steps[number].losses)
        if not there.any() and not here.any():  # a pipeline's are not seen
            own.append(gradient)
            continue
        if there.shape != here.shape or not here.all():
            return []
        ratios = there / here
        if np.ptp(ratios) > gradients.EXACT * abs(ratios[0]):
            return []
        times = float(ratios[0])
        if abs(times - 1) > gradients.EXACT:
            is_scaled = True
            gradient = gradient * times
        own.append(gradient)
    if is_scaled and not all(gradients.is_same(one, mean_of(own)) for one in mine):
        return []
    return own


def _computation_cause(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    if not c.can_take_parts() or len(c.world.units) == 1:
        return None
    alone = c.alone_on_each(first.step)
    parts = [gradient for gradient, _ in alone]
    records = [record for _, record in alone]
    return gradients.computation_cause(evidence, parts, c.world.leaders, records, first.step)


def _stage_cause(c: ScriptComparison) -> Cause | None:
    """Return the cause if a rank with a part of the layers computes otherwise than one process."""
    if c.differing is None or len(c.world.units) > 1:
        return None
    text = (
        f"rank {c.rank_that_differs} computes its layers with other values than one process that"
        f" has all layers and the same samples: {c.differing.text}"
    )
    by = "each operation of the ranks' layers, and of one process"
    return script_cause("computation of a rank", text, by, c.outcome.framework)


def _coupling_cause(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    # Batches that are accumulated are judged one by one.
    has_several = sum(map(bool, c.records[0].steps[first.step].read)) > 1
    if not c.can_take_parts() or len(c.world.units) == 1 or has_several:
        return None
    alone = c.alone_on_each(first.step)
    found = gradients.coupling_cause(evidence, [gradient for gradient, _ in alone])
    if found is not None:
        found.place_at(_line_that_couples(c, first.step, [record for _, record in alone]))
    return found


def _line_that_couples(c: ScriptComparison, number: int, alone: Sequence[ScriptRecord]) -> str:
    """Return the line at which samples of a batch begin to depend on each other; or empty."""
    parts = [record.steps[number].operations for record in alone]
    if not all(parts):
        return ""
    try:
        (full,) = c.alone("with each operation traced", [c.feed], traced=True, steps=number + 1)
    except LockstepError:  # what is compiled may not be traced
        return ""
    return line_that_couples(full.steps[number].operations, parts) if full.steps[number:] else ""


def _micro_batch_cause(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Judge micro-batches one by one: each may weigh its ranks otherwise."""
    at = step_batches(c.records[0], first.step)
    units = c.world.units
    if (
        at is None
        or not c.can_take_parts()
        or len(at[1]) == 1
        or len(units) * len(at[1]) > MOST_PARTS
    ):
        return None
    micro_batches = c.parts(first.step, at, [[c.feed[at[0], i]] * len(at[1]) for i in at[1]])
    given = [[[(unit[0], i)]] * len(at[1]) for i in at[1] for unit in units]
    every = [gradient for gradient, _ in c.parts(first.step, at, given)]
    for number, (right, _) in enumerate(micro_batches):
        parts = every[number * len(units) : (number + 1) * len(units)]
        found = gradients.weighing_cause(
            GradientEvidence(c.sizes, parts, right, parts, evidence.framework)
        )
        if found is not None:
            return found
    return None


def _statistics_cause(c: ScriptComparison, first: Difference) -> Cause | None:
    """Return the cause if the gradients agree where batch normalisation uses running statistics."""
    if not any(record.normalises for record in c.records):
        return None
    undone = {key: c.given[key] for key in _UNDONE if key in c.given}
    folder, records = c.runs.world(
        c.ranks, "with running statistics", fixed_statistics=True, **undone
    )
    if any(len(record.steps) <= first.step for record in records):
        return None
    world = World(records, c.joined)
    feed = united(world, shared=is_cut_by_script(world))
    reference = c.alone("with running statistics", [feed], fixed_statistics=True, samples=folder)[0]
    right = c.gradients(first.step, World([reference]))[0]
    if any(distance(mine, right) > ROUNDING * 50 for mine in c.gradients(first.step, world)):
        return None
    text = (
        "batch normalisation uses the mean and variance of each rank's samples, and not of all"
        " samples of the step"
    )
    by = "with running statistics on both sides, the gradients are equal"
    return script_cause("batch statistics", text, by, c.outcome.framework, is_error=False)


def check_accumulation(c: ScriptComparison, reference: ScriptRecord) -> None:
    """Compare one process's first step with that of its samples in one batch."""
    at = step_batches(c.records[0], 0)
    if at is None or not c.feed or c.in_turn or len(at[1]) > MOST_PARTS:
        return
    loader, batches = at
    together = [pair for i in batches for pair in c.feed[loader, i]]
    c.size(reference.steps[0])
    given = [
        [samples] * len(batches) for samples in (together, *(c.feed[loader, i] for i in batches))
    ]
    (full_batch, _), *micro_batches = c.parts(0, at, given)
    parts = [gradient for gradient, _ in micro_batches]
    step = c.gradients(0, World([reference]))[0]
    if distance(step, full_batch) > CEILING / NUDGES:
        found = gradients.accumulation_cause(step, full_batch, parts, c.outcome.framework)
        if found is not None:
            c.outcome.causes.append(found)
