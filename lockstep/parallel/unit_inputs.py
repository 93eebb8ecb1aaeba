"""Makes the gradient of a unit's input the same expression on every topology.

FSDP2 hands a unit's inputs through one autograd node, so what several uses inside of the unit contribute to an input's
gradient is added up there, before it meets what other units contribute. Where a decoder's blocks all use one `memory`,
twice each, one process adds v2, k2, v1, k1 in a row and FSDP2 adds (v2 + k2) + (v1 + k1): other bits. So each unit of
the model gets such a node on every topology, whether it is sharded there or not.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def join_uses_of_inputs(units: Iterable[tuple[str, nn.Module]]) -> None:
    """Add up the uses of each input within each unit before anything outside of it, in place.

    Args:
        units: (name, module) of what FSDP2 would gather at once.
    """
    for _, unit in units:
        unit.register_forward_pre_hook(_join, with_kwargs=True)


def _join(
    _unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    tensors = list(_differentiable((args, kwargs))) if torch.is_grad_enabled() else []
    if not tensors:
        return None
    if len(tensors) == 1:  # a plain view, which the unit may change in place
        joined: tuple[Tensor, ...] = (tensors[0].view_as(tensors[0]),)
    else:
        joined = _Joined.apply(*tensors)  # type: ignore[no-untyped-call]
    replaced: tuple[tuple[Any, ...], dict[str, Any]] = _replaced((args, kwargs), iter(joined))
    return replaced


class _Joined(torch.autograd.Function):
    """The identity on several tensors as one node, which hands their gradients on together, as FSDP2's does."""

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _members(tree: Any) -> Iterable[Any] | None:
    """The members of a container that FSDP2 looks into; None for anything else."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    if isinstance(tree, dict):
        return tree.values()
    return tree if isinstance(tree, tuple | list) else None


def _differentiable(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.requires_grad:
            yield tree
        return
    for member in _members(tree) or ():
        yield from _differentiable(member)


def _replaced(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of the containers in `tree`, with its differentiable tensors replaced in order."""
    if isinstance(tree, Tensor):
        return next(tensors) if tree.requires_grad else tree
    members = _members(tree)
    if members is None or not any(True for _ in _differentiable(tree)):
        return tree
    new = [_replaced(member, tensors) for member in members]
    if dataclasses.is_dataclass(tree):
        names = (field.name for field in dataclasses.fields(tree))
        return dataclasses.replace(tree, **dict(zip(names, new, strict=True)))  # type: ignore[type-var]
    if isinstance(tree, dict):
        return type(tree)(zip(tree, new, strict=True))
    return type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
