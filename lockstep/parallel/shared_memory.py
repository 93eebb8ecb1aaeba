"""Refuses a model of which two trained tensors, or two elements of one, lie in the same memory.

An update would write such an element twice, and tensors that share memory would come apart once
each lies on ranks. Two names of one parameter (tied weights) are one tensor, and fine.

Tests: tests/parallel/test_strides.py
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.strides import extent, overlaps_itself, positions_of
from lockstep.torch_compat.fake_tensors import FakeTensor


def refuse_shared_memory(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
) -> None:
    """Refuse shared memory that an update would write twice, or that moving would separate."""
    named: dict[str, Tensor] = {**parameters, **buffers}
    tensors = {name: t for name, t in named.items() if t.numel() and has_memory(t)}
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    for name in trained & tensors.keys():
        if overlaps_itself(tensors[name]):
            raise _overlapping(name, tensors[name])

    # By where they begin, so that each is compared with those before it that reach further alone.
    earlier: list[_Extent] = []
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()
        earlier = [before for before in earlier if before.end > begin]
        for before in earlier:
            alike = before.device == tensor.device and {name, before.name} & trained
            if alike and _share_elements(tensors[before.name], tensor):
                raise _shared(before.name, name)
        end = begin + extent(tensor) * tensor.element_size()
        earlier.append(_Extent(name, tensor.device, end))


class _Extent(NamedTuple):
    """The end of a tensor's memory, and whose it is."""

    name: str
    device: torch.device
    end: int  # address


def _overlapping(name: str, tensor: Tensor) -> UsageError:
    """Return the error for a parameter of which several elements are one number in memory."""
    return UsageError(
        f"elements of the parameter {name} lie in the same memory: its shape is"
        f" {list(tensor.shape)}, its strides {tuple(tensor.stride())}",
        where="the model",
        why="an update would write them several times",
        fix=(
            "write nn.Parameter(tensor.clone()), or keep the small tensor as the parameter, and"
            " expand it in forward"
        ),
    )


def _shared(name: str, other: str) -> UsageError:
    """Return the error for two tensors with an element in common."""
    return UsageError(
        f"{name} and {other} are two tensors in the same memory",
        where="the model",
        why=(
            "an update of one would change the other, and they would come apart once they lie on"
            " ranks"
        ),
        fix=(
            "let both names have one nn.Parameter; one that is needed transposed, transpose in"
            " forward: F.linear(x, weight.t())"
        ),
    )


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, the second of which begins later, have an element in common."""
    apart = other.data_ptr() - one.data_ptr()
    size = one.element_size()
    if size != other.element_size() or apart % size:
        return True
    taken = torch.zeros(max(extent(one), apart // size + extent(other)), dtype=torch.bool)
    taken[positions_of(one).reshape(-1)] = True
    return bool(taken[positions_of(other) + apart // size].any())


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor lies at an address: it is neither on meta nor a fake tensor."""
    is_fake = isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor)
    return not (tensor.is_meta or is_fake)
