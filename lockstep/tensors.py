"""What this rank holds of a tensor, and a tensor's bits.

Imports torch and nothing of Lockstep: scripts that `lockstep verify` observes load it, too.

Tests: tests/test_tensors.py, tests/process_group/test_mesh.py,
tests/parallel/replicas/test_divergence.py
"""

import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_chunk(full: torch.Tensor, dim: int, size: int, coordinate: int) -> torch.Tensor:
    """Return the shard of `full` that FSDP2 gives to `coordinate` of `size` ranks.

    It is the one of `torch.chunk` along `dim`.
    """
    chunks = full.chunk(size, dim)
    if coordinate < len(chunks):
        return chunks[coordinate]
    return full.narrow(dim, 0, 0)


def shard_like(full: Tensor, mine: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of it."""
    if isinstance(mine, DTensor):
        mesh = mine.device_mesh
        coordinate = mine.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(mine.placements):
            if isinstance(placement, Shard):
                full = local_chunk(full, placement.dim, mesh.size(axis), coordinate[axis])
    return full


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers; 0-dim int64, modulo 2⁶⁴."""
    return as_integers(tensor).sum(dtype=torch.int64)


def as_integers(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers of its elements' size, 1-dim; two a complex number."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def with_other_last_bits(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor whose elements are moved up or down by their last bit, at random."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)


def bytes_of(tree: Any) -> bytes:
    """Return bytes that tell a nested sample from others, the same in every process."""
    if isinstance(tree, Tensor):
        plain = tree.detach().cpu().contiguous()
        return (
            f"{plain.dtype}{tuple(plain.shape)}".encode()
            + plain.flatten().view(torch.uint8).numpy().tobytes()
        )
    if isinstance(tree, np.ndarray):
        return f"{tree.dtype}{tree.shape}".encode() + np.ascontiguousarray(tree).tobytes()
    if isinstance(tree, Mapping):
        return (
            b"{"
            + b",".join(bytes_of(key) + b":" + bytes_of(value) for key, value in tree.items())
            + b"}"
        )
    if isinstance(tree, list | tuple):
        return b"[" + b",".join(map(bytes_of, tree)) + b"]"
    if isinstance(tree, str | bytes | int | float | bool | type(None)):
        return repr(tree).encode()
    with suppress(Exception):
        return pickle.dumps(tree)
    return repr(type(tree)).encode()
