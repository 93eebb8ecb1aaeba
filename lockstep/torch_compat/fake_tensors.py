"""Tensors with a shape, a dtype and a device, and no memory.

And a fast cache of what operators make of them.

torch's cache builds a key and an output in 100 µs. `OutputCache` stands in front of it, takes 15
µs, and leaves to torch whatever it does not know: operators that communicate or read values,
complex and sparse tensors, constants.

Public torch: tensors on meta have no device of their own, and their storages no bytes to count.
`DTensor.to_local()` is an operation of autograd, which a dispatch mode would count. FSDP2 frees
gathered parameters by a storage's `resize_`, which no dispatch mode sees, so it is replaced on the
class. Seen to work: torch 2.13.0. When gone: importing this file raises ImportError: no `lockstep
plan`, and no model `mixture`. Or the plan takes a sharded tensor for a whole one, and gathered
parameters as if they were never freed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from lockstep.torch_compat.operators import SHARDING

# Raised where a program asks a fake tensor for its values.
UNKNOWN_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = [
    "UNKNOWN_VALUES",
    "FakeTensor",
    "FakeTensorMode",
    "OutputCache",
    "local_tensor",
    "resizes_watched",
]

_PLAIN = frozenset(
    (
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)
_SHAPES_UNKNOWN = {
    torch.Tag.inplace_view,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_PURE = ("aten", SHARDING)  # namespaces of operators that only compute outputs


class _Output(NamedTuple):
    """Recipe of an output: one of the arguments, a view of one, or a new tensor."""

    same: int | None  # index of the argument that it is
    view: int | None  # index of the argument whose storage it shares
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]  # without its mode


class _Known(NamedTuple):
    """Recipes of the outputs of an operator for tensors of certain shapes."""

    outputs: tuple[_Output | None, ...]
    kind: type | None  # list or tuple, if there are several outputs
    fact: Any


class OutputCache:
    """Makes the outputs of operators under a mode, for calls like earlier ones.

    All modes share what is known.
    """

    _known: dict[tuple[Any, ...], _Known] = {}

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        mode.cache_enabled = False  # it would learn the same calls again

    def run(
        self, func: Any, args: Any, kwargs: Any, fact_of: Callable[[Any, Any, Any, Any], Any]
    ) -> tuple[Any, Any]:
        """Call an operator, or make the outputs of an equal call.

        Return the outputs, and what `fact_of` says.

        `fact_of`: (func, args, kwargs, outputs) → something that depends on shapes and on func.
        """
        key, tensors = _call_of(func, args, kwargs)
        known = self._known.get(key) if key is not None else None
        if known is None:
            out = func(*args, **kwargs)
            fact = fact_of(func, args, kwargs, out)
            # else it changed the shape of an argument
            if key is not None and key == _call_of(func, args, kwargs)[0]:
                self._learn(func, key, tensors, out, fact)
            return out, fact
        with torch._C._DisableTorchDispatch():
            made = [
                None if output is None else self._made(output, tensors) for output in known.outputs
            ]
        return (made[0] if known.kind is None else known.kind(made)), known.fact

    def _made(self, output: _Output, tensors: list[Tensor]) -> Tensor:
        """Return an output as a fake tensor: an input itself, a view of one, or a new one."""
        same, view, size, stride, offset, dtype, device, attributes = output
        if same is not None:
            return tensors[same]
        if view is None:
            inner = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            inner = torch.empty(0, dtype=dtype, device="meta")
            inner.set_(tensors[view].untyped_storage(), offset, size, stride)
        found: Tensor = Tensor._make_subclass(
            FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(found)
        vars(found).update(attributes, fake_mode=self._mode)
        return found

    def _learn(
        self, func: Any, key: tuple[Any, ...], tensors: list[Tensor], out: Any, fact: Any
    ) -> None:
        """Remember the outputs of a call, if they depend on shapes alone."""
        if func.namespace not in _PURE or not _SHAPES_UNKNOWN.isdisjoint(func.tags):
            return
        places = {id(tensor): position for position, tensor in enumerate(tensors)}
        owners = {
            tensor.untyped_storage()._cdata: position for position, tensor in enumerate(tensors)
        }
        outputs: list[_Output | None] = []
        new: set[int] = set()
        for leaf in out if isinstance(out, list | tuple) else (out,):
            if leaf is None:
                outputs.append(None)
                continue
            same = places.get(id(leaf))
            if (
                type(leaf) is not FakeTensor
                or not _describe((leaf,), [], [])
                or (same is None and leaf.requires_grad)
            ):
                return
            storage = leaf.untyped_storage()._cdata
            view = owners.get(storage)
            if view is None:
                if storage in new:  # two outputs share it
                    return
                new.add(storage)
            attributes = {name: value for name, value in vars(leaf).items() if name != "fake_mode"}
            outputs.append(
                _Output(
                    same,
                    view,
                    tuple(leaf.shape),
                    leaf.stride(),
                    int(leaf.storage_offset()),
                    leaf.dtype,
                    leaf.fake_device,
                    attributes,
                )
            )
        self._known[key] = _Known(
            tuple(outputs), type(out) if isinstance(out, list | tuple) else None, fact
        )


def _call_of(func: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """Return what the outputs of a call depend on, and the tensors in its arguments.

    The first is None if they depend on more than shapes.
    """
    key: list[Any] = [func, torch.get_default_dtype()]
    tensors: list[Tensor] = []
    if not _describe(args, key, tensors) or (
        kwargs and not _describe(kwargs.items(), key, tensors)
    ):
        return None, tensors
    if len(tensors) > 1:
        positions = {id(one): position for position, one in enumerate(tensors)}
        if len(positions) < len(tensors):
            key.append(tuple(positions[id(one)] for one in tensors))  # the same tensor twice
    return tuple(key), tensors


def _describe(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> bool:
    """Append what outputs depend on to a key; return whether there is nothing else."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if (
                value.constant is not None
                or value.layout is not torch.strided
                or value.dtype.is_complex
            ):
                return False
            tensors.append(value)
            key += (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.fake_device,
            )
        elif kind in _PLAIN:
            key += (kind, value)
        elif (
            (kind is Tensor or kind is nn.Parameter)
            and value.is_meta
            and not value.dtype.is_complex
        ):
            tensors.append(value)  # its values are unknown, too: the mode takes it for a fake one
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)
        elif kind is tuple or kind is list:
            key += (kind, len(value))
            if not _describe(value, key, tensors):
                return False
        else:
            return False
    return True


def local_tensor(tensor: Any) -> Tensor:
    """Return what the tensor holds on this rank, without an operation; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]


@contextmanager
def resizes_watched(resized: Callable[[Any], None]) -> Iterator[None]:
    """Call `resized(storage)` after each change of a storage's size, while the block runs."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: Any) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
