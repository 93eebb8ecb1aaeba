"""Lays parameters and buffers row by row in memory, on every topology, before a model is placed.

Buckets, messages, fused updates and shards take the memory of a tensor as it lies, and FSDP2
refuses what does not lie row by row. So a transposed or expanded parameter gets memory of its own.
A memory format in which a module came (`model.to(memory_format=torch.channels_last)`) decides which
kernels compute: where each rank holds a complete parameter, it stays in that format; where it is
sharded, its module sees a copy in it while its forward pass runs.

A weight [2, 3], as strides and as it lies in memory, which a bucket or a shard takes from the
beginning:

    row by row     (3, 1)      w00 w01 w02 w10 w11 w12
    transposed     (1, 2)      w00 w10 w01 w11 w02 w12
    expanded       (0, 1)      w00 w01 w02, for both rows

A shard of the first three numbers is row 0 of the first, and a mixture of both rows of the second.

Tests: tests/parallel/test_strides.py, tests/parallel/test_worked_examples.py
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import UsageError, listed
from lockstep.torch_compat.fake_tensors import FakeTensor

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
    parameters = {name: p for name, p in model.named_parameters() if _is_plain(p)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if _is_plain(buffer)}
    strided = {name: t for name, t in {**parameters, **buffers}.items() if not lies_row_by_row(t)}
    _refuse_shared_memory(parameters, buffers)
    formats = {
        id(p): memory_format
        for p in parameters.values()
        if (memory_format := _format_of(p)) is not None
    }
    if keeps_formats:
        strided = {name: tensor for name, tensor in strided.items() if id(tensor) not in formats}
        formats.clear()
    for tensor in strided.values():
        tensor.data = _row_by_row(tensor.data)
    for tensor in parameters.values():
        if aligned and _has_memory(tensor) and tensor.data_ptr() % _ALIGNED:
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


def lies_row_by_row(tensor: Tensor) -> bool:
    """Return whether a tensor has exactly the strides of a new one, also along dims of size 1.

    Kernels read those, too.
    """
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def lay_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each `.grad` the memory layout of its parameter.

    Autograd does so, except for gradients that it is asked to return.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.stride() != parameter.stride() and _is_plain(gradient):
            parameter.grad = laid_like(parameter, gradient.detach())


def laid_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a copy of `values` with the strides of `tensor`, which has their shape."""
    new = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=values.dtype, device=values.device
    )
    return new.copy_(values)


def laid_out(values: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor with these values and strides: itself, if it has them, or a copy.

    Along a dim of stride 0 values are equal. If elements would share memory in other ways, they lie
    row by row.

    >>> values = torch.tensor([[0.0, 1, 2], [3, 4, 5]])
    >>> values.stride(), laid_out(values, (1, 2)).stride()
    ((3, 1), (1, 2))
    """
    return values if values.stride() == tuple(strides) else copied_to(values, strides)


def copied_to(values: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of `values` with these strides, as in `laid_out`, in memory of its own."""
    new = torch.empty_strided(
        values.shape, tuple(strides), dtype=values.dtype, device=values.device
    )
    target = new
    for dim, (size, stride) in enumerate(zip(values.shape, strides, strict=True)):
        if size > 1 and stride == 0:
            target = target.narrow(dim, 0, 1)
            values = values.narrow(dim, 0, 1)
    if _overlaps_itself(target):
        return torch.empty_like(new, memory_format=torch.contiguous_format).copy_(values)
    target.copy_(values)
    return new


@torch.no_grad()
def lay_states(optimizer: Optimizer) -> None:
    """Let the state of an optimizer that has trained before lie as its parameters do, in place."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            alike = (
                isinstance(value, Tensor) and value.shape == parameter.shape and _is_plain(value)
            )
            if alike and value.stride() != parameter.stride():
                value.data = laid_like(parameter, value)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's memory can be read: it is not sparse, nested, or a wrapper."""
    wraps = hasattr(type(tensor), "__tensor_flatten__") or hasattr(
        type(tensor.data), "__tensor_flatten__"
    )
    return tensor.layout is torch.strided and not (wraps or tensor.is_nested or tensor.is_quantized)


def _has_memory(tensor: Tensor) -> bool:
    return not (
        tensor.is_meta or isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor)
    )


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


class _InFormat(torch.autograd.Function):
    """A copy in a memory format, whose gradient lies row by row again."""

    @staticmethod
    def forward(_ctx: Any, held: Tensor, memory_format: torch.memory_format) -> Tensor:
        return torch.empty_like(held, memory_format=memory_format, requires_grad=False).copy_(held)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _row_by_row(gradients[0]), None


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


# ---- memory that several tensors share ----


def _refuse_shared_memory(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
) -> None:
    """Refuse shared memory that an update would write twice, or that moving would separate."""
    tensors = {
        name: t for name, t in {**parameters, **buffers}.items() if t.numel() and _has_memory(t)
    }
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    for name in trained & tensors.keys():
        if _overlaps_itself(tensors[name]):
            shape = list(tensors[name].shape)
            strides = tuple(tensors[name].stride())
            raise UsageError(
                f"elements of the parameter {name} lie in the same memory: its shape is {shape},"
                f" its strides {strides}",
                where="the model",
                why="an update would write them several times",
                fix=(
                    "write nn.Parameter(tensor.clone()), or keep the small tensor as the parameter,"
                    " and expand it in forward"
                ),
            )
    # of those before that reach further: device, end, name
    begun: list[tuple[torch.device, int, str]] = []
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()
        device = tensor.device
        begun = [earlier for earlier in begun if earlier[1] > begin]
        for other in [
            other for where, _, other in begun if where == device and {name, other} & trained
        ]:
            if _share_elements(tensors[other], tensor):
                raise UsageError(
                    f"{other} and {name} are two tensors in the same memory",
                    where="the model",
                    why=(
                        "an update of one would change the other, and they would come apart once"
                        " they lie on ranks"
                    ),
                    fix=(
                        "let both names have one nn.Parameter; one that is needed transposed,"
                        " transpose in forward: F.linear(x, weight.t())"
                    ),
                )
        begun.append((device, begin + _extent(tensor) * tensor.element_size(), name))


def _extent(tensor: Tensor) -> int:
    """Return the number of elements of memory from a tensor's first to its last."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _overlaps_itself(tensor: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    places = torch.arange(_extent(tensor)).as_strided(tensor.shape, tensor.stride())
    return len(torch.unique(places)) < tensor.numel()


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, the second of which begins later, have an element in common."""
    apart = other.data_ptr() - one.data_ptr()
    size = one.element_size()
    if size != other.element_size() or apart % size:
        return True
    taken = torch.zeros(max(_extent(one), apart // size + _extent(other)), dtype=torch.bool)
    taken[torch.arange(_extent(one)).as_strided(one.shape, one.stride()).reshape(-1)] = True
    places = torch.arange(_extent(other)).as_strided(other.shape, other.stride()) + apart // size
    return bool(taken[places].any())
