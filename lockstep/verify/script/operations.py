"""Traces the operations of a script's step, and finds the first that differs on a rank.

A rank and one process that is given its samples compute the same, operation by operation, until one
of them does something else:

    rank 1                                  one process on rank 1's samples
    linear  at model.py:40                  linear  at model.py:40
    mul     at train.py:71                  sum     at train.py:73

Of each operation what it was given and what it returned are kept as fingerprints.

Tests: tests/verify/test_operations.py, tests/verify/test_script.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.divergence import fingerprint
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.verify.recorded_flow import line_of_code

_MOST = 100_000  # operations of a step
_WITHOUT_VALUES = ("empty", "new_empty")  # what they return is written later
_ROUNDING = 1e-5  # relative difference of a sum of magnitudes that is rounding


@dataclass(frozen=True)
class TracedOperation:
    """One operation of a step."""

    name: str  # linear, mul …
    module: str  # that runs; empty: the loop itself
    line: str  # of the code that calls it
    backward: bool  # whether it belongs to a backward pass
    given: float  # sum of the magnitudes of what it was given
    returned: float  # and of what it returned
    bits: int  # fingerprint of what it returned


class TracedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces operations while it is entered.

    Args:
        where: returns the module that runs, and whether a backward pass does.
        note: is given each operation.
    """

    def __init__(
        self, where: Callable[[], tuple[str, bool]], note: Callable[[TracedOperation], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self._note = note
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # before the operation, which may write into what it is given
        given = _magnitude((args, kwargs)) if self._count < _MOST else 0.0
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        has_values = _is_plain(result) and not name.startswith(_WITHOUT_VALUES)
        if func.namespace == "aten" and has_values and self._count < _MOST:
            line = line_of_code()
            if line:
                self._count += 1
                module, backward = self._where()
                bits = int(fingerprint(result.detach()))
                returned = _magnitude(result)
                self._note(TracedOperation(name, module, line, backward, given, returned, bits))
        return result


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


def _magnitude(tree: Any) -> float:
    total = 0.0
    for leaf in tree_leaves(tree):
        if _is_plain(leaf) and leaf.numel() and not leaf.is_complex():
            total += float(leaf.detach().double().abs().sum())
    return total


def first_operation(
    mine: Sequence[TracedOperation],
    right: Sequence[TracedOperation],
    other: str = "one process",
) -> str:
    """Return a clause on the first operation that differs from those of the `other`.

    Empty if none does. Operations of modules that only one side calls, as a wrapper's, are left
    out.
    """
    both = {operation.module for operation in mine} & {operation.module for operation in right}
    mine = [operation for operation in mine if operation.module in both]
    right = [operation for operation in right if operation.module in both]
    for here, there in zip(mine, right, strict=False):
        if here.name != there.name:
            return f"{_place(here)}: {here.name} where {other} calls {there.name}"
        if here.bits != there.bits and _differ(here.returned, there.returned):
            if _differ(here.given, there.given):
                return f"{_place(here)}: {here.name} is given something else, made before"
            return f"{_place(here)}: {here.name} returns something else"
    if len(mine) > len(right):
        extra = mine[len(right)]
        return f"{_place(extra)}: {extra.name}, which {other} does not call"
    if len(right) > len(mine):
        extra = right[len(mine)]
        return f"{_place(extra)}: {extra.name} is left out, which {other} calls"
    return ""


def _place(operation: TracedOperation) -> str:
    module = f" in {operation.module}" if operation.module else ""
    backward = ", in the backward pass" if operation.backward else ""
    return f"{operation.line}{module}{backward}"


def _differ(mine: float, right: float) -> bool:
    return abs(mine - right) > _ROUNDING * abs(right)
