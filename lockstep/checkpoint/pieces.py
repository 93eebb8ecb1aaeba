"""Tensors as they lie on one rank: pieces of whole tensors.

A plain tensor is one piece, the whole. A DTensor is the block that this rank holds, with its offset in the whole. A
rank that holds nothing of a tensor (dimension 0 shorter than the mesh) has an empty piece, and still knows its shape.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.torch_internals import chunks_of
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """A block of a whole tensor, on this rank.

    Args:
        tensor: the block itself; it shares memory with what it was made from.
        shape: the shape of the whole tensor.
        offset: the index, in the whole, of the block's first element.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Nothing of a tensor that does have elements: not worth a place in a file."""
        return self.tensor.numel() == 0 and 0 not in self.shape

    @property
    def memory(self) -> tuple[object, ...]:
        """Equal for two pieces exactly if they are the same elements in memory (and there are any)."""
        t = self.tensor
        return (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype, self.shape, self.offset)

    def with_tensor(self, tensor: Tensor) -> "Piece":
        """The same block of the same whole, with its elements elsewhere."""
        return Piece(tensor, self.shape, self.offset)


@dataclass(frozen=True)
class Part:
    """One flat dictionary of tensors, as this rank holds it: the model, or the state of one optimizer.

    Args:
        pieces: canonical name → piece.
        aliases: canonical name → the other names of the same tensor.
        read: gets a block when it is written; the pieces then only say what there is.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    read: Callable[[str], Tensor] | None = None

    def resolve(self, name: str) -> Tensor:
        """The block of a name, as it is to be written."""
        return self.pieces[name].tensor if self.read is None else self.read(name)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """torch.bfloat16 for `bfloat16`; ValueError for a name that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def pieces_of(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """The piece of each tensor that this rank holds.

    Raises:
        UsageError: a value is no tensor, or has no memory to save (meta, sparse, quantized, pending reduction).
    """
    return {name: _piece(name, tensor) for name, tensor in tensors.items()}


def part_of(tensors: Mapping[str, Tensor], declared: Mapping[str, Sequence[str]]) -> Part:
    """The pieces of a model, each tensor once: names that hold the same memory become one canonical name with aliases.

    The canonical name is the first in the dictionary's order, as in `named_parameters`.

    Args:
        declared: canonical name → aliases known beforehand; needed where the names live on different ranks.
    """
    owner = {alias: name for name, aliases in declared.items() for alias in aliases}
    aliases = {name: tuple(others) for name, others in declared.items()}
    pieces: dict[str, Piece] = {}
    seen: dict[tuple[object, ...], str] = {}
    for given, piece in pieces_of(tensors).items():
        name = owner.get(given, given)
        if piece.tensor.numel():
            name = seen.setdefault(piece.memory, name)
        if name != given and given not in aliases.get(name, ()):
            aliases[name] = (*aliases.get(name, ()), given)
        pieces.setdefault(name, piece)
    return Part(pieces, aliases)


def _piece(name: str, tensor: Tensor) -> Piece:
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"{name} is a {type(tensor).__name__}, where a checkpoint holds tensors", fix="put it in `state`"
        )
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(
            f"{name} can't be in a checkpoint: it is on device {tensor.device} with layout {tensor.layout}",
            why="only dense tensors with values are stored",
        )
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            chunk = chunks_of(tensor)
            return Piece(tensor.to_local().detach(), tuple(tensor.shape), tuple(chunk.offsets))
        return Piece(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor, row by row, as bytes; no copy if it is contiguous on CPU."""
    assert sys.byteorder == "little"
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
