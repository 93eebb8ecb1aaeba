"""Functions by which a script runs on several ranks, replaced so that an observer sees the calls.

They are collectives, tensor parallel, pipelines, FSDP, and hooks of DistributedDataParallel.

Public torch: none tells who calls a collective, shards a model or registers a hook. Seen to work:
torch 2.13.0. When gone: importing this file raises ImportError, or the ranks of a script that share
a model are compared as if each had its own.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed.fsdp as distributed_fsdp
import torch.distributed.tensor.parallel as tensor_parallel
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import schedules, stage
from torch.nn.parallel import DistributedDataParallel

from lockstep.torch_compat.replaced_calls import Around, Undo, put_in_place, wrap_call

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


def patch_collectives(called: Callable[[str, Any], None]) -> None:
    """Report each collective that a script calls itself: its name, and what it is given first.

    What such a collective calls in its turn, as `all_gather_object` calls `all_gather`, is not
    reported.
    """
    depth = [0]

    def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that is reported."""

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not depth[0]:
                called(original.__name__, (args, kwargs))
            depth[0] += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth[0] -= 1

        return observed

    for name in COLLECTIVES:
        put_in_place(torch.distributed, name, reporting(getattr(torch.distributed, name)))


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

    put_in_place(tensor_parallel, "parallelize_module", observed)
    made = stage._PipelineStageBase.__init__

    @wraps(made)
    def observed_stage(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        group = self.group if self.group is not None else torch.distributed.group.WORLD
        together(torch.distributed.get_process_group_ranks(group))

    setattr(stage._PipelineStageBase, "__init__", observed_stage)  # noqa: B010
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        wrap_call(schedule, "step", around)


def loss_of_schedule(schedule: Any) -> Any:
    """Return the function with which a pipeline's schedule computes the loss."""
    return getattr(schedule, "_loss_fn", None)


def patch_sharding(sharded: Callable[[str], bool]) -> None:
    """Report each use of `fully_shard` and of FSDP1, with the dtype in which layers compute then.

    It is empty where FSDP leaves it as it is. `sharded` returns whether FSDP may change it.
    """
    original = distributed_fsdp.fully_shard
    made = FullyShardedDataParallel.__init__

    def told(given: dict[str, Any], key: str) -> dict[str, Any]:
        dtype = getattr(given.get(key), "param_dtype", None)
        keeps = sharded("" if dtype is None else str(dtype))
        return given if keeps else {name: value for name, value in given.items() if name != key}

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **told(kwargs, "mp_policy"))

    @wraps(made)
    def observed_wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **told(kwargs, "mixed_precision"))

    put_in_place(distributed_fsdp, "fully_shard", observed)
    setattr(FullyShardedDataParallel, "__init__", observed_wrapper)  # noqa: B010


def patch_hooks(registered: Callable[[str, bool], bool]) -> None:
    """Ask `registered` of each hook that replaces how DistributedDataParallel reduces gradients.

    It is given the hook's name, and whether torch itself offers it. It returns whether the hook is
    registered.
    """
    original = DistributedDataParallel.register_comm_hook
    built_in = DistributedDataParallel._register_builtin_comm_hook

    @wraps(original)
    def observed(self: Any, state: Any, hook: Any) -> None:
        name = getattr(hook, "__name__", type(hook).__name__)
        of_torch = str(getattr(hook, "__module__", "")).startswith("torch.")
        if registered(name, of_torch):
            original(self, state, hook)

    @wraps(built_in)
    def observed_kind(self: Any, kind: Any) -> None:
        if registered(str(kind).rpartition(".")[2], True):
            built_in(self, kind)  # type: ignore[no-untyped-call]

    setattr(DistributedDataParallel, "register_comm_hook", observed)  # noqa: B010
    setattr(DistributedDataParallel, "_register_builtin_comm_hook", observed_kind)  # noqa: B010


def patch_synchronisation(told: Callable[[bool], None]) -> Undo:
    """Report whether FSDP2 is told to reduce gradients."""
    original = FSDPModule.set_requires_gradient_sync

    @wraps(original)
    def observed(self: Any, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> None:
        told(bool(requires_gradient_sync))
        original(self, requires_gradient_sync, *args, **kwargs)

    return put_in_place(FSDPModule, "set_requires_gradient_sync", observed)
