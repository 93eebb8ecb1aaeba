"""One process: nothing to shard and nothing to synchronise. Every strategy on one rank is this one."""

from lockstep.parallel.placed import contiguous_shares
from lockstep.parallel.placement import Laid, Placement, shared_out
from lockstep.parallel.tree_local import LocalTree


def lay(placement: Placement) -> Laid:
    """The whole model on this process, which runs all micro-batches."""
    asked = placement.layout.strategy
    if asked != "single":
        placement.notices.append(f"{asked} on one rank: nothing to synchronise or to shard")
    placement.materialise()
    return Laid(
        placement.loop(placement.model),
        shared_out(contiguous_shares, placement),
        tree=LocalTree(list(placement.model.parameters())) if placement.reproducible else None,
    )
