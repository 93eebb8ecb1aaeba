"""Settings for the same bits on any ranks: deterministic kernels, one expression for each gradient.

This holds among processors of one kind: a CPU with wider vectors, or another GPU, has other
kernels.

Two layers that take the same x, each in two ways, as keys and values do: x.grad is a sum of four.
Autograd adds them as the backward pass comes by, from the last layer to the first:

    one process    ((v2 + k2) + v1) + k1
    FSDP2          (v2 + k2) + (v1 + k1)

FSDP2 passes a unit's inputs through one autograd node, where the uses inside the unit are added up
before they go on. `join_uses_of_inputs` gives each unit such a node on every topology, so all of
them add as the second line does.

Tests: tests/parallel/reproducible/test_tree.py, tests/parity/test_same_bits.py
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.execution.passes import AroundMicroBatch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def switch_on(device: torch.device) -> list[str]:
    """Use deterministic kernels, and the same number of threads on every rank.

    Return lines to log at start.
    """
    # Else cuBLAS may take another workspace, and with it another order of additions, where several
    # streams run. It reads the variable when it starts.
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it
    torch.backends.cudnn.benchmark = False
    if device.type != "cpu":
        return ["reproducible: deterministic kernels"]
    # Each thread reduces a slice (of LayerNorm's and embedding's gradients, of sums): another
    # number of threads is another order of additions.
    torch.set_num_threads(1)
    return ["reproducible: deterministic kernels, one thread a rank"]


class DeterministicKernels(AroundMicroBatch):
    """The explanation of torch's error about an operation without a deterministic kernel."""

    def failed(self, error: BaseException) -> Exception | None:
        return explain_kernel(error)


def explain_kernel(error: BaseException) -> UsageError | None:
    """Return an error that names the operation without a deterministic kernel.

    None for other errors.
    """
    match = re.search(r"(\S+) does not have a deterministic implementation", str(error))
    if match is None or not isinstance(error, RuntimeError):
        return None
    what = f"{match[1]} has no deterministic kernel on this device"
    fix = "use another operation in the model, or set distributed.reproducible: false"
    return UsageError(what, where="distributed.reproducible", fix=fix)


def join_uses_of_inputs(units: Iterable[nn.Module]) -> None:
    """Make each FSDP2 unit add up its uses of an input before any outside of it, in place."""
    for unit in units:
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
    return _replaced((args, kwargs), iter(joined))  # type: ignore[no-any-return]


class _Joined(torch.autograd.Function):
    """The identity on several tensors as one node, which passes on their gradients together.

    FSDP2's node does the same.
    """

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _members(tree: Any) -> Iterable[Any] | None:
    """Return the members of a container that FSDP2 looks into; None for anything else."""
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
    """Return a copy of the containers in `tree`, with differentiable tensors replaced in order."""
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
