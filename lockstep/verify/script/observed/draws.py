"""Random numbers that a script's loop draws, keyed to the batch for which they are drawn.

A loop may draw noise, times, latents, crops or a mixture for each batch, seeded by rank. One
process that is given the samples of all ranks is given the ranks' numbers, too. Two ranks with
batches of two samples, each of which draws `torch.randn(2, 3)` at line 40 of train.py for its
first batch:

    rank 0, batch 0, train.py:40, torch.randn → 2 × 3 numbers
    rank 1, batch 0, train.py:40, torch.randn → 2 × 3 numbers
    one process, whose batch 0 is both        → 4 × 3 numbers, in the order of the samples

Permutations are joined so that each permutes its own rank's samples. A number for a whole batch,
that each rank draws otherwise (the share of a mixup), can be given to one process only if it takes
a single rank's samples.

Tests: tests/verify/test_draws.py, tests/verify/test_script.py
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.failures.failure import short_path
from lockstep.torch_compat.draw_patches import PERMUTATIONS, patch_draws

BatchKey = tuple[int, int]
"""A loader and the index of its batch; without a loader -1 and the number of the pass."""

EARLY: BatchKey = (-2, 0)  # before there is a loop
_MOST_BYTES = 1 << 28  # of the numbers of one draw that are kept
_READING = "/torch/utils/data/"  # what a data set draws is in its samples


@dataclass(frozen=True)
class LoopDraw:
    """Random numbers that a line of a script has drawn."""

    batch: BatchKey  # the last batch that was read
    line: str  # file and line of the script's own code
    name: str  # torch.randn, numpy.random.beta …
    number: int  # how often the line had drawn so for this batch
    value: Any  # a tensor on the CPU, an array, a list or a number; None if it is too large
    outside: bool  # whether it was drawn outside of modules
    after: bool = False  # whether it was drawn between a backward pass and the update

    @property
    def is_permutation(self) -> bool:
        """Return whether it permutes the samples of a batch."""
        return self.name in PERMUTATIONS

    @property
    def is_floating(self) -> bool:
        """Return whether it is of numbers that are not positions or classes."""
        if isinstance(self.value, Tensor):
            return self.value.is_floating_point()
        if isinstance(self.value, np.ndarray):
            return bool(self.value.dtype.kind == "f")
        each = self.value if isinstance(self.value, list) else [self.value]
        return any(isinstance(number, float) for number in each)

    @property
    def rows(self) -> int:
        """Number of rows; 0 if it is a single number."""
        shape = _shape(self.value)
        return shape[0] if shape else 0

    @property
    def place(self) -> str:
        """Return the operation that drew, and its line."""
        return f"{self.name} at {self.line}"

    def has_value_of(self, other: "LoopDraw") -> bool:
        """Return whether another draw has the same numbers."""
        return _equal(self.value, other.value)


Draws = Mapping[int, Sequence[LoopDraw]]
"""Rank → what it drew."""


class ObservedDraws:
    """Notes what a script draws, and gives it the numbers of the ranks whose samples it has.

    Args:
        given: what ranks drew, by rank.
        sources: returns the rank and batch of each part of the last batch that was read.
        batch: returns the last batch that was read.
        note: is given each draw.
        unkeyed: is given the place of a draw whose numbers differ on ranks and can't be joined.
        in_module: returns whether a module is being called.
        draw: makes a draw.
        is_own: returns whether a file is the script's own.
        note_early: is given each draw of the script's own before there is a loop.
    """

    def __init__(
        self,
        given: Draws,
        sources: Callable[[], Sequence[tuple[int, int]]],
        batch: Callable[[], BatchKey],
        note: Callable[[LoopDraw], None],
        unkeyed: Callable[[str], None],
        in_module: Callable[[], bool],
        draw: Callable[[Callable[[], Any]], Any],
        is_own: Callable[[str], bool],
        note_early: Callable[[LoopDraw], None],
    ) -> None:
        self.count = 0  # of all draws, of libraries' too
        self._active = False
        self._sources = sources
        self._batch = batch
        self._note = note
        self._unkeyed = unkeyed
        self._in_module = in_module
        self._draw = draw
        self._is_own = is_own
        self._note_early = note_early
        self._early_bytes = 0
        self._counts: Counter[tuple[BatchKey, str, str]] = Counter()
        self._given = {
            (rank, draw.batch, draw.line, draw.name, draw.number): draw
            for rank, draws in given.items()
            for draw in draws
        }
        # of the one rank whose draws of that time are given
        self._given_early = [
            {(draw.batch, draw.line, draw.name, draw.number): draw for draw in draws}
            for draws in given.values()
            if any(draw.batch == EARLY for draw in draws)
        ]
        patch_draws(self._drawn)

    def begin(self) -> None:
        """Note draws from now on.

        What was drawn before a batch is read, or an optimizer made, is first values or data.
        """
        self._active = True

    def _drawn(self, name: str, call: Callable[[], Any]) -> Any:
        """Return what a call draws, or what was drawn for the same samples, joined, if it is known.

        Each draw of the script's own lines is noted by its batch, its line, and its number there.
        """
        self.count += 1
        value = self._draw(call)
        if not self._active:
            return self._drawn_early(name, value, sys._getframe(3))
        line = self._line(sys._getframe(2))
        if not line:
            return value
        batch = self._batch()
        number = self._counts[batch, line, name]
        self._counts[batch, line, name] += 1
        parts = [
            self._given.get((rank, (batch[0], index), line, name, number))
            for rank, index in self._sources()
        ]
        known = [part for part in parts if part is not None and part.value is not None]
        if parts and len(known) == len(parts):
            joined = join(known, _shape(value), grows=batch[0] < 0)
            if joined is None:
                self._unkeyed(known[0].place)
            else:
                value = _replaced(value, joined)
        self._note(LoopDraw(batch, line, name, number, _kept(value), not self._in_module()))
        return value

    def _drawn_early(self, name: str, value: Any, frame: FrameType) -> Any:
        """Return what is drawn before there is a loop, or what a rank drew there, if it is given.

        First values of modules are drawn by torch's own code, and not noted.
        """
        if not self._is_own(frame.f_code.co_filename):
            return value
        line = f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        number = self._counts[EARLY, line, name]
        self._counts[EARLY, line, name] += 1
        known = [given.get((EARLY, line, name, number)) for given in self._given_early]
        if known and known[0] is not None and _shape(known[0].value) == _shape(value):
            value = _replaced(value, known[0].value)
        kept = _kept(value)
        self._early_bytes += _bytes_of(kept)
        if kept is not None and self._early_bytes <= _MOST_BYTES:
            self._note_early(LoopDraw(EARLY, line, name, number, kept, not self._in_module()))
        return value

    def _line(self, frame: FrameType | None) -> str:
        """Return the script's own line that draws; empty if a loader reads, or there is none."""
        line = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if _READING in file:
                return ""
            if not line and self._is_own(file):
                line = f"{short_path(file)}:{frame.f_lineno}"
            frame = frame.f_back
        return line


def join(draws: Sequence[LoopDraw], shape: tuple[int, ...] | None, *, grows: bool) -> Any:
    """Return what one process is given in place of numbers of a shape; None if they don't fit.

    Args:
        draws: of the ranks whose samples it has, in their order.
        shape: of the numbers that it draws by itself.
        grows: whether one process may be given more rows than it asked for.
    """
    values = [draw.value for draw in draws]
    shapes = [_shape(value) for value in values]
    first = shapes[0]
    if first is None or not first:  # one number, or an object
        return values[0] if all(_equal(value, values[0]) for value in values) else None
    if shape == first and all(_equal(value, values[0]) for value in values):
        return values[0]
    rows = sum(each[0] for each in shapes if each)
    if any(each is None or each[1:] != first[1:] for each in shapes):
        return None
    if shape is None or shape[1:] != first[1:] or not (shape[0] == rows or grows):
        return None
    if draws[0].is_permutation:
        begins = np.cumsum([0, *(each[0] for each in shapes[:-1] if each)]).tolist()
        values = [
            [at + begin for at in value] if isinstance(value, list) else value + begin
            for value, begin in zip(values, begins, strict=True)
        ]
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    if isinstance(values[0], list):
        return [element for value in values for element in value]
    return np.concatenate(values)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of numbers; None for what is not a number."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    if isinstance(value, list):
        return (len(value),)
    return () if isinstance(value, int | float | np.generic) else None


def _equal(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor):
        return isinstance(other, Tensor) and torch.equal(mine, other)
    if isinstance(mine, np.ndarray):
        return np.array_equal(mine, other)
    return bool(mine == other)


def _kept(value: Any) -> Any:
    """Return a copy of what was drawn, which later writes do not change."""
    if isinstance(value, Tensor):
        size = value.numel() * value.element_size()
        return None if size > _MOST_BYTES else value.detach().cpu().clone()
    if isinstance(value, np.ndarray):
        return None if value.nbytes > _MOST_BYTES else value.copy()
    if isinstance(value, list):
        return list(value) if all(isinstance(each, int | float) for each in value) else None
    return value if isinstance(value, int | float | np.generic) else None


def _bytes_of(value: Any) -> int:
    """Return the bytes of what is kept of a draw."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return int(value.nbytes) if isinstance(value, np.ndarray) else sys.getsizeof(value)


def _replaced(value: Any, given: Any) -> Any:
    """Return `given` as the call would have returned it: in the tensor or array that it made."""
    if isinstance(value, Tensor) and isinstance(given, Tensor):
        if value.shape != given.shape:
            return given.to(value.device, value.dtype)
        with torch.no_grad():
            value.copy_(given)
        return value
    if isinstance(value, np.ndarray) and value.shape == np.shape(given):
        value[...] = given
        return value
    return given


def drawn_alike(
    ranks: Sequence[Sequence[LoopDraw]],
    rows: Mapping[BatchKey, Collection[int]],
    parameters: Collection[tuple[int, ...]] = (),
) -> list[str]:
    """Return the places at which all ranks draw the same rows for batches of other samples.

    What is drawn for gradients, as the noise of private training, is rightly the same: it comes
    after the backward pass, or has the shapes of several parameters.

    Args:
        ranks: what each rank drew.
        rows: batch whose samples differ from rank to rank → numbers of samples in such a batch.
            Numbers with other numbers of rows are of the whole batch, which ranks may well share.
        parameters: the shapes of the models' parameters.
    """
    by_place: list[dict[str, list[LoopDraw]]] = []
    for draws in ranks:
        of_rank: dict[str, list[LoopDraw]] = {}
        for draw in draws:
            is_of_samples = draw.rows in rows.get(draw.batch, ())
            if draw.outside and is_of_samples and not draw.is_permutation and not draw.after:
                of_rank.setdefault(draw.place, []).append(draw)
        by_place.append(of_rank)
    shapes: dict[str, set[Any]] = {}
    for draw in ranks[0]:
        shapes.setdefault(draw.place, set()).add(_shape(draw.value))
    of_parameters = {
        place for place, drawn in shapes.items() if len(drawn) > 1 and drawn <= set(parameters)
    }
    alike = []
    for place, mine in by_place[0].items():
        if place in of_parameters:
            continue
        others = [of_rank.get(place, []) for of_rank in by_place[1:]]
        numbers = sum(int(np.prod(_shape(draw.value) or ())) for draw in mine)
        same = all(
            len(other) == len(mine)
            and all(_equal(a.value, b.value) for a, b in zip(mine, other, strict=True))
            for other in others
        )
        varies = any(not _equal(draw.value, mine[0].value) for draw in mine[1:])
        if same and varies and numbers >= _ENOUGH:
            alike.append(place)
    return alike


def drawn_apart(ranks: Sequence[Sequence[LoopDraw]]) -> list[str]:
    """Return the places at which ranks draw numbers of their own outside of modules."""
    first = {(d.batch, d.line, d.name, d.number): d for d in ranks[0] if d.outside}
    places: dict[str, None] = {}
    for other in ranks[1:]:
        for draw in other:
            mine = first.get((draw.batch, draw.line, draw.name, draw.number))
            if mine is not None and not _equal(mine.value, draw.value):
                places[draw.place] = None
    return list(places)


_ENOUGH = 8  # numbers that are not the same by chance
