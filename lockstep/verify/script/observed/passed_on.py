"""Finds tensors that a function of a script returns as it was given them.

A function that is to exchange tensors between ranks, and returns its own unchanged, runs no
operation by which it could be named:

    def gathered(features):
        return features                             here nothing is gathered

    logits = gathered(image) @ gathered(text).T     the first operation that misses other ranks

Tests: tests/verify/test_operations.py
"""

import sys
import weakref
from types import FrameType
from typing import Any

from torch import Tensor

from lockstep.failures.failure import short_path
from lockstep.verify.own_lines import is_own


class PassedOn:
    """Watches the functions of a script, from `start` on, in this thread."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[Any, str]] = {}  # memory → weak reference, line that returned

    def start(self) -> None:
        """Begin to watch."""
        sys.setprofile(self._seen)

    def stop(self) -> None:
        """Stop watching."""
        sys.setprofile(None)

    def line_of(self, tensor: Tensor) -> str:
        """Return the line that returned a tensor, or what it is a view of; empty if none did."""
        reference, line = self._lines.get(tensor.untyped_storage().data_ptr(), (None, ""))
        return line if reference is not None and reference() is not None else ""

    def _seen(self, frame: FrameType, event: str, result: Any) -> None:
        if event != "return" or not isinstance(result, Tensor):
            return
        code = frame.f_code
        if not is_own(code.co_filename):
            return
        values = frame.f_locals
        if any(values.get(name) is result for name in code.co_varnames[: code.co_argcount]):
            line = f"{short_path(code.co_filename)}:{frame.f_lineno}"
            memory = result.untyped_storage().data_ptr()
            self._lines[memory] = (weakref.ref(result), line)
