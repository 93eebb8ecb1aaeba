"""Functions of torch that a training script calls, replaced so that an observer sees the calls.

Public torch: hooks for modules and optimizers alone. A script is observed unchanged, so the
functions themselves are replaced, in a process that only observes. Seen to work: torch 2.13.0. When
gone: importing this file raises ImportError, or `lockstep verify SCRIPT` says that it saw no step.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed.tensor.parallel as tensor_parallel
import torch.nn.utils.clip_grad as clip
from torch.distributed.pipelining import schedules, stage
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, dataloader

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)

Around = Callable[[Callable[[], Any], Any], Any]
"""Is given a call to make and its first argument; returns the call's result."""

Undo = Callable[[], None]
"""Puts back what a patch has replaced."""


def patch_backward(around: Around) -> Undo:
    """Replace the function with which every backward pass starts.

    `tensor.backward()` calls it, too.
    """
    return _replace(torch.autograd, "backward", around)


def patch_clipping(around: Around) -> Undo:
    """Replace the functions that clip gradients, by norm and by value."""
    names = ("clip_grad_norm_", "clip_grad_value_")
    undo = [_replace(clip, name, around) for name in names]
    undo += [_set(torch.nn.utils, name, getattr(clip, name)) for name in names]
    return _all_of(undo)


def _all_of(several: list[Undo]) -> Undo:
    def undo() -> None:
        for one in several:
            one()

    return undo


def _set(owner: Any, name: str, value: Any) -> Undo:
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def _replace(module: Any, name: str, around: Around) -> Undo:
    original = getattr(module, name)
    parameter = next(iter(inspect.signature(original).parameters))

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.pop(parameter)
        if isinstance(first, Iterator):
            first = list(first)  # it is read twice
        return around(lambda: original(first, *args[1:], **kwargs), first)

    return _set(module, name, observed)


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


def patch_collectives(called: Callable[[str, Any], None]) -> None:
    """Report each collective that a script calls itself: its name, and what it is given first."""
    for name in COLLECTIVES:
        original = getattr(torch.distributed, name)
        setattr(torch.distributed, name, _reporting(original, called))


def _reporting(
    original: Callable[..., Any], called: Callable[[str, Any], None]
) -> Callable[..., Any]:
    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        called(original.__name__, (args, kwargs))
        return original(*args, **kwargs)

    return observed


def patch_model_parallel(together: Callable[[list[int]], None], around: Around) -> None:
    """Report the ranks that compute the same samples with this one.

    The step of pipeline schedules is replaced.
    """
    parallelize = tensor_parallel.parallelize_module

    @wraps(parallelize)
    def observed(module: Any, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device_mesh is not None and device_mesh.size() > 1:
            together(torch.distributed.get_process_group_ranks(device_mesh.get_group()))
        return parallelize(module, device_mesh, *args, **kwargs)

    tensor_parallel.parallelize_module = observed
    made = stage._PipelineStageBase.__init__

    @wraps(made)
    def observed_stage(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        group = self.group if self.group is not None else torch.distributed.group.WORLD
        together(torch.distributed.get_process_group_ranks(group))

    setattr(stage._PipelineStageBase, "__init__", observed_stage)  # noqa: B010
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        _replace(schedule, "step", around)


def patch_made(made: Callable[[Any], None]) -> Undo:
    """Report each wrapper and learning rate schedule that is made."""
    kinds = (DistributedDataParallel, LRScheduler)
    return _all_of([_after(kind, "__init__", lambda self, _result: made(self)) for kind in kinds])


def patch_samplers(begun: Callable[[Any], None]) -> Undo:
    """Report each pass over a distributed sampler."""
    return _after(DistributedSampler, "__iter__", lambda self, _result: begun(self))


def patch_reading(read: Callable[[], None]) -> Undo:
    """Report each batch that a loader gives."""
    return _after(dataloader._BaseDataLoaderIter, "__next__", lambda _self, _result: read())


def patch_loading(loaded: Callable[[Any, list[str], list[str]], None]) -> Undo:
    """Report what `load_state_dict` of a module could not place."""

    def report(self: Any, result: Any) -> None:
        if result is not None:
            loaded(self, list(result.missing_keys), list(result.unexpected_keys))

    return _after(torch.nn.Module, "load_state_dict", report)


def _after(kind: type, name: str, call: Callable[[Any, Any], None]) -> Undo:
    original = getattr(kind, name)

    @wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        call(self, result)
        return result

    return _set(kind, name, observed)
