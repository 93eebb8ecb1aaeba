"""The norm of each layer's gradient, over all shards and stages: for looking at, on demand."""

import re
from typing import Any

import torch
import torch.distributed as dist

from lockstep.parallel.numbers import Number
from lockstep.parallel.parallel_model import ParallelModel, local

_NUMBER = re.compile(r"\.\d+(\.|$)")


def layer_of(name: str) -> str:
    """`layers.3.attention.weight` → `layers.3`; names without a number → their first part."""
    found = _NUMBER.search(name)
    return name[: found.end()].rstrip(".") if found else name.partition(".")[0]


def layer_norms(placed: ParallelModel, factor: Number) -> dict[str, float]:
    """Layer → 2-norm of its gradient times `factor`. All ranks call it together; waits for the device, and for them."""
    squares: dict[str, Any] = {}
    counted = placed.parameters if placed.counted is None else placed.counted
    for name, parameter in placed.parameters.items():
        if name in counted and parameter.grad is not None:
            square = local(parameter.grad).double().square().sum()
            squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + square
    names = list(squares)
    values = torch.stack([squares[name] for name in names]).tolist() if names else []
    sums = dict(zip(names, values, strict=True))
    for group in placed.norm_groups:
        sums = _summed(sums, group)
    scale = float(factor)
    return {name: float(f"{value**0.5 * scale:.6g}") for name, value in sums.items()}


def _summed(sums: dict[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Added up by name: ranks along a pipeline hold different layers."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, sums, group=group)
    result: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            result[name] = result.get(name, 0.0) + value
    return result
