"""Tries causes of another gradient: the ranks, or one process, run once more without one of them.

    try_hook               the ranks without the script's own communication hook
    try_statistics         both with running statistics
    try_computation        one process on each rank's samples alone
    try_coupling           the mean of these, beside the gradient of all samples together
    try_micro_batches      one process on each micro-batch of the step, and of each rank
    try_accumulation       one process on the step's samples in one batch

What is compared then, `gradients.py` puts into words. Two causes show without a run:
`try_shards` and `try_early_clipping`.

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from lockstep.errors import LockstepError, listed
from lockstep.verify.algebra import CEILING, distance, mean_of
from lockstep.verify.comparison_result import Cause, Difference
from lockstep.verify.script.causes import gradients
from lockstep.verify.script.causes.evidence import GradientEvidence
from lockstep.verify.script.causes.fixes import script_cause
from lockstep.verify.script.causes.operations import line_that_couples, line_that_passes_on
from lockstep.verify.script.causes.samples_of_ranks import is_cut_by_script
from lockstep.verify.script.comparison import MOST_PARTS, NUDGES, ROUNDING, ScriptComparison
from lockstep.verify.script.feeds import step_batches, united
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.vectors import is_same, vector
from lockstep.verify.script.world import World


def try_shards(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if each rank has scaled the shards that it holds by a factor of its own."""
    steps = [record.steps[first.step] for record in comparison.records]
    pieces = [piece for step in steps for piece in step.gradients.values()]
    if len(comparison.world.units) != comparison.ranks or not any(
        piece.cuts or piece.flat for piece in pieces
    ):
        return None
    ranks_of_elements = [
        {
            name: replace(piece, local=torch.full_like(piece.local, rank))
            for name, piece in step.gradients.items()
        }
        for rank, step in enumerate(steps)
    ]
    owner = vector(comparison.world.tensors(ranks_of_elements)[0], comparison.sizes)
    mine = comparison.gradients(first.step, comparison.world)[0]
    return gradients.shards_cause(mine, owner, comparison.ranks, evidence)


def try_hook(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if ranks without the script's own communication hook are right."""
    names = sorted(
        {name for record in comparison.records for name, of_torch in record.hooks if not of_torch}
    )
    if not names:
        return None
    _, records = comparison.rerun(f"without {listed(names)}", first.step, plain_reduction=True)
    if any(len(record.steps) <= first.step for record in records):
        return None
    plain = comparison.gradients(first.step, World(records, comparison.joined))
    if any(distance(mine, evidence.reference) > CEILING / NUDGES for mine in plain):
        return None
    text = (
        f"the communication hook {listed(names)} makes another gradient of the ranks' own than"
        " their mean"
    )
    by = "ranks whose DistributedDataParallel has no hook have the gradient of one process"
    return script_cause("communication hook", text, by, evidence.framework)


def try_early_clipping(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if ranks clip gradients of their own, whose mean they step with.

    Until they are clipped, these have the mean that one process has.
    """
    if not all(record.steps[first.step].unclipped for record in comparison.records):
        return None
    when_clipped = evidence.ranks
    used = comparison.gradients(first.step, comparison.world, clipped=True)
    if all(is_same(other, when_clipped[0]) for other in when_clipped[1:]):
        return None
    if not all(is_same(other, used[0]) for other in used[1:]):
        return None
    if distance(mean_of(when_clipped), evidence.reference) > CEILING / NUDGES:
        return None
    text = (
        "each rank clips its own gradient, by a norm of its own, before the gradients are averaged:"
        " a norm of a mean is not the mean of norms"
    )
    by = "the mean of the ranks' gradients when clipping begins is the gradient of one process"
    return script_cause("clipping", text, by, evidence.framework)


def try_statistics(comparison: ScriptComparison, first: Difference) -> Cause | None:
    """Return the cause if the gradients agree where batch normalisation uses running statistics."""
    if comparison.each_alone or not any(record.normalises for record in comparison.records):
        return None
    what = "with running statistics"
    folder, records = comparison.rerun(what, first.step, fixed_statistics=True)
    if any(len(record.steps) <= first.step for record in records):
        return None
    world = World(records, comparison.joined)
    feed = united(world, shared=is_cut_by_script(world))
    given = replace(comparison.given, samples=folder)
    steps = first.step + 1
    reference = comparison.alone(what, [feed], given=given, steps=steps, fixed_statistics=True)[0]
    right = comparison.gradients(first.step, World([reference]))[0]
    if any(
        distance(mine, right) > ROUNDING * 50 for mine in comparison.gradients(first.step, world)
    ):
        return None
    text = (
        "batch normalisation uses the mean and variance of each rank's samples, and not of all"
        " samples of the step"
    )
    by = "with running statistics on both sides, the gradients are equal"
    return script_cause("batch statistics", text, by, comparison.outcome.framework, is_error=False)


def try_computation(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if a rank computes another gradient from its samples than one process.

    None, too, where it may have read other samples: then the outcome is left open.
    """
    if not comparison.can_take_parts() or len(comparison.world.units) == 1:
        return None
    alone = comparison.alone_on_each(first.step)
    parts = [gradient for gradient, _ in alone]
    records = [record for _, record in alone]
    cause = gradients.computation_cause(
        evidence, parts, comparison.world.leaders, records, first.step
    )
    if (
        cause is not None
        and not comparison.feed
        and (comparison.differing is None or comparison.differing.is_of_data)
    ):
        where = "" if comparison.differing is None else f": {comparison.differing.text}"
        comparison.outcome.leave_open(
            "the loop reads without a loader, and one process for each rank has its inputs, but not"
            f" for certain all else that the rank has read{where}"
        )
        return None
    return cause


def try_coupling(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if the loss of all samples is not a mean of the losses of ranks' parts."""
    # Batches that are accumulated are judged one by one.
    accumulates = _accumulates(comparison.records[0], first.step)
    if not comparison.can_take_parts() or len(comparison.world.units) == 1 or accumulates:
        return None
    alone = comparison.alone_on_each(first.step)
    cause = gradients.coupling_cause(evidence, [gradient for gradient, _ in alone])
    if cause is not None:
        line = _line_that_couples(comparison, first.step, [record for _, record in alone])
        steps = comparison.traced[0].steps[first.step :] if comparison.traced else []
        # A function that ranks call to exchange tensors may hand on those that it is given.
        passed_on = line_that_passes_on(steps[0].operations, line) if steps else ""
        cause.place_at(passed_on or line)
    return cause


def _accumulates(record: ScriptRecord, number: int) -> bool:
    """Return whether a step has several backward passes over several batches of a loader.

    All of the batches may be read before the first pass.
    """
    passes = record.steps[number].read
    batches_read = Counter(loader for batches in passes for loader, _ in batches)
    return len(passes) > 1 and max(batches_read.values(), default=0) > 1


def _line_that_couples(
    comparison: ScriptComparison, number: int, alone: Sequence[ScriptRecord]
) -> str:
    """Return the line at which samples of a batch begin to depend on each other; or empty."""
    parts = [record.steps[number].operations for record in alone]
    if not all(parts):
        return ""
    try:
        (full,) = comparison.alone(
            "with each operation traced", [comparison.feed], traced=True, steps=number + 1
        )
    except LockstepError:  # what is compiled may not be traced
        return ""
    return line_that_couples(full.steps[number].operations, parts) if full.steps[number:] else ""


def try_micro_batches(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Judge micro-batches one by one: each may weigh its ranks otherwise.

    One process is given a micro-batch of all ranks in place of each micro-batch of the step, and
    then those of one rank: of 2 micro-batches and 3 ranks it takes 2 + 6 such steps.
    """
    trained = step_batches(comparison.records[0], first.step)
    units = comparison.world.units
    if trained is None or not comparison.can_take_parts():
        return None
    count = len(trained.indices)
    if count == 1 or len(units) * count > MOST_PARTS:
        return None
    feeds_of_all = [[comparison.feed[trained.loader, index]] * count for index in trained.indices]
    of_all = comparison.parts(first.step, trained, feeds_of_all)
    feeds_of_units = [[[(unit[0], index)]] * count for index in trained.indices for unit in units]
    of_units = [gradient for gradient, _ in comparison.parts(first.step, trained, feeds_of_units)]
    for number, (right, _) in enumerate(of_all):
        parts = of_units[number * len(units) : (number + 1) * len(units)]
        of_micro_batch = GradientEvidence(comparison.sizes, parts, right, parts, evidence.framework)
        cause = gradients.weighing_cause(of_micro_batch)
        if cause is not None:
            return cause
    return None


def try_accumulation(comparison: ScriptComparison, reference: ScriptRecord) -> Cause | None:
    """Return the cause if one process's first step is not that of its samples in one batch."""
    trained = step_batches(comparison.records[0], 0)
    if (
        trained is None
        or not comparison.feed
        or comparison.in_turn
        or len(trained.indices) > MOST_PARTS
    ):
        return None
    comparison.size(reference.steps[0])
    batches = [comparison.feed[trained.loader, index] for index in trained.indices]
    together = [sample for batch in batches for sample in batch]
    feeds = [[samples] * len(batches) for samples in (together, *batches)]
    (full_batch, _), *micro_batches = comparison.parts(0, trained, feeds)
    parts = [gradient for gradient, _ in micro_batches]
    step = comparison.gradients(0, World([reference]))[0]
    if distance(step, full_batch) <= CEILING / NUDGES:
        return None
    return gradients.accumulation_cause(step, full_batch, parts, comparison.outcome.framework)
