"""What DTensor remembers of meshes whose process groups are gone.

DTensor keeps, for each operator and each layout of its arguments, the layout of the output, mesh
included. Two meshes of the same shape, names and ranks are equal to it, so a mesh that is made
after another one's groups have been destroyed is answered with the old one: with this process's
old coordinates, and with groups that no longer exist. A rank that rehearsed a plan as rank 0 wrote
the shard of rank 0 into its checkpoint.

Public torch: none; the functions that clear the caches are private, "for debugging", and stand
beside tools whose imports take as long as half of torch: here is what those functions do. Seen to
work: torch 2.11.0, 2.13.0 and 2.14.1. When gone: AttributeError where a process group is left or a
plan is rehearsed.
"""

import sys
from typing import Any

__all__ = ["forget_meshes"]


def forget_meshes() -> None:
    """Empty the caches of DTensor, of this thread: no operator answers with an earlier mesh."""
    if "torch.distributed.tensor" not in sys.modules:
        return  # nothing was remembered, and importing it takes time
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

    # `torch.distributed.tensor.debug._clear_sharding_prop_cache`, without importing it
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    clear_redistribute_planner_cache()
