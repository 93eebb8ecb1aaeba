"""Traces the operations of a script's step.

Of each operation what it was given and what it returned are kept as fingerprints;
`lockstep/verify/script/causes/operations.py` compares those of a rank with those of one process.

Tests: tests/verify/test_operations.py, tests/verify/test_script.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.tensors import as_integers, fingerprint
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.verify.own_lines import is_in_wrapper, is_reading, line_of_code, own_line

BEFORE = "before"  # the first pass, where a whole run is traced
FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"  # between the last backward pass and the optimizer's step
_MOST = 100_000  # operations of a step
_WITHOUT_VALUES = ("empty", "new_empty")  # what they return is written later


class GivenTensor(NamedTuple):
    """A tensor that an operation was given."""

    magnitude: float  # sum of the magnitudes of its elements
    line: str = ""  # the user's own line that made it, or wrote into it last
    writes: int = 0  # how often it was written into since it was made
    is_tracked: bool = False  # whether gradients go through it


@dataclass(frozen=True)
class TracedOperation:
    """One operation of a step."""

    name: str  # linear, mul …
    module: str  # the one that runs; empty: the loop itself
    line: str  # of the code that calls it
    phase: str  # FORWARD, BACKWARD or UPDATE
    given: float  # sum of the magnitudes of what it was given
    returned: float  # and of what it returned
    bits: int  # fingerprint of what it returned
    own: str = ""  # line of the user's own code that is nearest to it
    memory: int = 0  # address of what it returned
    inputs: tuple[GivenTensor, ...] = ()  # each tensor that it was given
    is_floating: bool = True  # whether it returned no positions, classes or counts
    passed_on: str = ""  # line of a function that has returned one of its inputs unchanged
    draws: bool = False  # whether it draws random numbers


class TracedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces operations while it is entered.

    Args:
        where: returns the module that runs, and the phase of the step; None outside of a step,
            where it is noted only which line has made a tensor.
        note: is given each operation.
        passed_on: returns the line of a function that has returned a tensor unchanged; or empty.
    """

    def __init__(
        self,
        where: Callable[[], tuple[str, str] | None],
        note: Callable[[TracedOperation], None],
        passed_on: Callable[[Tensor], str] = lambda _: "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self._note = note
        self._passed_on = passed_on
        self._count = 0
        self._made: dict[int, GivenTensor] = {}  # by its address, when it was made or written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._count >= _MOST:
            return func(*args, **(kwargs or {}))
        where = self._where()
        # before the operation, which may write into what it is given
        inputs = self._inputs((args, kwargs)) if where is not None else ()
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # A loss comes with its count, a normalisation with its statistics.
        value = result[0] if isinstance(result, tuple) and result else result
        has_values = _is_plain(value) and not name.startswith(_WITHOUT_VALUES)
        if func.namespace == "aten" and has_values and not is_reading():
            magnitude = _magnitude(value)
            self._note_made(func, value, magnitude)
            passed_on = self._line_that_passed_on((args, kwargs)) if where is not None else ""
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._note_result(
                name, line_of_code(), where, inputs, value, magnitude, passed_on, draws
            )
        return result

    def _inputs(self, tree: Any) -> tuple[GivenTensor, ...]:
        """Return what is known of each tensor of a tree."""
        inputs = []
        for leaf in tree_leaves(tree):
            if _is_plain(leaf):
                magnitude = _magnitude(leaf)
                made = self._made.get(_memory(leaf))
                # Another tensor may lie where one was.
                is_known = made is not None and made.magnitude == magnitude
                known = made if made is not None and is_known else GivenTensor(magnitude)
                inputs.append(known._replace(is_tracked=leaf.requires_grad))
        return tuple(inputs)

    def _line_that_passed_on(self, tree: Any) -> str:
        """Return the line of a function that has returned a tensor of a tree unchanged."""
        leaves = [leaf for leaf in tree_leaves(tree) if _is_plain(leaf)]
        return next(filter(None, map(self._passed_on, leaves)), "")

    def _note_made(self, func: Any, result: Tensor, magnitude: float) -> None:
        """Note the line that made a tensor or wrote into it; a view of one that is known does not.

        A weight that is transposed in each forward pass was made where it was written last.
        """
        memory = _memory(result)
        if not memory:
            return
        known = self._made.get(memory)
        if func.is_view and known is not None and known.magnitude == magnitude:
            return
        is_written = func.overloadpacket.__name__.endswith("_")  # as add_ does
        if is_written and known is not None and is_in_wrapper():
            # A wrapper writes rank 0's buffers; who has written those of rank 0 made them.
            self._made[memory] = known._replace(magnitude=magnitude)
            return
        writes = known.writes + 1 if is_written and known is not None else 0
        self._made[memory] = GivenTensor(magnitude, own_line(), writes)

    def _note_result(
        self,
        name: str,
        line: str,
        where: tuple[str, str] | None,
        inputs: tuple[GivenTensor, ...],
        result: Tensor,
        returned: float,
        passed_on: str,
        draws: bool,
    ) -> None:
        """Note an operation that ran in the model or the loss.

        Args:
            name: of the operation.
            line: of the script that asked for it; empty: none did.
            where: module and phase; None: in neither the model nor the loss.
            inputs: what it was given.
            result: what it returned.
            returned: the sum of the magnitudes of its elements.
            passed_on: line of a function that has returned one of its inputs unchanged.
            draws: whether it draws random numbers.
        """
        if where is None or not line:
            return
        self._count += 1
        own = own_line()
        memory = _memory(result)
        module, phase = where
        given = sum(each.magnitude for each in inputs)
        bits = _print(result.detach())
        self._note(
            TracedOperation(
                name,
                module,
                line,
                phase,
                given,
                returned,
                bits,
                own,
                memory,
                inputs,
                result.is_floating_point(),
                passed_on,
                draws,
            )
        )


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


def _memory(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _print(tensor: Tensor) -> int:
    """Return a print of a tensor; one of whole numbers changes with their order, too."""
    if tensor.is_floating_point() or tensor.is_complex():
        return int(fingerprint(tensor))
    numbers = as_integers(tensor).long()
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return int((numbers * places).sum())


def _magnitude(tensor: Tensor) -> float:
    """Return the sum of the magnitudes of a tensor's elements."""
    if not tensor.numel() or tensor.is_complex():
        return 0.0
    return float(tensor.detach().double().abs().sum())


def line_of_loss(operations: Sequence[TracedOperation], loss: Tensor) -> str:
    """Return the user's own line that computed a loss; empty if it was not traced.

    Where a library divides it, the line before that.
    """
    memory = _memory(loss) if _is_plain(loss) else 0
    forward = [operation for operation in operations if operation.phase == FORWARD]
    made_at = [
        at
        for at, operation in enumerate(forward)
        if memory and operation.memory == memory and operation.name != "detach"
    ]
    if not made_at:
        return ""
    for operation in reversed(forward[: made_at[-1] + 1]):
        if operation.own and operation.own == operation.line:
            return operation.own
    return ""
