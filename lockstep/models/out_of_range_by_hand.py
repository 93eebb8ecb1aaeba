"""Says which sample has a target that a loss written by hand has no place for.

    log_p.gather(-1, targets[:, None])     index 7 is out of bounds for dimension 1 with size 4
    log_p[rows, targets]                   the same, as an IndexError
    F.one_hot(targets, 4)                  Class values must be smaller than num_classes.
    F.binary_cross_entropy(p, targets)     all elements of target should be between 0 and 1

torch names a number, or none. A batch holds many numbers; one is taken for the cause only where the
line that failed had the member of the batch in reach, in a local variable.

In `log_p[rows, targets]` a negative target counts from the end, as in Python: torch says nothing
where it is not below −4, of four classes.

Tests: tests/models/test_out_of_range.py
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lockstep.models import observed

_INDEX = re.compile(
    r"index (-?\d+) is out of bounds for dimension \d+ with size (\d+)"
    r"|out of DATA bounds, id=(-?\d+) axis_dim=(\d+)"  # of index_select
)
_ABOVE = "Class values must be smaller than num_classes"  # of torch's one_hot
_BELOW = "Class values must be non-negative"
_PROBABILITY = "elements of target should be between 0 and 1"  # of its binary cross entropy


@dataclass(frozen=True)
class Misuse:
    """A number of the batch that an operation of the user's loss refuses."""

    is_outside: Callable[[Tensor], Tensor]  # returns which elements of a member are refused
    of_probabilities: bool  # whether targets may be fractions
    size: int | None  # what was indexed; None: unknown
    tensors: list[Tensor]  # in reach of the line that failed
    line: str

    def concerns(self, member: Tensor) -> bool:
        """Return whether a member of the batch was in reach, and has such a number."""
        outside = self.is_outside(member)
        if not outside.any():
            return False
        number = member[outside][0]
        return any(
            tensor.numel() == member.numel() and bool((tensor == number).any())
            for tensor in self.tensors
        )


def misuse_of(error: BaseException) -> Misuse | None:
    """Return what an error of torch says of a target; None if it is about something else."""
    text = str(error)
    about_index = _INDEX.search(text)
    size: int | None = None
    is_outside: Callable[[Tensor], Tensor]
    if about_index is not None:
        number = int(about_index[1] or about_index[3])
        size = int(about_index[2] or about_index[4])
        is_outside = partial(torch.eq, other=number)
    elif _ABOVE in text:
        is_outside = _is_largest
    elif _BELOW in text:
        is_outside = partial(torch.lt, other=0)
    elif _PROBABILITY in text:
        is_outside = odd
    else:
        return None
    frame, line = _innermost(error)
    if frame is None:
        return None
    tensors = [each for each in _tensors(list(frame.f_locals.values()), 3) if _is_readable(each)]
    where = f"{Path(frame.f_code.co_filename).name}, line {line}"
    return Misuse(is_outside, _PROBABILITY in text, size, tensors, where)


def _is_largest(values: Tensor) -> Tensor:
    """Return which values are the largest: torch says that one is too large, and not which."""
    return values == values.max()


def odd(values: Tensor) -> Tensor:
    """Return which values are not probabilities."""
    return ~((values >= 0) & (values <= 1))


def _innermost(error: BaseException) -> tuple[FrameType | None, int]:
    """Return the frame whose line failed, and the number of the line.

    Within torch, and in what notes calls of its losses, it is that of the caller.
    """
    found: FrameType | None = None
    line = 0
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith("torch.") and module != observed.__name__:
            found = trace.tb_frame
            line = trace.tb_lineno
        trace = trace.tb_next
    return found, line


def _tensors(values: list[Any], depth: int) -> Iterator[Tensor]:
    """Yield the tensors among values, and in the containers among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth and isinstance(value, Mapping):
            yield from _tensors(list(value.values()), depth - 1)
        elif depth and isinstance(value, list | tuple):
            yield from _tensors(list(value), depth - 1)


def _is_readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_nested and type(tensor) is Tensor
