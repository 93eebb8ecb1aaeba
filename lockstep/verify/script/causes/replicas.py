"""Names why ranks that hold the same model do not keep it the same.

Networks that a script calls and does not train, as targets and teachers, are compared as well.

Tests: tests/verify/test_values_of_ranks.py, tests/verify/test_untrained.py,
tests/verify/test_script.py
"""

from collections.abc import Sequence

import numpy as np

from lockstep.errors import listed
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.fixes import script_cause
from lockstep.verify.script.causes.gradients import COMPUTATION, NOT_SYNCHRONISED
from lockstep.verify.script.record import RecordedStep
from lockstep.verify.script.world import Tensors, World


def replicas_cause(world: World, number: int) -> Cause | None:
    """Return the cause if replicas that were equal differ.

    They differ between one step and the next, or after an update with equal gradients.
    """
    for at in range(number + 1):
        steps = [record.steps[at] for record in world.records]
        changed = _unequal_before_update(world, steps)
        if changed:
            if not at:
                return None  # they began with other values, which is a cause of its own
            text = (
                f"{listed(changed, 5)} were equal on all ranks after step {at}, and differ before"
                f" step {at + 1} updates"
            )
            by = "fingerprints of each rank's parameters"
            fix = (
                "let nothing but the optimizer write weights, or let it write the same on all ranks"
            )
            return Cause("replicas", text, [by], fix=fix, column="weights", parameters=changed)
        if _are_unequal(world.tensors([step.values for step in steps])):
            if _are_unequal(world.tensors([step.gradients for step in steps])):
                return None  # the gradients are the cause
            text = (
                f"weights and gradients are equal on all ranks in step {at + 1}, and the updated"
                " weights are not"
            )
            by = "parameters and gradients of each rank"
            return Cause("replicas", text, [by], column="weights")
    return None


def replicas_apart(world: World, steps: int) -> list[Cause]:
    """Return the cause if ranks that hold the same model do not keep it the same.

    It needs no other run, where a script can't be compared with one process.
    """
    if len(world.units) != len(world.records):
        return []
    for number in range(steps):
        cause = replicas_cause(world, number)
        if cause is not None:
            return [cause]
        of_step = [record.steps[number] for record in world.records]
        before = [step.before for step in of_step]
        values = world.tensors([step.values for step in of_step])
        if any(each != before[0] for each in before[1:]):
            return []
        names = [name for mine in values[1:] for name in unequal_names(mine, values[0])]
        if names:
            text = (
                f"weights are equal on all ranks before step {number + 1}, which updates"
                f" {listed(names, 5)} with other gradients from rank to rank"
            )
            by = "parameters and gradients of each rank"
            framework = world.records[0].framework
            return [script_cause(NOT_SYNCHRONISED, text, by, framework, parameters=names)]
    return []


def _unequal_before_update(world: World, steps: Sequence[RecordedStep]) -> list[str]:
    """Return the parameters that all ranks hold complete, and that differ before an update."""
    pieces = {
        name
        for step in steps
        for name, piece in step.values.items()
        if piece.cuts or piece.flat or name in world.joined
    }
    on_all_ranks = set.intersection(*(set(step.values) for step in steps))
    complete = on_all_ranks - pieces
    first = steps[0].before
    return [
        name
        for name in first
        if name in complete and any(step.before.get(name) != first[name] for step in steps)
    ]


def _are_unequal(ranks: Sequence[Tensors]) -> bool:
    """Return whether a rank has other tensors than the first."""
    return any(unequal_names(tensors, ranks[0]) for tensors in ranks[1:])


def unequal_names(mine: Tensors, right: Tensors) -> list[str]:
    """Return the names of tensors that differ in any element, or are missing."""
    return [
        name for name in right if name not in mine or not np.array_equal(mine[name], right[name])
    ]


def networks_apart(world: World, steps: int) -> list[Cause]:
    """Return the cause if ranks call another network than rank 0, where they called the same.

    Each step has to call it on all ranks, whose trained weights are the same.
    """
    records = world.records
    if len(world.units) != len(records) or not steps:
        return []
    called = [set(step.untrained) for record in records for step in record.steps[:steps]]
    equal: set[str] = set()
    for number in range(steps):
        of_step = [record.steps[number] for record in records]
        if any(step.before != of_step[0].before for step in of_step[1:]):
            return []
        for name in sorted(set.intersection(*called)):
            right = of_step[0].untrained[name]
            other = [rank for rank, step in enumerate(of_step) if step.untrained[name] != right]
            if not other:
                equal.add(name)
            elif name in equal:
                return [_apart(name, number, other, [step.loaded_at for step in of_step])]
    return []


def _apart(name: str, number: int, ranks: list[int], lines: list[dict[str, str]]) -> Cause:
    """Return the cause of a network that differs on some ranks in a step, and did not before."""
    plural = "s" * (len(ranks) > 1)
    verb = "call" if plural else "calls"
    numbers = listed([str(rank) for rank in ranks])
    text = (
        f"in step {number + 1}, rank{plural} {numbers} {verb} another"
        f" {name}, which no optimizer trains, than rank 0: it was the same in a step before, and"
        " the trained weights are the same"
    )
    by = "prints of the networks that each step calls and no optimizer trains"
    fix = "let all ranks take values over into it in the same steps"
    cause = Cause(COMPUTATION, text, [by], fix=fix, column="weights")
    cause.place_at(next((each[name] for each in lines if name in each), ""))
    return cause
