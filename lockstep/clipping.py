"""Clips gradients by value and per unit.

Clipping to a global norm is part of the step's own scaling.

Adaptive clipping bounds each unit's gradient by its weights: g is multiplied by min(1, λ · max(‖w‖,
ε) / ‖g‖). A unit computes one output: a row of a matrix (the first dim), a whole vector. If
sharding splits a unit, its squares are summed over the shards. Source: Brock, De, Smith, Simonyan
2021, "High-Performance Large-Scale Image Recognition Without Normalization".

A weight [2, 2] with the rows [3, 4] and [0.3, 0.4], of the norms 5 and 0.5, and the gradient [3, 4]
in both: with λ = 0.1 the first row's is multiplied by 0.1 · 5 / 5, the second's by 0.1 · 0.5 / 5.

    >>> weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    >>> weight.grad = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    >>> clipped = clip_adaptively([weight], 0.1, groups=[], device=torch.device("cpu"))
    >>> weight.grad, clipped.item()
    (tensor([[0.3000, 0.4000],
            [0.0300, 0.0400]]), 1.0)

Tests: tests/test_clipping.py, tests/parallel/test_worked_examples.py
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lockstep.machine import accelerator
from lockstep.tensors import local
from lockstep.torch_compat import foreach

_LEAST_WEIGHT_NORM = 1e-3  # ε: units that start at zero can still grow


def clip_by_value(
    gradients: Sequence[Tensor],
    limit: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> Tensor:
    """Clip each element to [−limit, limit], in place.

    Return the fraction of changed ones on all ranks, 0-dim.
    """
    counts = torch.zeros(2, dtype=accelerator.widest_float(device), device=device)
    for gradient in gradients:
        counts[0] += (gradient.abs() > limit).sum()
        counts[1] += gradient.numel()
    if gradients:
        foreach.clamp_min_(list(gradients), -limit)
        foreach.clamp_max_(list(gradients), limit)
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts[0] / counts[1].clamp(min=1)


@torch.no_grad()
def clip_adaptively(
    parameters: Iterable[nn.Parameter],
    ratio: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    *,
    exact: bool = False,
) -> Tensor:
    """Clip `.grad` of each parameter by λ = `ratio`, in place.

    Return the fraction of changed units, 0-dim.

    Every rank of the groups calls it. Parameters are plain tensors, or DTensors; those without a
    gradient are left out. With `exact`, squares are summed as integers: the result has the same
    bits however units are split.
    """
    tensors = [_Units.of(p) for p in parameters if p.grad is not None]
    weights = _norms([t.weight for t in tensors], tensors, exact)
    gradients = _norms([t.gradient for t in tensors], tensors, exact)
    counts = torch.zeros(2, dtype=accelerator.widest_float(device), device=device)
    for units, weight, gradient in zip(tensors, weights, gradients, strict=True):
        scale = torch.clamp(ratio * weight.clamp(min=_LEAST_WEIGHT_NORM) / gradient, max=1.0)
        target = units.target
        target.mul_(scale.view(-1, *[1] * (target.ndim - 1)) if target.ndim else scale.squeeze(0))
        # A split unit counts once on each shard, in the numerator and in the denominator.
        counts[0] += (scale < 1.0).sum()
        counts[1] += scale.numel()
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts[0] / counts[1].clamp(min=1)


@dataclass(frozen=True)
class _Units:
    """This rank's part of one parameter as [units, elements per unit]."""

    weight: Tensor
    gradient: Tensor
    target: Tensor  # the gradient in its own shape
    group: dist.ProcessGroup | None  # over which units are split; None: they are complete here
    elements: int  # of a complete unit

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_Units":
        """Return a parameter's units as they lie on this rank."""
        assert parameter.grad is not None
        weight = local(parameter.detach())
        gradient = local(parameter.grad)
        shape = parameter.shape  # the complete one, of a DTensor, too
        elements = math.prod(shape if len(shape) < 2 else shape[1:])
        rows = (
            (1, -1)
            if len(shape) < 2
            else (gradient.shape[0], gradient.numel() // max(1, gradient.shape[0]))
        )
        # Shards along dim 0 are complete rows; along another dim, or of a vector, they split units.
        group = None
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if isinstance(placement, Shard) and (placement.dim > 0 or len(shape) < 2):
                    group = parameter.device_mesh.get_group(axis)
        return cls(weight.reshape(rows), gradient.reshape(rows), gradient, group, elements)


def _norms(pieces: list[Tensor], units: list[_Units], exact: bool) -> list[Tensor]:
    """Return the norm of each unit: one float32 tensor [units] per parameter."""
    if not exact:
        squares = [piece.double().square().sum(1) for piece in pieces]
        return [s.sqrt().float() for s in _over_shards(squares, units, dist.ReduceOp.SUM)]
    # Squares as integer multiples of a unit that is the same on all shards: these sum to the same
    # in any order.
    largest = [p.abs().amax(1) if p.shape[1] else p.new_zeros(p.shape[0]) for p in pieces]
    largest = _over_shards(largest, units, dist.ReduceOp.MAX)
    totals = []
    for piece, top, unit in zip(pieces, largest, units, strict=True):
        bits = 62 - math.ceil(math.log2(max(2, unit.elements)))
        coarse = torch.ldexp(
            torch.ones_like(top, dtype=torch.float64), bits - 2 * torch.frexp(top)[1]
        )
        totals.append(
            ((piece.double().square() * coarse.unsqueeze(1)).round().long().sum(1), coarse)
        )
    sums = _over_shards([total for total, _ in totals], units, dist.ReduceOp.SUM)
    return [
        (s.double() / coarse).sqrt().float() for s, (_, coarse) in zip(sums, totals, strict=True)
    ]


def _over_shards(
    values: list[Tensor], units: list[_Units], op: dist.ReduceOp.RedOpType
) -> list[Tensor]:
    """Reduce the values of split units, in one all-reduce per group."""
    reduced = list(values)
    groups = {unit.group.group_name: unit.group for unit in units if unit.group is not None}
    for name, group in groups.items():
        places = [
            i
            for i, unit in enumerate(units)
            if unit.group is not None and unit.group.group_name == name
        ]
        flat = torch.cat([values[i] for i in places])
        dist.all_reduce(flat, op=op, group=group)
        pieces = torch.split(flat, [values[i].numel() for i in places])
        reduced = [
            pieces[places.index(i)] if i in places else value for i, value in enumerate(reduced)
        ]
    return reduced
