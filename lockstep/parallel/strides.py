"""Copies tensors into given strides: how their elements lie in memory.

Kernels take a tensor as it lies, and a result may have other bits where an operand lies otherwise.
So what crosses ranks, stages and checkpoints gets the strides that it had, and gradients and
optimizer states those of their parameters. A tensor [2, 3], as strides and as it lies in memory:

    row by row     (3, 1)      w00 w01 w02 w10 w11 w12
    transposed     (1, 2)      w00 w10 w01 w11 w02 w12
    expanded       (0, 1)      w00 w01 w02, for both rows

A model's own parameters lie row by row once it is placed (`lockstep.parallel.row_by_row`).

Tests: tests/parallel/test_strides.py, tests/parallel/test_worked_examples.py
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def lies_row_by_row(tensor: Tensor) -> bool:
    """Return whether a tensor has exactly the strides of a new one, also along dims of size 1.

    Kernels read those, too.
    """
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


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
    if overlaps_itself(target):
        return torch.empty_like(new, memory_format=torch.contiguous_format).copy_(values)
    target.copy_(values)
    return new


def lay_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each `.grad` the memory layout of its parameter.

    Autograd does so, except for gradients that it is asked to return.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.stride() != parameter.stride() and is_plain(gradient):
            parameter.grad = laid_like(parameter, gradient.detach())


@torch.no_grad()
def lay_states(optimizer: Optimizer) -> None:
    """Let the state of an optimizer that has trained before lie as its parameters do, in place."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            alike = isinstance(value, Tensor) and value.shape == parameter.shape and is_plain(value)
            if alike and value.stride() != parameter.stride():
                value.data = laid_like(parameter, value)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's memory can be read: it is not sparse, nested, or a wrapper."""
    wraps = any(hasattr(type(each), "__tensor_flatten__") for each in (tensor, tensor.data))
    return tensor.layout is torch.strided and not (wraps or tensor.is_nested or tensor.is_quantized)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor are one number in memory.

    >>> overlaps_itself(torch.zeros(3).expand(2, 3))
    True
    """
    # From the smallest stride on, each dim has to reach beyond all smaller ones.
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            # It need not: of [2, 3] with strides (3, 2) elements lie at 0 2 4 and 3 5 7.
            return len(torch.unique(positions_of(tensor))) < tensor.numel()
        reach += (size - 1) * stride
    return False


def extent(tensor: Tensor) -> int:
    """Return the number of elements of memory from a tensor's first to its last."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def positions_of(tensor: Tensor) -> Tensor:
    """Return where each element lies in memory, counted from the first, in the tensor's shape.

    >>> positions_of(torch.zeros(3, 2).t())
    tensor([[0, 2, 4],
            [1, 3, 5]])
    """
    return torch.arange(extent(tensor)).as_strided(tensor.shape, tensor.stride())
