"""The place of this process among the ranks, where its environment does not tell it, or a script has made the group.

The group is the world. The environment may add what a group does not know (the local rank, the machine's number), and
must not contradict it. Where it says nothing, as in a script that uses `torch.multiprocessing.spawn`, the ranks tell
each other which machine they are on.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.environment import RankFacts, facts_for_group, machine_id
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Place:
    """What one rank tells the others about where it is.

    Attributes:
        machine: identifies the machine, as `machine_id` does.
        local_rank: the rank's LOCAL_RANK, None where the variable is not set.
        cuda: the index of the GPU that the script chose, None where it has not used CUDA.
    """

    machine: str
    local_rank: int | None
    cuda: int | None


def facts_of_existing_group(environ: Mapping[str, str] | None = None) -> tuple[RankFacts, int | None]:
    """Return the place of this process in the initialised group, and the GPU that its script chose.

    All ranks must call it: where the environment does not tell the local rank, they exchange their places.

    Returns:
        the facts, and the index of the GPU; None where the local rank decides.

    Raises:
        UsageError: the environment contradicts the group, or two ranks of one machine have the same LOCAL_RANK.
    """
    env = os.environ if environ is None else environ
    rank, world_size = dist.get_rank(), dist.get_world_size()
    complete, local_rank = facts_for_group(rank, world_size, env)
    if complete is not None:
        return complete, None
    own = Place(machine_id(), local_rank, _chosen_gpu())
    places: list[Place] = [own] * world_size
    if world_size > 1:
        dist.all_gather_object(places, own)
    return facts_from_places(rank, places)


def facts_over_store(facts: RankFacts, store: Store, environ: Mapping[str, str] | None = None) -> RankFacts:
    """Return the facts of a rank that has only its rank and the world size, from where the other ranks are.

    Where the environment tells the local rank and the number of ranks on the machine, they stand, and nothing is
    exchanged. Else all ranks call it, before they make the process group: the device follows from the local rank.
    """
    complete, local_rank = facts_for_group(facts.rank, facts.world_size, os.environ if environ is None else environ)
    if complete is not None or facts.world_size == 1:
        return facts
    own = {"machine": machine_id(), "local_rank": local_rank}
    store.set(f"lockstep/place/{facts.rank}", json.dumps(own))
    told = [json.loads(store.get(f"lockstep/place/{rank}")) for rank in range(facts.world_size)]
    found, _ = facts_from_places(facts.rank, [Place(**one, cuda=None) for one in told])
    return replace(found, launcher=facts.launcher)


def facts_from_places(rank: int, places: Sequence[Place]) -> tuple[RankFacts, int | None]:
    """Return a rank's facts, and the GPU that its script chose, from all ranks' places.

    GPUs count as chosen where each rank of the machine uses another one; else all of them only have the default, GPU 0.

    Args:
        places: by rank.

    Raises:
        UsageError: two ranks of the machine have the same LOCAL_RANK.
    """
    machines = list(dict.fromkeys(place.machine for place in places))
    here = [other for other, place in enumerate(places) if place.machine == places[rank].machine]
    told = [index if places[other].local_rank is None else places[other].local_rank for index, other in enumerate(here)]
    local_rank = told[here.index(rank)]
    assert local_rank is not None
    same = [str(other) for other, theirs in zip(here, told, strict=True) if theirs == local_rank]
    if len(same) > 1:
        raise UsageError(
            f"ranks {' and '.join(same)} are on one machine, and both have the local rank {local_rank}",
            where="the environment: LOCAL_RANK",
            why="the processes that a script starts inherit its variables",
            fix="in each rank, before init_process_group: os.environ['LOCAL_RANK'] = str(local_rank)",
        )
    gpus = [places[other].cuda for other in here]
    chosen = places[rank].cuda if None not in gpus and len(set(gpus)) == len(gpus) else None
    facts = RankFacts(
        rank=rank,
        local_rank=local_rank,
        world_size=len(places),
        local_world_size=len(here),
        node_rank=machines.index(places[rank].machine),
        launcher="the script",
    )
    return facts, chosen


def _chosen_gpu() -> int | None:
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
