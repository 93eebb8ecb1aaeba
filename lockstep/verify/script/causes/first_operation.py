"""Finds the first operation of a step at which ranks part from one process.

The ranks are run again with each operation traced, and one process on the samples of each rank:
`operations.py` compares the two.

Tests: tests/verify/test_script.py
"""

from collections.abc import Sequence

from lockstep.errors import LockstepError
from lockstep.verify.algebra import Values
from lockstep.verify.comparison_result import Difference
from lockstep.verify.script.causes.evidence import GradientEvidence
from lockstep.verify.script.causes.operations import (
    difference_keys,
    earliest,
    first_cut,
    first_operation,
    first_operation_of_part,
)
from lockstep.verify.script.comparison import ScriptComparison
from lockstep.verify.script.observed.traced_operations import TracedOperation
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.vectors import is_same


def describe_first_operation(
    comparison: ScriptComparison, first: Difference, evidence: GradientEvidence
) -> str:
    """Return the first operation of a step that differs on a rank from one process on its samples.

    Empty if that can't be told.
    """
    if not comparison.can_take_parts():
        return ""
    try:
        _, records = comparison.rerun(
            "with each operation traced",
            first.step,
            traced=True,
            traced_whole=not comparison.feed,
        )
    except LockstepError:  # what is compiled may not be traced
        return ""
    comparison.note_traced(records)
    alone = comparison.alone_on_each(first.step)
    share_a_model = len(comparison.world.units) == 1 < comparison.ranks
    if share_a_model:
        return _first_operation_of_stages(comparison, first, records, alone[0][1])
    # rank → its operations, and those of one process on its samples
    traced: dict[int, tuple[list[TracedOperation], list[TracedOperation]]] = {}
    for unit, (_, process) in zip(comparison.world.units, alone, strict=True):
        rank = unit[0]
        if min(len(records[rank].steps), len(process.steps)) <= first.step:
            return ""
        operations = records[rank].steps[first.step].operations
        right_operations = process.steps[first.step].operations
        if not operations or not right_operations:
            return ""
        traced[rank] = operations, right_operations

    wrong = _ranks_that_compute_otherwise(comparison, evidence, [gradient for gradient, _ in alone])
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
        comparison.note_operation(rank, difference)
        return f"the first operation that differs, on rank {rank}: {difference.text}"
    return (
        "no operation of a rank differs from those of one process on its samples: ranks part where"
        " their gradients are combined"
    )


def _first_operation_of_stages(
    comparison: ScriptComparison,
    first: Difference,
    records: Sequence[ScriptRecord],
    alone: ScriptRecord,
) -> str:
    """Return the first operation that differs on ranks with other layers of one model.

    Layers that are cut compute other values on each rank: nothing is compared then.
    """
    steps = [record.steps[first.step : first.step + 1] for record in (*records, alone)]
    pieces = [piece for record in records for piece in record.first.values()]
    if (
        not all(steps)
        or comparison.world.joined
        or any(piece.cuts or piece.flat for piece in pieces)
    ):
        return ""
    right = steps[-1][0].operations
    for rank, (step,) in enumerate(steps[:-1]):
        difference = first_operation_of_part(step.operations, right)
        if difference is not None:
            comparison.note_operation(rank, difference)
            return f"the first operation that differs, on rank {rank}: {difference.text}"
    return ""


def _ranks_that_compute_otherwise(
    comparison: ScriptComparison, evidence: GradientEvidence, alone: Sequence[Values]
) -> list[int]:
    """Return the ranks whose own gradient is not that of one process on their samples."""
    pairs = zip(comparison.world.units, evidence.own, alone, strict=False)
    return [unit[0] for unit, mine, right in pairs if not is_same(mine, right)]
