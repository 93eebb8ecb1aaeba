"""Explains the first difference between a script's ranks and one process.

A cause is named by what undoes the difference, or makes it: the ranks are run again without a hook,
with running statistics, or with each operation traced, and one process on the samples of each rank.

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lockstep.errors import LockstepError, listed
from lockstep.verify.algebra import CEILING, Values, distance, mean_of
from lockstep.verify.comparison_result import UNKNOWN, Cause, Difference
from lockstep.verify.script.causes import gradients
from lockstep.verify.script.comparison import MOST_PARTS, NUDGES, ROUNDING, ScriptComparison
from lockstep.verify.script.causes.fixes import NORMALISATION, script_cause
from lockstep.verify.script.causes.gradients import GradientEvidence, vector
from lockstep.verify.script.causes.operations import (
    FORWARD,
    TracedOperation,
    difference_keys,
    earliest,
    first_cut,
    first_operation,
    first_operation_of_part,
    line_that_couples,
    line_that_passes_on,
)
from lockstep.verify.script.causes.ranks import replicas_apart, replicas_cause
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.causes.reduction import reduction_cause
from lockstep.verify.script.runs import step_batches, united
from lockstep.verify.script.causes.samples_of_ranks import is_cut_by_script
from lockstep.verify.script.world import World


def explain(c: ScriptComparison, first: Difference, reference: ScriptRecord) -> None:
    """Add the first operation that differs, and the causes of the first difference."""
    aspect = first.aspect  # before it is named without clipping
    evidence = None
    if aspect == "gradients":
        evidence = _evidence(c, first.step, reference)
        c.repeat_parts(first.step, evidence.reference)
        c.outcome.locate(_first_operation(c, first, evidence))
    first.name_without_clipping()
    if aspect == "weights" and _settings_explain_it(c, first.step):
        return
    c.outcome.causes.extend(_causes(c, first, aspect, evidence, reference))


def _causes(
    c: ScriptComparison,
    first: Difference,
    aspect: str,
    evidence: GradientEvidence | None,
    reference: ScriptRecord,
) -> list[Cause]:
    """Return the causes of the first difference; one of the kind `UNKNOWN` if none is shown."""
    replicas = replicas_cause(c.world, first.step)
    if replicas is not None:
        return [replicas]
    if aspect == "clipped gradients":
        text = "the gradients are equal before they are clipped, and differ afterwards"
        by = "gradients when clipping began, and when the optimizer stepped"
        return [script_cause("clipping", text, by, c.outcome.framework)]
    causes = [] if evidence is None else _gradient_causes(c, first, evidence, reference)
    if causes or c.outcome.not_judged:
        return causes
    used = c.gradients(first.step, c.world, clipped=True)
    are_apart = any(not gradients.is_same(mine, used[0]) for mine in used[1:])
    causes = replicas_apart(c.world, first.step + 1) if are_apart else []
    if causes:
        causes[0].place_at("" if c.differing is None else c.differing.line)
        return causes
    text = "none was shown; one process has the ranks' samples, first values and settings"
    return [Cause(UNKNOWN, text, ["comparison with one process"])]


def _settings_explain_it(c: ScriptComparison, number: int) -> bool:
    """Return whether ranks step with other settings than rank 0, which one process has."""
    if not any(cause.column == "settings" for cause in c.outcome.causes):
        return False
    settings = [record.steps[number].settings for record in c.records]
    return any(of_rank != settings[0] for of_rank in settings)


def _first_operation(c: ScriptComparison, first: Difference, evidence: GradientEvidence) -> str:
    """Return the first operation of a step that differs on a rank from one process on its samples.

    Empty if that can't be told.
    """
    if not c.can_take_parts():
        return ""
    try:
        _, records = c.rerun(
            "with each operation traced", first.step, traced=True, traced_whole=not c.feed
        )
    except LockstepError:  # what is compiled may not be traced
        return ""
    c.note_traced(records)
    alone = c.alone_on_each(first.step)
    share_a_model = len(c.world.units) == 1 < c.ranks
    if share_a_model:
        return _first_operation_of_stages(c, first, records, alone[0][1])
    # rank → its operations, and those of one process on its samples
    traced: dict[int, tuple[list[TracedOperation], list[TracedOperation]]] = {}
    for unit, (_, process) in zip(c.world.units, alone, strict=True):
        rank = unit[0]
        if min(len(records[rank].steps), len(process.steps)) <= first.step:
            return ""
        operations = records[rank].steps[first.step].operations
        right_operations = process.steps[first.step].operations
        if not operations or not right_operations:
            return ""
        traced[rank] = operations, right_operations

    wrong = _ranks_that_compute_otherwise(c, evidence, [gradient for gradient, _ in alone])
    excused = set()
    if 0 < len(wrong) < len(traced):
        # What ranks with the right gradient do otherwise, too, is not what makes it wrong.
        for rank in traced.keys() - set(wrong):
            excused |= difference_keys(*traced[rank])
    first_of_rank = {
        rank: first_operation(*traced[rank], excused=excused) or first_operation(*traced[rank])
        for rank in (wrong if excused else list(traced))
    }
    for rank in wrong:
        difference = first_of_rank.get(rank)
        if difference is None or difference.is_backward:
            first_of_rank[rank] = first_cut(*traced[rank]) or difference
    first_of_all = earliest(first_of_rank)
    if first_of_all is not None:
        rank, difference = first_of_all
        c.note_operation(rank, difference)
        return f"the first operation that differs, on rank {rank}: {difference.text}"
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
        difference = first_operation_of_part(step.operations, right)
        if difference is not None:
            c.note_operation(rank, difference)
            return f"the first operation that differs, on rank {rank}: {difference.text}"
    return ""


def _ranks_that_compute_otherwise(
    c: ScriptComparison, evidence: GradientEvidence, alone: Sequence[Values]
) -> list[int]:
    """Return the ranks whose own gradient is not that of one process on their samples."""
    pairs = zip(c.world.units, evidence.own, alone, strict=False)
    return [unit[0] for unit, mine, right in pairs if not gradients.is_same(mine, right)]


def _gradient_causes(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence, reference: ScriptRecord
) -> list[Cause]:
    """Return why the gradients of ranks differ: how they were added, or what was."""
    cause = (
        _shards_cause(c, first, evidence)
        or _hook_cause(c, first, evidence)
        or _early_clipping_cause(c, first, evidence)
    )
    if cause is not None:
        return [cause]
    if not evidence.own:
        cause = (
            _statistics_cause(c, first)
            or _output_cause(c, first.step, reference)
            or gradients.shared_cause(evidence)
            or _stage_cause(c)
            or _loss_cause(c, first.step, reference)
        )
        return [] if cause is None else [cause]
    cause = reduction_cause(evidence)
    if cause is not None:
        is_mean_right = distance(mean_of(evidence.own), evidence.reference) < CEILING / NUDGES
        weighing = None if is_mean_right else gradients.weighing_cause(evidence)
        return [cause] if weighing is None else [cause, weighing]
    cause = gradients.weighing_cause(evidence) or _statistics_cause(c, first)
    if cause is not None and cause.kind == gradients.COMPUTATION and c.can_take_parts():
        # A rank that weighs its samples otherwise may do so on one process, too.
        alone = [gradient for gradient, _ in c.alone_on_each(first.step)]
        cause = gradients.own_count_cause(evidence, alone) or cause
    elif cause is None or cause.kind == NORMALISATION:
        # Weights of ranks may look like unequal counts: then one process on a rank's samples has
        # that rank's gradient.
        cause = _computation_cause(c, first, evidence) or cause
    if cause is None:
        cause = _coupling_cause(c, first, evidence) or _micro_batch_cause(c, first, evidence)
    return [] if cause is None else [cause]


def _shards_cause(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if each rank has scaled the shards that it holds by a factor of its own."""
    steps = [record.steps[first.step] for record in c.records]
    pieces = [piece for step in steps for piece in step.gradients.values()]
    if len(c.world.units) != c.ranks or not any(piece.cuts or piece.flat for piece in pieces):
        return None
    ranks_of_elements = [
        {
            name: replace(piece, local=torch.full_like(piece.local, rank))
            for name, piece in step.gradients.items()
        }
        for rank, step in enumerate(steps)
    ]
    owner = vector(c.world.tensors(ranks_of_elements)[0], c.sizes)
    mine = c.gradients(first.step, c.world)[0]
    return gradients.shards_cause(mine, owner, c.ranks, evidence)


def _hook_cause(c: ScriptComparison, first: Difference, evidence: GradientEvidence) -> Cause | None:
    """Return the cause if ranks without the script's own communication hook are right."""
    names = sorted(
        {name for record in c.records for name, of_torch in record.hooks if not of_torch}
    )
    if not names:
        return None
    _, records = c.rerun(f"without {listed(names)}", first.step, plain_reduction=True)
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
    names = {name for record in c.records for name in record.steps[number].own}
    if names >= set(c.sizes) and all(record.steps[number].own for record in c.records):
        # A rank that shares a model with others holds its own part of it.
        tensors = c.world.tensors([record.steps[number].own for record in c.records])
        own = [vector(tensors[rank], c.sizes) for rank in units] if len(units) == c.ranks else []
    elif len(units) > 1 and c.can_take_parts():
        own = _own_by_losses(c, number, c.alone_on_each(number), mine)
    right = c.gradients(number, World([reference]))[0]
    of_process = World([reference]).tensors([reference.steps[number].own])[0]
    if own and of_process:
        own = gradients.unscaled(own, vector(of_process, c.sizes), right)
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
        of_rank = np.array(c.records[unit[0]].steps[number].losses)
        of_process = np.array(record.steps[number].losses)
        if not of_rank.any() and not of_process.any():  # a pipeline's are not seen
            own.append(gradient)
            continue
        if of_rank.shape != of_process.shape or not of_process.all():
            return []
        ratios = of_rank / of_process
        if np.ptp(ratios) > gradients.EXACT * abs(ratios[0]):
            return []
        times = float(ratios[0])
        if abs(times - 1) > gradients.EXACT:
            is_scaled = True
            gradient = gradient * times
        own.append(gradient)
    if is_scaled and not all(gradients.is_same(of_rank, mean_of(own)) for of_rank in mine):
        return []
    return own


def _computation_cause(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if a rank computes another gradient than one process on its samples.

    Without a loader the outcome is left open where the rank may have read other samples.
    """
    if not c.can_take_parts() or len(c.world.units) == 1:
        return None
    alone = c.alone_on_each(first.step)
    parts = [gradient for gradient, _ in alone]
    records = [record for _, record in alone]
    cause = gradients.computation_cause(evidence, parts, c.world.leaders, records, first.step)
    if cause is not None and not c.feed and (c.differing is None or c.differing.is_of_data):
        where = "" if c.differing is None else f": {c.differing.text}"
        c.outcome.leave_open(
            "the loop reads without a loader, and one process for each rank has its inputs, but not"
            f" for certain all else that the rank has read{where}"
        )
        return None
    return cause


def _output_cause(c: ScriptComparison, number: int, reference: ScriptRecord) -> Cause | None:
    """Return the cause if ranks that cut layers have another output of a module than one process.

    Only outputs that all of them have alike are compared, as those that they have added up.
    """
    if len(c.world.units) > 1 or c.ranks == 1:
        return None
    right, *ranks = [record.steps[number].flow for record in (reference, *c.records)]
    module = gradients.first_output_of_all(ranks, right)
    if module is None:
        return None
    text = (
        f"ranks that share the model have another output of {module or 'the model'} than one"
        " process with the same samples, and all of them the same"
    )
    by = "the outputs of each module, on the ranks and in one process"
    cause = script_cause(gradients.COMPUTATION, text, by, c.outcome.framework)
    cause.place_at(_last_line_of(c, number, module))
    return replace(cause, module=module or "the model")


def _last_line_of(c: ScriptComparison, number: int, module: str) -> str:
    """Return the user's own line of a module's last operation in a traced step; or empty."""
    operations = c.traced[0].steps[number].operations if c.traced else []
    lines = [each.own for each in operations if each.module == module and each.phase == FORWARD]
    return next(filter(None, reversed(lines)), "")


def _stage_cause(c: ScriptComparison) -> Cause | None:
    """Return the cause if a rank with a part of the layers computes otherwise than one process."""
    if c.differing is None or len(c.world.units) > 1:
        return None
    text = (
        f"rank {c.rank_that_differs} computes its layers with other values than one process that"
        f" has all layers and the same samples: {c.differing.text}"
    )
    by = "each operation of the ranks' layers, and of one process"
    return script_cause(gradients.COMPUTATION, text, by, c.outcome.framework)


def _loss_cause(c: ScriptComparison, number: int, reference: ScriptRecord) -> Cause | None:
    """Return the cause if ranks that share the model compute another loss than one process.

    A rank that computes a part of the loss, as of its part of a sequence, has one that adds up.
    """
    if len(c.world.units) > 1 or c.ranks == 1:
        return None
    right = sum(reference.steps[number].losses)
    ranks = [sum(record.steps[number].losses) for record in c.records]
    is_seen = all(ranks) and bool(right)
    parts = (sum(ranks), sum(ranks) / c.ranks, *ranks)
    if not is_seen or any(abs(part - right) <= ROUNDING * abs(right) for part in parts):
        return None
    losses = listed([f"{loss:.6g}" for loss in ranks])
    text = (
        f"ranks that share the model have the losses {losses}, and one process with the same"
        f" samples has {right:.6g}"
    )
    by = "what each backward pass starts from, on the ranks and in one process"
    cause = script_cause(gradients.COMPUTATION, text, by, c.outcome.framework)
    cause.place_at(c.traced[0].steps[number].loss_line if c.traced else "")
    return cause


def _coupling_cause(
    c: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if the loss of all samples is not a mean of the losses of ranks' parts."""
    # Batches that are accumulated are judged one by one.
    accumulates = _accumulates(c.records[0], first.step)
    if not c.can_take_parts() or len(c.world.units) == 1 or accumulates:
        return None
    alone = c.alone_on_each(first.step)
    cause = gradients.coupling_cause(evidence, [gradient for gradient, _ in alone])
    if cause is not None:
        line = _line_that_couples(c, first.step, [record for _, record in alone])
        steps = c.traced[0].steps[first.step :] if c.traced else []
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
    """Judge micro-batches one by one: each may weigh its ranks otherwise.

    One process is given a micro-batch of all ranks in place of each micro-batch of the step, and
    then those of one rank: of 2 micro-batches and 3 ranks it takes 2 + 6 such steps.
    """
    trained = step_batches(c.records[0], first.step)
    units = c.world.units
    if trained is None or not c.can_take_parts():
        return None
    count = len(trained.indices)
    if count == 1 or len(units) * count > MOST_PARTS:
        return None
    feeds_of_all = [[c.feed[trained.loader, index]] * count for index in trained.indices]
    of_all = c.parts(first.step, trained, feeds_of_all)
    feeds_of_units = [[[(unit[0], index)]] * count for index in trained.indices for unit in units]
    of_units = [gradient for gradient, _ in c.parts(first.step, trained, feeds_of_units)]
    for number, (right, _) in enumerate(of_all):
        parts = of_units[number * len(units) : (number + 1) * len(units)]
        of_micro_batch = GradientEvidence(c.sizes, parts, right, parts, evidence.framework)
        cause = gradients.weighing_cause(of_micro_batch)
        if cause is not None:
            return cause
    return None


def _statistics_cause(c: ScriptComparison, first: Difference) -> Cause | None:
    """Return the cause if the gradients agree where batch normalisation uses running statistics."""
    if c.each_alone or not any(record.normalises for record in c.records):
        return None
    what = "with running statistics"
    folder, records = c.rerun(what, first.step, fixed_statistics=True)
    if any(len(record.steps) <= first.step for record in records):
        return None
    world = World(records, c.joined)
    feed = united(world, shared=is_cut_by_script(world))
    given = replace(c.given, samples=folder)
    steps = first.step + 1
    reference = c.alone(what, [feed], given=given, steps=steps, fixed_statistics=True)[0]
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
    trained = step_batches(c.records[0], 0)
    if trained is None or not c.feed or c.in_turn or len(trained.indices) > MOST_PARTS:
        return
    c.size(reference.steps[0])
    batches = [c.feed[trained.loader, index] for index in trained.indices]
    together = [sample for batch in batches for sample in batch]
    feeds = [[samples] * len(batches) for samples in (together, *batches)]
    (full_batch, _), *micro_batches = c.parts(0, trained, feeds)
    parts = [gradient for gradient, _ in micro_batches]
    step = c.gradients(0, World([reference]))[0]
    if distance(step, full_batch) > CEILING / NUDGES:
        cause = gradients.accumulation_cause(step, full_batch, parts, c.outcome.framework)
        if cause is not None:
            c.outcome.causes.append(cause)
