"""Finds the user's own lines: where a script makes, calls and changes what a step is made of.

A mistake is named with the line at which it can be seen: a loader that ranks do not share out is
named where it is made, a gradient that nothing divides where the backward pass begins. Files of
libraries, of Python and of `lockstep verify` are not the user's own.

    train.py:40   main          trainer.fit(model, loader)     own
    …/lightning/trainer.py:580                                 a library's
    train.py:22   training_step self.body(inputs)              own, and nearest to the call
    …/torch/nn/modules/module.py:1775                          torch's

Tests: tests/verify/test_places.py, tests/verify/test_script.py
"""

import inspect
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from lockstep.launch.failures import short_path

_NOT_OWN = re.compile(r"<frozen |/lib/python\d|/site-packages/|<string>")
_READING = "/torch/utils/data/"
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


@dataclass
class ScriptPlaces:
    """Keeps lines of a script, in one process of it."""

    # loader → where it is made, or where the script's own sampler or stream orders its samples
    loaders: dict[int, str] = field(default_factory=dict)
    reads: dict[int, str] = field(default_factory=dict)  # loader → where its last batch was read
    # first letters of its parameters' names → where a model was called last
    models: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)  # the same → where the model was made
    wrapped: set[str] = field(default_factory=set)  # the same, of models whose wrapper reduces
    optimizers: list[str] = field(default_factory=list)  # where each is made
    schedule: str = ""  # where a learning rate schedule was stepped last
    loss: str = ""  # where a pipeline's loss is defined
    hook: str = ""  # where a communication hook was registered
    seeds: list[tuple[str, str]] = field(default_factory=list)  # line and seed, in order

    def note_schedule(self, line: str) -> None:
        """Note where a learning rate schedule is stepped."""
        self.schedule = line

    def note_loss(self, line: str) -> None:
        """Note where a pipeline's loss is defined."""
        self.loss = line

    def note_hook(self, line: str) -> None:
        """Note where a communication hook is registered."""
        self.hook = line

    def of_parameter(self, lines: dict[str, str], name: str) -> str:
        """Return the line that is kept for the model of a parameter."""
        begins = [prefix for prefix in lines if name.startswith(prefix)]
        return lines[max(begins, key=len)] if begins else ""

    def is_wrapped(self, name: str) -> bool:
        """Return whether the gradient of a parameter is reduced by a wrapper of its model."""
        begins = [prefix for prefix in self.models if name.startswith(prefix)]
        return bool(begins) and max(begins, key=len) in self.wrapped


def seed_that_differs(places: Sequence[ScriptPlaces]) -> str:
    """Return the first line that seeds ranks otherwise; empty if none does."""
    for seeds in zip(*(place.seeds for place in places), strict=False):
        line: str = seeds[0][0]
        if any(seed != seeds[0][1] for _, seed in seeds):
            return line
    return ""


def seed_that_agrees(places: Sequence[ScriptPlaces]) -> str:
    """Return the last line that seeds ranks, if it seeds all alike; else empty."""
    last = [place.seeds[-1] for place in places if place.seeds]
    if len(last) < len(places) or any(seed != last[0] for seed in last):
        return ""
    return last[0][0]


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

    "" if something else does.
    """
    frame = inspect.currentframe()
    frame = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    ours = "/lockstep/" in file and (
        "/lockstep/models/" not in file or file.endswith("/protocol.py")
    )
    return "" if ours else f"{short_path(file)}:{frame.f_lineno}"
