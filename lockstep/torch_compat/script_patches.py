"""Functions of a training loop, replaced so that an observer sees them called.

They are backward passes, clipping, loaders and samplers, schedules, products, and files of weights;
parallel_patches.py has those of several ranks, draw_patches.py random numbers.

Public torch: hooks for modules and optimizers alone. A script is observed unchanged, so the
functions themselves are replaced (replaced_calls.py), in a process that only observes. Seen to
work: torch 2.13.0. When gone: importing this file raises ImportError, or `lockstep verify SCRIPT`
says that it saw no step.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.nn.utils.clip_grad as clip
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, dataloader

from lockstep.torch_compat.function_transforms import has_no_values
from lockstep.torch_compat.replaced_calls import (
    Around,
    Undo,
    outermost,
    put_in_place,
    report_after,
    undo_all,
    wrap_call,
)


def patch_backward(around: Around) -> Undo:
    """Replace the function with which every backward pass starts.

    `tensor.backward()` calls it, too.
    """
    return wrap_call(torch.autograd, "backward", around)


def patch_clipping(around: Around) -> Undo:
    """Replace the functions that clip gradients, by norm and by value, and FSDP1's method.

    Among them is `clip_grads_with_norm_`, for a norm that the script has computed by itself.
    """
    once = outermost(around)
    names = ("clip_grad_norm_", "clip_grad_value_")
    undo = [wrap_call(clip, name, once) for name in names]
    undo.append(
        wrap_call(
            FullyShardedDataParallel,
            "clip_grad_norm_",
            lambda call, model: once(call, list(model.parameters())),
        )
    )
    undo += [put_in_place(torch.nn.utils, name, getattr(clip, name)) for name in names]
    undo.append(wrap_call(torch.nn.utils, "clip_grads_with_norm_", once))
    return undo_all(undo)


def patch_scalers(scaled: Callable[[Any], None], unscaled: Callable[[], None]) -> Undo:
    """Report each loss that a scaler scales, with the scaler, and gradients that it unscales."""
    undo = []
    for kind in (GradScaler, ShardedGradScaler):
        undo.append(report_after(kind, "scale", lambda self, _result: scaled(self)))
        undo.append(report_after(kind, "unscale_", lambda _self, _result: unscaled()))
    return undo_all(undo)


def patch_products(multiplied: Callable[[Tensor, Tensor], None]) -> Undo:
    """Report each product of two tensors with other numbers of dims, before it is computed."""

    def multiplying(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 2:
                mine, other = args
                are_tensors = isinstance(mine, Tensor) and isinstance(other, Tensor)
                if are_tensors and mine.ndim != other.ndim:
                    multiplied(mine, other)
            return original(*args, **kwargs)

        return observed

    names = ("__mul__", "__rmul__", "mul", "multiply")
    places = [*((Tensor, name) for name in names), (torch, "mul"), (torch, "multiply")]
    return undo_all(
        [put_in_place(owner, name, multiplying(getattr(owner, name))) for owner, name in places]
    )


def patch_made(made: Callable[[Any], None]) -> Undo:
    """Report each wrapper, optimizer and learning rate schedule that is made."""
    kinds = (DistributedDataParallel, torch.optim.Optimizer, LRScheduler)
    return undo_all(
        [report_after(kind, "__init__", lambda self, _result: made(self)) for kind in kinds]
    )


def patch_modules(made: Callable[[Any], None]) -> Undo:
    """Report each module whose constructor begins."""
    return report_after(torch.nn.Module, "__init__", lambda self, _result: made(self))


def patch_modes(left: Callable[[Any], None]) -> Undo:
    """Report each module that is put into evaluation mode, and not those inside of it."""
    original = torch.nn.Module.train
    depth = [0]

    @wraps(original)
    def observed(self: Any, mode: bool = True) -> Any:
        if not mode and not depth[0]:
            left(self)
        depth[0] += 1
        try:
            return original(self, mode)
        finally:
            depth[0] -= 1

    return put_in_place(torch.nn.Module, "train", observed)


def patch_schedules(stepped: Callable[[Any], None]) -> Undo:
    """Report each step of a learning rate schedule."""
    return report_after(LRScheduler, "step", lambda self, _result: stepped(self))


def patch_plateaus(stepped: Callable[[float], None]) -> None:
    """Report each number that a schedule is given which looks for a plateau, as of a loss."""
    original = ReduceLROnPlateau.step

    @wraps(original)
    def observed(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        stepped(float(metrics))
        original(self, metrics, *args, **kwargs)

    put_in_place(ReduceLROnPlateau, "step", observed)


# ---- data ----


def patch_loaders(arguments: Callable[[dict[str, Any]], None], made: Callable[[Any], None]) -> None:
    """Let `arguments` change those of the constructor of loaders, by name.

    `made` sees each loader.
    """
    original = DataLoader.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        arguments(given)
        original(self, **given)
        made(self)

    setattr(DataLoader, "__init__", observed)  # noqa: B010 — mypy forbids to assign a method


def patch_samplers(begun: Callable[[Any], None]) -> Undo:
    """Report each pass over a distributed sampler."""
    return report_after(DistributedSampler, "__iter__", lambda self, _result: begun(self))


def patch_reading(read: Callable[[], None]) -> Undo:
    """Report each batch that a loader gives."""
    return report_after(dataloader._BaseDataLoaderIter, "__next__", lambda _self, _result: read())


def patch_orders(begun: Callable[[Any, Iterator[Any]], Iterator[Any]]) -> None:
    """Let `begun` replace the positions of each pass that a loader begins over data with positions.

    It is given the loader and its iterator, and returns the one that is read.
    """
    original = dataloader._BaseDataLoaderIter.__init__

    @wraps(original)
    def observed(self: Any, loader: Any) -> None:
        original(self, loader)
        if self._dataset_kind == dataloader._DatasetKind.Map:
            self._sampler_iter = begun(loader, self._sampler_iter)

    setattr(dataloader._BaseDataLoaderIter, "__init__", observed)  # noqa: B010


def patch_reads(indexed: Callable[[Any, Any], Any], made: Callable[[str, Any], Any]) -> None:
    """Let `indexed` replace the index of tensors and memory maps, and `made` new tensors.

    These are made of numbers of Python or NumPy. What is indexed by a tensor is left alone.
    """

    def reading(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @wraps(original)
        def observed(self: Any, index: Any) -> Any:
            if isinstance(index, Tensor) or has_no_values():
                return original(self, index)
            return original(self, indexed(self, index))

        return observed

    def making(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            of_tensor = bool(args) and isinstance(args[0], Tensor)
            return value if of_tensor or has_no_values() else made(name, value)

        return observed

    kinds: tuple[type, ...] = (Tensor, np.memmap)
    for owner in kinds:
        put_in_place(owner, "__getitem__", reading(getattr(owner, "__getitem__")))  # noqa: B009
    for name in ("as_tensor", "from_numpy", "tensor"):
        put_in_place(torch, name, making(getattr(torch, name), f"torch.{name}"))


# ---- files of weights ----


def patch_saving(saved: Callable[[Any], None]) -> Undo:
    """Report where `torch.save` is about to write."""
    original = torch.save

    @wraps(original)
    def observed(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        saved(f)
        original(obj, f, *args, **kwargs)

    return put_in_place(torch, "save", observed)


def patch_loading(loaded: Callable[[Any, list[str], list[str]], None]) -> Undo:
    """Report what `load_state_dict` of a module could not place."""

    def report(self: Any, result: Any) -> None:
        if result is not None:
            loaded(self, list(result.missing_keys), list(result.unexpected_keys))

    return report_after(torch.nn.Module, "load_state_dict", report)
