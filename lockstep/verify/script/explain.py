"""Explains the first difference between ranks and one process: what undoes it, or makes it, names its cause."""

from typing import Any

from lockstep.verify.script.comparison import CEILING, MOST_PARTS, NUDGES, ROUNDING, ScriptComparison
from lockstep.verify.script.gradients import (
    GradientEvidence,
    accumulation_cause,
    computation_cause,
    coupling_cause,
    reduction_cause,
    relative,
    shared_cause,
    vector,
    weighing_cause,
)
from lockstep.verify.script.outcome import UNKNOWN, ScriptCause, ScriptDifference, cause
from lockstep.verify.script.ranks import is_cut_by_script, replicas_cause
from lockstep.verify.script.record import ScriptRecord, World
from lockstep.verify.script.runs import step_batches, united


def explain(c: ScriptComparison, first: ScriptDifference, reference: ScriptRecord) -> None:
    """Add the causes of the first difference."""
    outcome, framework = c.outcome, c.outcome.framework
    aspect, first.aspect = first.aspect, first.aspect.removeprefix("clipped ")
    if aspect == "weights" and any(one.column == "settings" for one in outcome.causes):
        own = [record.steps[first.step].settings for record in c.records]
        if any(other != own[0] for other in own):
            return  # one process steps with rank 0's settings
    found = replicas_cause(c.world, first.step)
    if found is None and aspect == "clipped gradients":
        text = "the gradients are equal before they are clipped, and differ afterwards"
        found = cause("clipping", text, "gradients when clipping began, and when the optimizer stepped", framework)
    elif found is None and aspect == "gradients":
        causes = _gradient_causes(c, first, reference)
        if causes:
            outcome.causes += causes
            return
    if found is None:
        text = "none was shown; one process has the ranks' samples, first values and settings"
        found = ScriptCause(UNKNOWN, text, "comparison with one process")
    outcome.causes.append(found)


def _gradient_causes(c: ScriptComparison, first: ScriptDifference, reference: ScriptRecord) -> list[ScriptCause]:
    evidence = _evidence(c, first.step, reference)
    if not evidence.own:
        found = _statistics_cause(c, first) or shared_cause(evidence)
        return [] if found is None else [found]
    found = reduction_cause(evidence)
    if found is not None:
        same = relative(evidence.mean, evidence.reference) < CEILING / NUDGES
        weighed = None if same else weighing_cause(evidence)
        return [found] if weighed is None else [found, weighed]
    found = weighing_cause(evidence) or _statistics_cause(c, first)
    if found is None:
        found = _computation_cause(c, first, evidence) or _micro_batch_cause(c, first, evidence)
    return [] if found is None else [found]


def _evidence(c: ScriptComparison, number: int, reference: ScriptRecord) -> GradientEvidence:
    """Return a step's gradients, with those of each unit's samples alone."""
    units = [unit[0] for unit in c.world.units]
    mine = c.gradients(number, c.world)
    own = []
    if all(set(record.steps[number].own) >= set(c.sizes) for record in c.records):
        # A rank that shares a model with others holds its own part of it.
        tensors = c.world.tensors(lambda record: record.steps[number].own)
        own = [vector(tensors[rank], c.sizes) for rank in units] if len(units) == c.ranks else []
    elif (at := c.batches_of(number)) is not None and len(units) > 1:
        own = [gradients for gradients, _ in c.alone_on_each(number, at)]
    right = c.gradients(number, World([reference]))[0]
    ranks = [mine[rank] for rank in units] if own else mine
    return GradientEvidence(c.sizes, ranks, right, own, c.outcome.framework)


def _computation_cause(c: ScriptComparison, first: ScriptDifference, evidence: GradientEvidence) -> ScriptCause | None:
    """Compare what each rank computes from its samples with what one process does."""
    at = c.batches_of(first.step)
    if at is None or len(c.world.units) == 1:
        return None
    alone = c.alone_on_each(first.step, at)
    gradients, records = [one for one, _ in alone], [record for _, record in alone]
    found = computation_cause(evidence, gradients, c.world.leaders, records, first.step)
    if found is None and len(at[1]) == 1:
        found = coupling_cause(evidence, gradients)
    return found


def _micro_batch_cause(c: ScriptComparison, first: ScriptDifference, evidence: GradientEvidence) -> ScriptCause | None:
    """Judge micro-batches one by one: each may weigh its ranks otherwise."""
    at, units = c.batches_of(first.step), c.world.units
    if at is None or len(at[1]) == 1 or len(units) * len(at[1]) > MOST_PARTS:
        return None
    micro_batches = c.parts(first.step, at, [[c.feed[at[0], i]] * len(at[1]) for i in at[1]])
    given = [[[(unit[0], i)]] * len(at[1]) for i in at[1] for unit in units]
    every = [gradient for gradient, _ in c.parts(first.step, at, given)]
    for place, (right, _) in enumerate(micro_batches):
        parts = every[place * len(units) : (place + 1) * len(units)]
        found = weighing_cause(GradientEvidence(c.sizes, parts, right, parts, evidence.framework))
        if found is not None:
            return found
    return None


def _statistics_cause(c: ScriptComparison, first: ScriptDifference) -> ScriptCause | None:
    """Undo batch normalisation on both sides."""
    if not c.records[0].normalises:
        return None
    undone: dict[str, Any] = {key: c.given[key] for key in ("mean_draws", "full_precision") if key in c.given}
    undone |= {"fixed_statistics": True, "first": c.given["first"]}
    folder, records = c.runs.world(c.ranks, "with running statistics", **undone)
    if any(len(record.steps) <= first.step for record in records):
        return None
    changes = {"fixed_statistics": True, "samples": folder}
    world = World(records, c.joined)
    feed = united(world, shared=is_cut_by_script(world))
    reference = c.alone("with running statistics", [feed], **changes)[0]
    right = c.gradients(first.step, World([reference]))[0]
    if any(relative(mine, right) > ROUNDING * 50 for mine in c.gradients(first.step, world)):
        return None
    text = "batch normalisation uses the mean and variance of each rank's samples, and not of all samples of the step"
    by = "with running statistics on both sides, the gradients are equal"
    return cause("batch statistics", text, by, c.outcome.framework, is_error=False)


def check_accumulation(c: ScriptComparison, reference: ScriptRecord) -> None:
    """Compare one process's first step with that of its samples in one batch."""
    at = step_batches(c.records[0], 0)
    if at is None or not c.feed or c.is_split() or len(at[1]) > MOST_PARTS:
        return
    loader, batches = at
    together = [pair for i in batches for pair in c.feed[loader, i]]
    c.size(reference.steps[0])
    given = [[samples] * len(batches) for samples in (together, *(c.feed[loader, i] for i in batches))]
    (whole, _), *micro_batches = c.parts(0, at, given)
    parts = [gradient for gradient, _ in micro_batches]
    step = c.gradients(0, World([reference]))[0]
    if relative(step, whole) > CEILING / NUDGES:
        found = accumulation_cause(step, whole, parts, c.outcome.framework)
        if found is not None:
            c.outcome.causes.append(found)
