"""Sees the operations of a forward pass, and finds the line of the user's code at which two passes first differ."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.launch.failures import short_path
from lockstep.parallel.divergence import fingerprint
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.verify.recorded_flow import LOSS, Deviation, Operation, Operations, RankFlow


class ObservedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of a forward pass: draws, collectives, and the results with the line of the user's code.

    Args:
        where: returns the micro-batch and the module whose own code runs; None outside of a forward pass.
        flow: receives what draws and collectives there are.
        operations: receives the results.
    """

    def __init__(self, where: Callable[[], tuple[int, str] | None], flow: RankFlow, operations: Operations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where, self._flow, self._operations = where, flow, operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        where = self._where()
        if where is None:
            return result
        if torch.Tag.nondeterministic_seeded in func.tags and where[1] not in self._flow.draws:
            self._flow.draws.append(where[1])
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            if name not in self._flow.collectives:
                self._flow.collectives.append(name)
        elif func.namespace == "aten" and type(result) is Tensor and not result.is_meta:
            line = _line()
            if line:
                bits = int(fingerprint(result.detach()))
                norm = float(result.detach().double().abs().sum()) if result.numel() else 0.0
                self._operations.setdefault(where, []).append((name, bits, norm, line))
        return result


def _line() -> str:
    """Return the line of the user's code, or of a model that ships, that calls torch; "" if something else does."""
    frame = inspect.currentframe()
    frame = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    ours = "/lockstep/" in file and ("/lockstep/models/" not in file or file.endswith("/protocol.py"))
    return "" if ours else f"{short_path(file)}:{frame.f_lineno}"


def first_line(mine: Operations, right: Operations, first: Deviation) -> str:
    """Return the first operation that differs in the code where a forward pass or a loss deviates."""
    own = first.what.startswith("output") or first.stage == LOSS
    names = [first.module] if own else []
    names += [name for name in ("", *_parents(first.module)) if name not in names]
    for name in names:
        at = first.micro_batch, name
        found = _first_operation(mine.get(at, []), right.get(at, []))
        if found:
            return found
    return ""


def _first_operation(mine: Sequence[Operation], right: Sequence[Operation]) -> str:
    for (op, bits, norm, line), (right_op, right_bits, right_norm, _) in zip(mine, right, strict=False):
        if op != right_op:
            return f"first at {line}: {op} where the reference calls {right_op}"
        if bits != right_bits and (abs(norm - right_norm) > 1e-6 * abs(right_norm) or norm == right_norm):
            return f"first at {line}, in {op}"
    if len(mine) != len(right) and mine and right:
        longer, text = (mine, "only here") if len(mine) > len(right) else (right, "only in the reference")
        op, _, _, line = longer[min(len(mine), len(right))]
        return f"first at {line}: {op} {text}"
    return ""


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
