"""Explains the first difference between a script's ranks and one process.

Causes are tried in the order of `_gradient_causes`. What is tried, with or without a run, is in
trials.py; under what a cause is named:

    gradients.py       a rank's own gradient is another, or counts otherwise
    reduction.py       ranks' own gradients are right, and combined otherwise
    shared_model.py    ranks that share one model
    replicas.py        ranks that were equal, and no longer are
    fixes.py           what to write instead

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

from lockstep.verify.algebra import CEILING, distance, mean_of
from lockstep.verify.comparison_result import UNKNOWN, Cause, Difference
from lockstep.verify.script.causes.evidence import GradientEvidence, gradient_evidence
from lockstep.verify.script.causes.first_operation import describe_first_operation
from lockstep.verify.script.causes.fixes import NORMALISATION, script_cause
from lockstep.verify.script.causes.gradients import COMPUTATION, own_count_cause, weighing_cause
from lockstep.verify.script.causes.reduction import reduction_cause
from lockstep.verify.script.causes.replicas import replicas_apart, replicas_cause
from lockstep.verify.script.causes.shared_model import shared_model_cause
from lockstep.verify.script.causes.trials import (
    try_computation,
    try_coupling,
    try_early_clipping,
    try_hook,
    try_micro_batches,
    try_shards,
    try_statistics,
)
from lockstep.verify.script.comparison import NUDGES, ScriptComparison
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.vectors import is_same


def explain(comparison: ScriptComparison, first: Difference, reference: ScriptRecord) -> None:
    """Add the first operation that differs, and the causes of the first difference."""
    aspect = first.aspect  # before it is named without clipping
    evidence = None
    if aspect == "gradients":
        evidence = gradient_evidence(comparison, first.step, reference)
        comparison.repeat_parts(first.step, evidence.reference)
        comparison.outcome.locate(describe_first_operation(comparison, first, evidence))
    first.name_without_clipping()
    if aspect == "weights" and _settings_explain_it(comparison, first.step):
        return
    comparison.outcome.causes.extend(_causes(comparison, first, aspect, evidence, reference))


def _settings_explain_it(comparison: ScriptComparison, number: int) -> bool:
    """Return whether ranks step with other settings than rank 0, which one process has."""
    if not any(cause.column == "settings" for cause in comparison.outcome.causes):
        return False
    settings = [record.steps[number].settings for record in comparison.records]
    return any(of_rank != settings[0] for of_rank in settings)


def _causes(
    comparison: ScriptComparison,
    first: Difference,
    aspect: str,
    evidence: GradientEvidence | None,
    reference: ScriptRecord,
) -> list[Cause]:
    """Return the causes of the first difference; one of the kind `UNKNOWN` if none is shown."""
    replicas = replicas_cause(comparison.world, first.step)
    if replicas is not None:
        return [replicas]
    if aspect == "clipped gradients":
        text = "the gradients are equal before they are clipped, and differ afterwards"
        by = "gradients when clipping began, and when the optimizer stepped"
        return [script_cause("clipping", text, by, comparison.outcome.framework)]
    causes = [] if evidence is None else _gradient_causes(comparison, first, evidence, reference)
    if causes or comparison.outcome.not_judged:
        return causes
    used = comparison.gradients(first.step, comparison.world, clipped=True)
    are_apart = any(not is_same(mine, used[0]) for mine in used[1:])
    causes = replicas_apart(comparison.world, first.step + 1) if are_apart else []
    if causes:
        causes[0].place_at("" if comparison.differing is None else comparison.differing.line)
        return causes
    text = "none was shown; one process has the ranks' samples, first values and settings"
    return [Cause(UNKNOWN, text, ["comparison with one process"])]


def _gradient_causes(
    comparison: ScriptComparison,
    first: Difference,
    evidence: GradientEvidence,
    reference: ScriptRecord,
) -> list[Cause]:
    """Return why the gradients of ranks differ: how they were added, or what was."""
    changed_afterwards = (
        try_shards(comparison, first, evidence)
        or try_hook(comparison, first, evidence)
        or try_early_clipping(comparison, first, evidence)
    )
    if changed_afterwards is not None:
        return [changed_afterwards]

    if not evidence.own:
        cause = try_statistics(comparison, first) or shared_model_cause(
            comparison, first.step, evidence, reference
        )
        return [] if cause is None else [cause]

    reduced_otherwise = reduction_cause(evidence)
    if reduced_otherwise is not None:
        is_mean_right = distance(mean_of(evidence.own), evidence.reference) < CEILING / NUDGES
        weighing = None if is_mean_right else weighing_cause(evidence)
        return [reduced_otherwise] if weighing is None else [reduced_otherwise, weighing]

    # Ranks step with the mean of their own gradients: these are not those of one process.
    cause = _own_gradients_cause(comparison, first, evidence)
    if cause is None:
        cause = try_coupling(comparison, first, evidence) or try_micro_batches(
            comparison, first, evidence
        )
    return [] if cause is None else [cause]


def _own_gradients_cause(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> Cause | None:
    """Return why a rank's own gradient, of its samples, counts otherwise or is another."""
    cause = weighing_cause(evidence) or try_statistics(comparison, first)
    if cause is not None and cause.kind == COMPUTATION and comparison.can_take_parts():
        # A rank that weighs its samples otherwise may do so on one process, too.
        alone = [gradient for gradient, _ in comparison.alone_on_each(first.step)]
        return own_count_cause(evidence, alone) or cause
    if cause is None or cause.kind == NORMALISATION:
        # Weights of ranks may look like unequal counts: then one process on a rank's samples has
        # that rank's gradient.
        return try_computation(comparison, first, evidence) or cause
    return cause
