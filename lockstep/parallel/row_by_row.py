"""Lays a model's parameters and buffers row by row in memory, on every topology, before placement.

Buckets, messages, fused updates and shards take the memory of a tensor as it lies, and FSDP2
refuses what does not lie row by row. So a transposed or expanded parameter gets memory of its own.
Of a weight [2, 3] a bucket or a shard takes the memory from the beginning; its first three numbers:

    row by row     w00 w01 w02 | w10 w11 w12      row 0
    transposed     w00 w10 w01 | w11 w02 w12      a mixture of both rows

A memory format in which a module came (`model.to(memory_format=torch.channels_last)`) decides which
kernels compute: where each rank holds a complete parameter, it stays in that format; where it is
sharded, its module sees a copy in it while its forward pass runs.

Tests: tests/parallel/test_strides.py
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import listed
from lockstep.parallel.shared_memory import has_memory, refuse_shared_memory
from lockstep.parallel.strides import is_plain, lies_row_by_row

# number of dims → the memory format that it may have
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_ALIGNED = 64  # bytes: products may round otherwise where their operands begin at other addresses


@torch.no_grad()
def lay_out(model: nn.Module, *, keeps_formats: bool = False, aligned: bool = False) -> list[str]:
    """Give each strided parameter and buffer memory of its own, row by row, in place.

    Return lines to log.

    Parameters stay the same objects. `keeps_formats`: parameters in a memory format stay so; else
    their modules compute with copies in it. `aligned`: move what begins at an odd address, too,
    where bits count.

    Raises:
        UsageError: a parameter that trains shares memory with itself or another tensor of the
            model.
    """
    parameters = {name: p for name, p in model.named_parameters() if is_plain(p)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if is_plain(buffer)}
    refuse_shared_memory(parameters, buffers)

    named: dict[str, Tensor] = {**parameters, **buffers}
    strided = {name: tensor for name, tensor in named.items() if not lies_row_by_row(tensor)}
    # id of a parameter → the memory format that its module computes in
    formats = {
        id(parameter): memory_format
        for parameter in parameters.values()
        if (memory_format := _format_of(parameter)) is not None
    }
    if keeps_formats:
        strided = {name: tensor for name, tensor in strided.items() if id(tensor) not in formats}
        formats.clear()

    for tensor in strided.values():
        tensor.data = _row_by_row(tensor.data)
    for tensor in parameters.values():
        if aligned and has_memory(tensor) and tensor.data_ptr() % _ALIGNED:
            tensor.data = tensor.data.clone()
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in formats and not isinstance(module, torch.jit.ScriptModule):
                _compute_in(module, attribute, formats[id(parameter)])
    names = [name for name in strided if name in parameters]
    if not names:
        return []
    kept = ", and is computed with in its memory format" if formats else ""
    return [f"{listed(names)} lay strided in memory; it lies row by row now{kept}"]


def _row_by_row(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def _format_of(tensor: Tensor) -> torch.memory_format | None:
    """Return the memory format of a strided tensor, if it has one."""
    memory_format = _FORMATS.get(tensor.ndim)
    if memory_format is None or lies_row_by_row(tensor):
        return None
    like = torch.empty(tensor.shape, device="meta", memory_format=memory_format)
    return memory_format if tensor.stride() == like.stride() else None


def _compute_in(module: nn.Module, attribute: str, memory_format: torch.memory_format) -> None:
    """Let a module's forward pass find its parameter in a memory format.

    Outside of it, it is what it is.
    """
    module.register_forward_pre_hook(partial(_put, attribute, memory_format))
    module.register_forward_hook(partial(_take_off, attribute), always_call=True)


def _put(attribute: str, memory_format: torch.memory_format, module: nn.Module, _args: Any) -> None:
    held = _registered(module, attribute)
    if held is None:  # a replica of `dp`, which holds a plain tensor
        held = getattr(module, attribute)
    # Found before the parameter of that name, which stays registered.
    module.__dict__[attribute] = _InFormat.apply(held, memory_format)  # type: ignore[no-untyped-call]


def _take_off(attribute: str, module: nn.Module, _args: Any, _outputs: Any) -> None:
    if _registered(module, attribute) is not None:
        module.__dict__.pop(attribute, None)


def _registered(module: nn.Module, attribute: str) -> Tensor | None:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(attribute)


class _InFormat(torch.autograd.Function):
    """A copy in a memory format, whose gradient lies row by row again."""

    @staticmethod
    def forward(_ctx: Any, held: Tensor, memory_format: torch.memory_format) -> Tensor:
        return torch.empty_like(held, memory_format=memory_format, requires_grad=False).copy_(held)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _row_by_row(gradients[0]), None
