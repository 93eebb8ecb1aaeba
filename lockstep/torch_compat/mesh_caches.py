"""What DTensor remembers of meshes whose process groups are gone.

DTensor keeps, for each operator and each layout of its arguments, the layout of the output, mesh
included. Two meshes of the same shape, names and ranks are equal to it, so a mesh that is made
after another one's groups have been destroyed is answered with the old one: with this process's
old coordinates, and with groups that no longer exist. A rank that rehearsed a plan as rank 0 wrote
the shard of rank 0 into its checkpoint.

Public torch: none; the functions that clear the caches are private, "for debugging". Seen to work:
torch 2.11.0, 2.13.0 and 2.14.1. When gone: ImportError where a process group is left or a plan is
rehearsed.
"""

import sys

__all__ = ["forget_meshes"]


def forget_meshes() -> None:
    """Empty the caches of DTensor, of this thread: no operator answers with an earlier mesh."""
    if "torch.distributed.tensor" not in sys.modules:
        return  # nothing was remembered, and importing it takes time
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()
