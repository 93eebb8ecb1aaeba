"""Tells a processor that computed wrongly from data that are bad: a step with bad numbers is computed once more.

What a step computes follows from its weights, its samples and keyed random numbers, so that it comes out alike each
time. Where it is bad at first and good then, the weights have not been touched yet, and the run goes on with the
second gradient. Recomputing the last step undoes most such faults: arXiv:2604.00726.
"""

import socket
from collections.abc import Collection, Sequence

import torch.distributed as dist

from lockstep.bad_numbers import Anomaly
from lockstep.collectives import world_size
from lockstep.errors import listed


def wrongly_computed(
    anomaly: Anomaly, loss: float, losses: tuple[Sequence[float], Sequence[float]], own: Collection[int]
) -> str:
    """Return a sentence on a step that was bad at first and good when it was computed again; every rank calls it.

    Args:
        anomaly: of the first time.
        loss: of the step, the second time.
        losses: of each micro-batch, the first and the second time.
        own: numbers of the micro-batches that this rank runs.
    """
    changed = [number for number, (one, other) in enumerate(zip(*losses, strict=True)) if repr(one) != repr(other)]
    mine = (socket.gethostname(), [number for number in changed if number in own])
    ranks: list[tuple[str, list[int]]] = [mine]
    if world_size() > 1:
        ranks *= world_size()
        dist.all_gather_object(ranks, mine)
    involved = [f"rank {rank} ({host})" for rank, (host, numbers) in enumerate(ranks) if numbers]
    if involved:
        where = (
            f"the loss of micro-batch {', '.join(map(str, changed))} has changed, which is run by {listed(involved)}"
        )
    else:
        where = "no loss has changed: it was in a backward pass, and the sum over ranks does not tell in whose"
    return f"{anomaly.what}; computed again from the same weights and samples, its loss is {loss:.6g}: {where}"
