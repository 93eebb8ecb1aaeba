"""Values and samples of an observed script.

These are pieces of tensors, settings, fingerprints, and what its loaders read.

Tests: tests/verify/test_script.py
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lockstep.tensors import bytes_of, local, shard_like
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.verify.script.record import TensorPiece


def give(parameter: Tensor, ranks: Sequence[Tensor]) -> int | None:
    """Write a value into a parameter, which may be cut or flattened.

    Return the dim along which parts were joined.

    `ranks` has the whole value; or each rank's part of it, where a script cuts its parameters
    itself.
    """
    mine = local(parameter.detach())
    value = ranks[0]
    joined = None
    if len(ranks) > 1 and value.shape != parameter.shape and value.ndim == parameter.ndim:
        for dim in range(value.ndim):
            sizes = [part.shape[dim] for part in ranks]
            if sum(sizes) == parameter.shape[dim] and len({part.ndim for part in ranks}) == 1:
                value = torch.cat(list(ranks), dim)
                joined = dim
                break
    part = shard_like(value, parameter) if isinstance(parameter, DTensor) else value
    if part.shape != mine.shape:  # FSDP1 on one process; its padding is at the end
        part = part.flatten()[: mine.numel()].view(mine.shape)
    mine.copy_(part)
    return joined


def piece_of(tensor: Tensor, *, flat: bool = False) -> TensorPiece:
    """Return a copy of this rank's part of a tensor.

    `flat`: it is a piece of a tensor that FSDP1 has flattened.
    """
    value = local(tensor).detach().cpu().clone()
    if value.is_sparse:  # as gradients of embeddings may be
        value = value.to_dense()
    if value.is_floating_point() and value.dtype != torch.float64:
        value = value.float()
    cuts: list[tuple[int, int, int]] = []
    # FSDP's over tensor parallel: cut after those that follow them
    strided: list[tuple[int, int, int]] = []
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(tensor.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None and tensor.device_mesh.size(axis) > 1:
                kind = cuts if type(placement) is Shard else strided
                kind.append((dim, tensor.device_mesh.size(axis), coordinate[axis]))
        cuts += strided
    return TensorPiece(value, tuple(tensor.shape), tuple(cuts), flat)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in a parameter group."""
    settings = {}
    for key, value in group.items():
        if key == "lr" and isinstance(value, Tensor):
            value = float(value)
        simple = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "params" and (
            simple or (isinstance(value, tuple) and all(isinstance(v, float) for v in value))
        ):
            settings[key] = value
    return settings


def generator_states() -> dict[str, Any]:
    """Return the states of the generators, by name."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    states["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["CUDA"] = torch.cuda.get_rng_state()
    return states


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]


def fingerprint(tree: Any) -> str:
    """Return what tells a sample from others, the same in every process."""
    return _digest(bytes_of(tree))


def rows(tree: Any) -> list[str]:
    """Return the fingerprints of the rows of a model's inputs.

    A row is taken from all tensors with as many rows as the first.
    """
    tensors = [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.numel()
    ]
    if not tensors:
        return []
    count = len(tensors[0])
    return [
        _digest(b"".join(bytes_of(t[row]) for t in tensors if len(t) == count))
        for row in range(count)
    ]


def elements(tree: Any) -> int:
    """Return a sum that identifies the elements of a tree's tensors, in whatever order."""
    total = 0
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex():
            bits = leaf.detach().cpu().double().flatten().view(torch.int64)
            mixed = bits * -7046029254386353131  # odd, so that it loses nothing; int64 wraps around
            total += int((mixed ^ (mixed >> 29)).mul(-4658895280553007687).sum())
    return total % 2**64


@torch.no_grad()
def two_numbers(output: Any) -> tuple[float, float]:
    """Return the norm of a module's output, and a weighted sum of its elements.

    In the sum, each element has a weight of its own.
    """
    norm = weighed = 0.0
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            values = local(leaf).detach().cpu().double().flatten()
            norm += float(values.norm())
            weighed += float(values @ torch.linspace(1.0, 2.0, len(values), dtype=torch.float64))
    return norm, weighed
