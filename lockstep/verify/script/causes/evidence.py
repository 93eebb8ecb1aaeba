"""Gathers what is known of a step's gradients, by which their causes are named.

    ranks        with which each rank steps
    reference    of one process that has the samples of all ranks
    own          of each rank's samples alone, before ranks are reduced

Hooks see a rank's own gradient. Where they do not (FSDP), one process computes it from the rank's
samples.

Tests: tests/verify/test_algebra.py, tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lockstep.verify.algebra import Values, factor, mean_of
from lockstep.verify.script.comparison import ScriptComparison
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.vectors import EXACT, is_same, slices_of, vector
from lockstep.verify.script.world import World


@dataclass
class GradientEvidence:
    """Gradients of one step, as vectors."""

    sizes: dict[str, int]  # name → number of elements, in the vectors' order
    ranks: list[Values]  # of each unit of ranks, as its optimizer steps with it
    reference: Values  # of one process with all samples
    own: list[Values]  # of each unit's samples alone, before ranks are reduced; empty if unseen
    framework: str  # the library whose loop it is

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Slice of each parameter in a vector, by name."""
        return slices_of(self.sizes)


def unscaled(own: list[Values], of_process: Values, right: Values) -> list[Values]:
    """Return ranks' own gradients divided by what the script divides its gradients by.

    A script may multiply its loss, and divide its gradients before the update, as where 16 bits
    would lose small ones. One process shows by which number.

    Args:
        own: of each rank, before the script divides them.
        of_process: the same of one process.
        right: that of one process with which its optimizer steps.
    """
    times = factor(of_process, right)
    is_scaled = times > 0 and not is_same(of_process, right)
    if not is_scaled or not is_same(of_process, times * right):
        return own
    return [gradient / times for gradient in own]


def gradient_evidence(
    comparison: ScriptComparison, number: int, reference: ScriptRecord
) -> GradientEvidence:
    """Return a step's gradients: of the ranks, of one process, of each unit's samples alone."""
    units = [unit[0] for unit in comparison.world.units]
    mine = comparison.gradients(number, comparison.world)
    own = []
    # A parameter whose gradient some ranks have is not used by the others.
    names = {name for record in comparison.records for name in record.steps[number].own}
    if names >= set(comparison.sizes) and all(
        record.steps[number].own for record in comparison.records
    ):
        # A rank that shares a model with others holds its own part of it.
        tensors = comparison.world.tensors(
            [record.steps[number].own for record in comparison.records]
        )
        own = (
            [vector(tensors[rank], comparison.sizes) for rank in units]
            if len(units) == comparison.ranks
            else []
        )
    elif len(units) > 1 and comparison.can_take_parts():
        own = _own_by_losses(comparison, number, comparison.alone_on_each(number), mine)
    right = comparison.gradients(number, World([reference]))[0]
    of_process = World([reference]).tensors([reference.steps[number].own])[0]
    if own and of_process:
        own = unscaled(own, vector(of_process, comparison.sizes), right)
    ranks = [mine[rank] for rank in units] if own else mine
    return GradientEvidence(comparison.sizes, ranks, right, own, comparison.outcome.framework)


def _own_by_losses(
    comparison: ScriptComparison,
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
    for unit, (gradient, record) in zip(comparison.world.units, alone, strict=True):
        of_rank = np.array(comparison.records[unit[0]].steps[number].losses)
        of_process = np.array(record.steps[number].losses)
        if not of_rank.any() and not of_process.any():  # a pipeline's are not seen
            own.append(gradient)
            continue
        if of_rank.shape != of_process.shape or not of_process.all():
            return []
        ratios = of_rank / of_process
        if np.ptp(ratios) > EXACT * abs(ratios[0]):
            return []
        times = float(ratios[0])
        if abs(times - 1) > EXACT:
            is_scaled = True
            gradient = gradient * times
        own.append(gradient)
    if is_scaled and not all(is_same(of_rank, mean_of(own)) for of_rank in mine):
        return []
    return own
