"""Tensors that lie in files, and are cut before they are read.

A `StoredTensor` stands for a value of a parameter. Cutting it (`chunk`, `narrow`) reads nothing;
`read` takes the bytes that are left from their file. A weight of two experts that a file has one by
one, in halves, of which a rank keeps the second expert:

    JoinedPart([StackedPart([gate 0, gate 1]), StackedPart([up 0, up 1])], dim=1)    [2, 8, 4]
    StoredTensor(…).chunk(2, 0)[1].read()      reads gate 1 and up 1                 [1, 8, 4]

Tests: tests/models/test_stored.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.division import ceil_div

Ranges = Sequence[range]  # what is wanted of each dim


class ReadablePart(Protocol):
    """Reads parts of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, ranges: Ranges) -> Tensor:
        """Return what lies at these ranges, one for each dim."""


@dataclass
class BytesRead:
    """Counts what this process has read from files of weights."""

    total: int = 0


@dataclass(frozen=True)
class FilePart:
    """Reads a tensor of a safetensors file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    counted: BytesRead = field(default_factory=BytesRead, compare=False)

    def read(self, ranges: Ranges) -> Tensor:
        """Read through safetensors' slices.

        The file is opened for each tensor: as long as it is open, what was read of it counts as
        memory of this process.
        """
        from safetensors import safe_open

        with safe_open(str(self.file), framework="pt", device="cpu") as opened:
            if not self.shape:
                value: Tensor = opened.get_tensor(self.key)
            else:
                where = tuple(slice(each.start, each.stop) for each in ranges)
                value = opened.get_slice(self.key)[where]
            self.counted.total += value.numel() * value.element_size()
            return value.clone()  # not a view of the file


@dataclass(frozen=True)
class JoinedPart:
    """Joins parts one after another along a dim."""

    parts: Sequence[ReadablePart]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = list(self.parts[0].shape)
        first[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(first)

    def read(self, ranges: Ranges) -> Tensor:
        """Read of each part what is wanted of it, if anything is."""
        wanted = ranges[self.dim]
        begin = 0
        joined: Tensor | None = None
        for part in self.parts:
            end = begin + part.shape[self.dim]
            overlap = range(max(wanted.start, begin), min(wanted.stop, end))
            if len(overlap):
                its = list(ranges)
                its[self.dim] = range(overlap.start - begin, overlap.stop - begin)
                value = part.read(its)
                if joined is None:
                    joined = value.new_empty([len(each) for each in ranges])
                joined.narrow(self.dim, overlap.start - wanted.start, len(overlap)).copy_(value)
            begin = end
        return _nothing(self.parts[0], ranges) if joined is None else joined


@dataclass(frozen=True)
class StackedPart:
    """Stacks parts of one shape along a new dim."""

    parts: Sequence[ReadablePart]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    def read(self, ranges: Ranges) -> Tensor:
        """Read those parts that are wanted, and of each what is wanted of it."""
        inner = [*ranges[: self.dim], *ranges[self.dim + 1 :]]
        stacked: Tensor | None = None
        for number, which in enumerate(ranges[self.dim]):
            value = self.parts[which].read(inner)
            if stacked is None:
                stacked = value.new_empty([len(each) for each in ranges])
            stacked.select(self.dim, number).copy_(value)
        if stacked is None:
            return _nothing(self.parts[0], inner).unsqueeze(self.dim).narrow(self.dim, 0, 0)
        return stacked


@dataclass(frozen=True)
class SwappedPart:
    """Swaps two dims of a part."""

    part: ReadablePart
    dims: tuple[int, int]

    def _swapped(self, values: Sequence[Any]) -> list[Any]:
        swapped = list(values)
        first, second = self.dims
        swapped[first] = values[second]
        swapped[second] = values[first]
        return swapped

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._swapped(self.part.shape))

    def read(self, ranges: Ranges) -> Tensor:
        return self.part.read(self._swapped(ranges)).transpose(*self.dims)


@dataclass(frozen=True)
class ComputedPart:
    """Calls a function that makes a tensor of files: all of it, whatever part is wanted."""

    make: Callable[[], Tensor]
    shape: tuple[int, ...]

    def read(self, ranges: Ranges) -> Tensor:
        tensor = self.make()
        for dim, wanted in enumerate(ranges):
            tensor = tensor.narrow(dim, wanted.start, len(wanted))
        return tensor.clone()


def _nothing(part: ReadablePart, ranges: Ranges) -> Tensor:
    """Return an empty tensor of a part's type."""
    empty = part.read([range(0) for _ in part.shape])
    return empty.new_empty([len(each) for each in ranges])


def all_of(part: ReadablePart) -> Tensor:
    """Return all of a part."""
    return part.read([range(size) for size in part.shape])


class StoredTensor:
    """Stands for a tensor in files, or a piece of one.

    It is cut like a torch.Tensor. Anything else that is asked of it is asked of the tensor, which
    is read for that.

    Args:
        part: where it lies.
        dtype: of what is read.
        ranges: the piece; unset: all.
    """

    def __init__(
        self, part: ReadablePart, dtype: torch.dtype, ranges: Ranges | None = None
    ) -> None:
        self._part = part
        self.dtype = dtype
        self._ranges = [range(size) for size in part.shape] if ranges is None else list(ranges)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(len(each) for each in self._ranges)

    @property
    def ndim(self) -> int:
        return len(self._ranges)

    def narrow(self, dim: int, start: int, length: int) -> "StoredTensor":
        ranges = list(self._ranges)
        ranges[dim] = ranges[dim][start : start + length]
        return StoredTensor(self._part, self.dtype, ranges)

    def chunk(self, chunks: int, dim: int = 0) -> list["StoredTensor"]:
        length = len(self._ranges[dim])
        size = max(ceil_div(length, chunks), 1)
        return [
            self.narrow(dim, begin, min(size, length - begin))
            for begin in range(0, max(length, 1), size)
        ]

    def read(self) -> Tensor:
        """Return the values, in memory of their own."""
        return self._part.read(self._ranges).to(self.dtype).contiguous()

    def clone(self, **_of_torch: Any) -> Tensor:
        return self.read()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __getitem__(self, where: Any) -> Tensor:
        return self.read()[where]

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Read it where a function of torch gets it."""
        named = {key: read(value) for key, value in (kwargs or {}).items()}
        return func(*map(_read_in, args), **named)


def _read_in(value: Any) -> Any:
    """Return an argument of a function with what lies in files read, also within a list."""
    if isinstance(value, list | tuple):
        return type(value)(map(read, value))
    return read(value)


def read(value: Any) -> Any:
    """Return a value as it is, read from its file if it lies in one."""
    return value.read() if isinstance(value, StoredTensor) else value


class StoredWeights:
    """Finds the weights of a model, by name, in files.

    A model on meta with this in its attribute `stored_weights` gets its values from there when it
    is placed.
    """

    def __init__(self, parts: Mapping[str, ReadablePart], counted: BytesRead) -> None:
        self._parts = dict(parts)
        self.counted = counted

    def __deepcopy__(self, _memo: Any) -> "StoredWeights":
        return self

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def tensor(self, name: str, dtype: torch.dtype) -> StoredTensor:
        """Return a weight, of which nothing is read yet."""
        return StoredTensor(self._parts[name], dtype)
