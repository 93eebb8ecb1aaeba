"""Finds the user's own lines: where a script makes, calls and changes what a step is made of.

A mistake is named with the line at which it can be seen: a loader that ranks do not share out is
named where it is made, a gradient that nothing divides where the backward pass begins. Files of
libraries, of Python and of `lockstep verify` are not the user's own.

    train.py:40   main          trainer.fit(model, loader)     own
    …/lightning/trainer.py:580                                 a library's
    train.py:22   training_step self.body(inputs)              own, and nearest to the call
    …/torch/nn/modules/module.py:1775                          torch's

Tests: tests/verify/test_own_lines.py, tests/verify/test_script.py
"""

import inspect
import linecache
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from lockstep.failures.failure import short_path

_NOT_OWN = re.compile(r"<frozen |/lib/python\d|/site-packages/|<string>")
_OF_TORCH = re.compile(
    r"/torch/|/lockstep/torch_compat/(script_patches|parallel_patches|draw_patches|replaced_calls)\.py$"
)
_READING = "/torch/utils/data/"
_WRAPPER = "/torch/nn/parallel/"
_PACKAGE = str(Path(__file__).parents[1]) + "/"


@cache
def is_own(file: str) -> bool:
    """Return whether a file is the user's own."""
    return not _NOT_OWN.search(file) and not file.startswith(_PACKAGE)


def own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's own code, from the innermost on."""
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def own_line() -> str:
    """Return the user's own line that is nearest to this call, as `train.py:40`.

    Empty if no code of the user's own is being run.
    """
    return _line_of(next(own_frames(sys._getframe(1)), None))


def is_reading() -> bool:
    """Return whether a loader calls, which may read more batches ahead on one side."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _READING in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def is_in_wrapper() -> bool:
    """Return whether torch's DistributedDataParallel calls, before any code of the user's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        if _WRAPPER in frame.f_code.co_filename and frame.f_code.co_name == "_sync_module_buffers":
            return True
        frame = frame.f_back
    return False


def line_outside_of_modules() -> str:
    """Return the user's own line that makes a module, in no constructor of another module."""
    for frame in own_frames(sys._getframe(1)):
        is_constructor = frame.f_code.co_name == "__init__"
        if not (is_constructor and isinstance(frame.f_locals.get("self"), nn.Module)):
            return _line_of(frame)
    return ""


def line_of_definition(function: Any) -> str:
    """Return the user's own line at which a function or method is defined; empty if it is not."""
    code = getattr(function, "__code__", None)
    if code is None or not is_own(code.co_filename):
        return ""
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def code_at(line: str) -> str:
    """Return the source at a line such as `train.py:40`; empty if it can't be read."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdecimal() else ""


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def order_of(loader: Any) -> str:
    """Return where the script's own sampler or stream orders a loader's samples; else empty."""
    for part in (
        getattr(loader, "batch_sampler", None),
        getattr(loader, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        line = line_of_definition(getattr(type(part), "__iter__", None))
        if line:
            return line
    return ""


def line_of_code() -> str:
    """Return the line of the user's code, or of a model that ships, that calls torch.

    "" if something else does. What stands in the place of torch's own operators, as that of `*`, is
    passed over.
    """
    frame = inspect.currentframe()
    frame = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    while frame is not None and _OF_TORCH.search(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    ours = "/lockstep/" in file and (
        "/lockstep/models/" not in file or file.endswith("/protocol.py")
    )
    return "" if ours else f"{short_path(file)}:{frame.f_lineno}"
