"""What a smaller group costs when a rank is gone: destroy and init, beside torch's reconfigure.

    python -m benchmarks.regroup --rounds 10 --write

`torch.distributed._reconfigure` (private, from torch 2.14 on) changes the ranks of a group in
place. Three of four ranks leave the group of all and make one of their own, in turns either way,
each with an all-reduce at its end. Lockstep destroys and makes anew, on every version of torch.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.page import RESULTS, machine, page, tell
from tests.ranks import run_ranks

RANKS = 4
LEFT = RANKS - 1
_reconfigure: Any = getattr(dist, "_reconfigure", None)
_get_handle: Any = getattr(dist, "_get_reconfigure_handle", None)


def regroup(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, by round; the rank that leaves returns none."""
    from lockstep.torch_compat.default_store import default_store

    hosted = default_store()  # kept, by the rank that hosts it
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    numbers = iter(range(1, 1_000_000))
    found: dict[str, list[float]] = {"destroy and init": []}
    found |= {"reconfigure": []} if _reconfigure is not None else {}

    def init(ranks: int, **more: Any) -> None:
        prefixed = PrefixStore(f"group-{next(numbers)}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=ranks, **more)

    def reconfigure(ranks: int) -> None:
        number = next(numbers)
        store.set(f"handle-{number}-{rank}", _get_handle())
        handles = [store.get(f"handle-{number}-{one}").decode() for one in range(ranks)]
        _reconfigure(uuid=number, handles=handles).wait()

    def init_anew(ranks: int) -> None:
        dist.destroy_process_group()
        init(ranks)

    def timed(leave: Callable[[int], None]) -> float:
        dist.barrier()
        if rank == LEFT:
            next(numbers)
            return 0.0
        began = time.perf_counter()
        leave(LEFT)
        sums = torch.ones(1)
        dist.all_reduce(sums)
        assert sums == LEFT
        return time.perf_counter() - began

    for _ in range(rounds):
        for name in found:
            if name == "reconfigure":
                init(RANKS, enable_reconfigure=True)
                reconfigure(RANKS)
                found[name].append(timed(reconfigure))
            else:
                init(RANKS)
                found[name].append(timed(init_anew))
            dist.destroy_process_group()
    dist.init_process_group("gloo", store=PrefixStore("end", store), rank=rank, world_size=RANKS)
    dist.barrier()
    del hosted
    return found


def main() -> None:
    from benchmarks import regroup as program  # ranks import it by this name

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    ranks = run_ranks(program.regroup, RANKS, given.rounds)
    rows = []
    for name in ranks[0]:
        slowest = [max(one) for one in zip(*(rank[name] for rank in ranks[:LEFT]), strict=True)]
        spread = (
            f"{1e3 * median(slowest):.1f} | {1e3 * min(slowest):.1f} to {1e3 * max(slowest):.1f}"
        )
        rows.append(f"| {name} | {spread} |")
        print(name, json.dumps(slowest), flush=True)
    words = [
        f"{LEFT} of {RANKS} ranks (gloo, one machine) leave the group of all and make their own,"
        f" {given.rounds} times each way, in turns; torch {torch.__version__}. From the word that a"
        " rank is gone to the end of an all-reduce, on the slowest rank.",
    ]
    text = page(
        "A smaller group",
        f"python -m benchmarks.regroup --rounds {given.rounds}",
        machine(),
        words,
        "| way | median ms | least to most |",
        rows,
        [
            "The difference is a fortieth of the 0.6 s that a live recovery takes (`recovery.md`),"
            " for one of its groups. And reconfigure ends no wait: a rank that waits in a"
            " collective of the old group has to be told otherwise. So Lockstep destroys and makes"
            " anew under every version of torch.",
        ],
    )
    tell(text, RESULTS / "regroup.md" if given.write else None)


if __name__ == "__main__":
    main()
