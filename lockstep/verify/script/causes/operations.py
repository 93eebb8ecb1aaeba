"""Compares the traced operations of a rank with those of one process, and finds the first other.

A rank and one process that is given its samples compute the same, operation by operation, until one
of them does something else:

    rank 1                                  one process on rank 1's samples
    linear  at model.py:40                  linear  at model.py:40
    mul     at train.py:71                  sum     at train.py:73

`lockstep/verify/script/observed/traced_operations.py` has traced them.

Tests: tests/verify/test_operations.py, tests/verify/test_script.py
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.verify.script.observed.traced_operations import (
    BACKWARD,
    BEFORE,
    FORWARD,
    UPDATE,
    TracedOperation,
)

_PHASES = {
    BEFORE: ", before the first pass",
    FORWARD: "",
    BACKWARD: ", in the backward pass",
    UPDATE: ", between backward pass and update",
}
_AHEAD = 200  # operations that one side may have more than the other in one place
# that choose a part of what they are given
_READS = (
    "as_strided",
    "gather",
    "index",
    "index_select",
    "select",
    "slice",
    "split",
    "take",
    "unbind",
)
_ROUNDING = 1e-5  # relative difference of a sum of magnitudes that is rounding


@dataclass(frozen=True)
class OperationDifference:
    """Describes the first operation that differs: a clause, and the user's own line."""

    text: str
    line: str
    is_update: bool = False  # whether it comes between a backward pass and the update
    position: int = 0  # of the operation there, in its order, at which both part
    is_backward: bool = False  # whether it is of a backward pass
    # whether it may come from samples alone, which both sides have read elsewhere
    is_of_data: bool = False


# What tells a difference from others: the operation here, its line, and the operation there; one
# that a side alone calls has no name on the other.
DifferenceKey = tuple[str, str, str]


def first_operation(
    mine: Sequence[TracedOperation],
    right: Sequence[TracedOperation],
    other: str = "one process",
    *,
    excused: Collection[DifferenceKey] = (),
) -> OperationDifference | None:
    """Return the first operation that differs from those of the `other`; None if none does.

    Differences that are `excused`, and operations of modules that only one side calls, as a
    wrapper's, are left out. Between a backward pass and the update ranks have other gradients, so
    that only the names are compared there.
    """
    for key, difference in _differences(mine, right, other):
        if key not in excused:
            return difference
    return None


def first_cut(
    mine: Sequence[TracedOperation], right: Sequence[TracedOperation]
) -> OperationDifference | None:
    """Return the first operation through which gradients go on one side alone; None if none does.

    It is for forward passes that are the same, operation by operation, before backward passes that
    are not.
    """
    forward = [
        [operation for operation in operations if operation.phase == FORWARD]
        for operations in (mine, right)
    ]
    for here, there in zip(*forward, strict=False):
        if here.name != there.name:
            return None
        tracked = [given.is_tracked for given in here.inputs]
        right_tracked = [given.is_tracked for given in there.inputs]
        if tracked != right_tracked:
            lost = sum(tracked) < sum(right_tracked)
            text = f"no gradient goes through what {here.name} is given, as in one process"
            if not lost:
                text = f"gradients go through what {here.name} is given, and not in one process"
            return _difference(here, text)
    return None


def earliest(
    first_of_rank: Mapping[int, OperationDifference | None],
) -> tuple[int, OperationDifference] | None:
    """Return the rank that parts first from one process, and its first difference.

    What it does otherwise may be given to other ranks, which part later.
    """
    differing = {
        rank: difference for rank, difference in first_of_rank.items() if difference is not None
    }
    if not differing:
        return None
    rank = min(differing, key=lambda rank: (differing[rank].position, rank))
    return rank, differing[rank]


def first_operation_of_part(
    mine: Sequence[TracedOperation], right: Sequence[TracedOperation]
) -> OperationDifference | None:
    """Return the first operation that differs on a rank that has a part of the model's modules.

    Stages of a pipeline take their passes in other orders than one process, and do not compute
    what others do: the forward pass of each module is compared by itself.
    """
    first_of_module: list[tuple[int, OperationDifference]] = []  # with its position in `mine`
    for module in dict.fromkeys(operation.module for operation in mine):
        positions = [at for at, operation in enumerate(mine) if _is_forward(operation, module)]
        right_forward = [operation for operation in right if _is_forward(operation, module)]
        differences = _differences([mine[at] for at in positions], right_forward, "one process")
        difference = next((each for key, each in differences if key[0]), None)
        if right_forward and difference is not None:
            at = positions[min(difference.position, len(positions) - 1)]
            first_of_module.append((at, difference))
    if not first_of_module:
        return None
    _, first = min(first_of_module, key=lambda each: each[0])
    return first


def _is_forward(operation: TracedOperation, module: str) -> bool:
    """Return whether an operation is of a module's forward pass."""
    return operation.module == module and operation.phase == FORWARD


def line_that_couples(
    together: Sequence[TracedOperation], parts: Sequence[Sequence[TracedOperation]]
) -> str:
    """Return the user's own line of the first operation that makes samples depend on each other.

    What it returns for all samples is neither the sum nor the mean of what it returns for each
    part of them. Positions in a batch, as `nonzero` returns them, are neither anyway, and left out.
    Empty if there is none, or operations are not the same.
    """
    for of_all, *of_parts in zip(together, *parts, strict=False):
        if of_all.phase != FORWARD or any(part.name != of_all.name for part in of_parts):
            return ""
        total = sum(part.returned for part in of_parts)
        is_sum = not _differ(total, of_all.returned)
        is_mean = not _differ(1 / len(of_parts) * total, of_all.returned)
        if of_all.inputs and of_all.is_floating and not is_sum and not is_mean:
            line: str = of_all.own
            return line
    return ""


def line_that_passes_on(operations: Sequence[TracedOperation], line: str) -> str:
    """Return the line of a function that returned what an operation at a line is given, unchanged.

    Empty if none did.
    """
    passed_on = [operation.passed_on for operation in operations if operation.own == line]
    return next(filter(None, passed_on), "")


def difference_keys(
    mine: Sequence[TracedOperation], right: Sequence[TracedOperation]
) -> set[DifferenceKey]:
    """Return what tells all differences of two sequences of operations from others."""
    return {key for key, _ in _differences(mine, right, "one process")}


def _differences(
    mine: Sequence[TracedOperation], right: Sequence[TracedOperation], other: str
) -> Iterator[tuple[DifferenceKey, OperationDifference]]:
    """Yield the differences, in order, and go on behind each of them where both agree again.

    In order, with `mine` on the left and `right`, of one process, beside it:

        linear    linear
        mul       sum       mul where one process calls sum; sum is left out
                  neg       neg is left out
        add       add       they agree again, and go on to be compared
    """
    modules = {operation.module for operation in mine} & {operation.module for operation in right}
    mine = [operation for operation in mine if operation.module in modules]
    right = [operation for operation in right if operation.module in modules]
    at = 0  # in `mine`
    right_at = 0
    while at < len(mine) and right_at < len(right):
        operation = mine[at]
        right_operation = right[right_at]
        if operation.name == right_operation.name:
            if _have_other_results(operation, right_operation):
                key = (operation.name, operation.line, right_operation.name)
                difference = _difference_of_values(operation, right_operation, right_at)
                if operation.phase != BEFORE or _computes_otherwise(operation, right_operation):
                    yield key, difference
            at += 1
            right_at += 1
            continue

        ahead = mine[at : at + _AHEAD]
        right_ahead = right[right_at : right_at + _AHEAD]
        steps = _steps_to_agreement(ahead, right_ahead)
        alone, right_alone = steps or (len(mine) - at, len(right) - right_at)
        of_one_side = list(
            _of_one_side(mine[at : at + alone], right[right_at : right_at + right_alone], other)
        )
        # Where one side alone calls more, what is called next is the same.
        has_begun = operation.phase != BEFORE and alone > 0
        if has_begun:
            first_key, _ = of_one_side[0]
            text = f"{operation.name} where {other} calls {right_operation.name}"
            yield first_key, _difference(operation, text, right_at)
        for key, difference in of_one_side[has_begun:]:
            yield key, replace(difference, position=right_at)
        at += alone
        right_at += right_alone
    for key, difference in _of_one_side(mine[at:], right[right_at:], other):
        yield key, replace(difference, position=right_at)


def _have_other_results(operation: TracedOperation, right: TracedOperation) -> bool:
    """Return whether an operation returns more than rounding away from what the other returns."""
    if operation.phase == UPDATE or operation.bits == right.bits:
        return False
    # Numbers that are not rounded may be the same ones in another order.
    return not operation.is_floating or _differ(operation.returned, right.returned)


def _computes_otherwise(operation: TracedOperation, right: TracedOperation) -> bool:
    """Return whether an operation makes something else of what it is given.

    Ranks may draw and read other numbers.
    """
    is_given_the_same = bool(operation.inputs) and not _differ(operation.given, right.given)
    return is_given_the_same and not operation.draws and operation.name not in _READS


def _difference_of_values(
    operation: TracedOperation, right: TracedOperation, position: int
) -> OperationDifference:
    """Return the difference of an operation that both sides call, with other values."""
    if not _differ(operation.given, right.given):
        difference = _difference(operation, f"{operation.name} returns something else", position)
        reads = not operation.inputs or operation.name in _READS
        return replace(difference, is_of_data=reads)
    pairs = zip(operation.inputs, right.inputs, strict=False)
    differing = [pair for pair in pairs if _differ(pair[0].magnitude, pair[1].magnitude)]
    # Data are not written into, as weights are.
    is_of_data = not any(here.writes or there.writes for here, there in differing)
    # Of two that were one, the one is other that was written into more often: on one side a line
    # has run that has not on the other.
    last_written = [there if there.writes > here.writes else here for here, there in differing]
    lines = [each.line for each in last_written if each.line]
    if not lines or lines[0] == operation.own:
        text = f"{operation.name} is given something else, made before"
        return replace(_difference(operation, text, position), is_of_data=is_of_data)
    text = f"{operation.name} is given something else, made at {lines[0]}"
    difference = _difference(operation, text, position)
    return replace(difference, line=lines[0], is_of_data=is_of_data)


def _of_one_side(
    mine: Sequence[TracedOperation], right: Sequence[TracedOperation], other: str
) -> Iterator[tuple[DifferenceKey, OperationDifference]]:
    """Yield each operation that one side alone calls."""
    for extra in mine:
        if extra.phase == BEFORE:  # rank 0 may print
            continue
        text = f"{extra.name}, which {other} does not call"
        yield (extra.name, extra.line, ""), _difference(extra, text)
    for lacking in right:
        if lacking.phase == BEFORE:
            continue
        text = f"{lacking.name} is left out, which {other} calls"
        yield ("", lacking.line, lacking.name), _difference(lacking, text)


def _steps_to_agreement(
    mine: Sequence[TracedOperation], right: Sequence[TracedOperation]
) -> tuple[int, int] | None:
    """Return how many operations of each side to pass over until both call the same at a line."""
    calls = [(operation.name, operation.line) for operation in mine]
    right_calls = [(operation.name, operation.line) for operation in right]
    # The fewest operations in all come first; of these, the fewest of `mine`.
    for total in range(1, len(calls) + len(right_calls) - 1):
        fewest = max(0, total - len(right_calls) + 1)
        most = min(total, len(calls) - 1)
        for passed in range(fewest, most + 1):
            if calls[passed] == right_calls[total - passed]:
                return passed, total - passed
    return None


def _difference(operation: TracedOperation, text: str, position: int = 0) -> OperationDifference:
    module = f" in {operation.module}" if operation.module else ""
    phase = _PHASES[operation.phase]
    where = f"{operation.line}{module}{phase}"
    is_update = operation.phase == UPDATE
    is_backward = operation.phase == BACKWARD
    return OperationDifference(f"{where}: {text}", operation.own, is_update, position, is_backward)


def _differ(mine: float, right: float) -> bool:
    return abs(mine - right) > _ROUNDING * abs(right)
