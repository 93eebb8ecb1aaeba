"""Provokes known errors of two ranks that meet."""

import datetime
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.diagnose.provoke import SECOND

_ANY = "any"  # this rank may see one error or another


def on_two_ranks(folder: str) -> list[tuple[str, str]]:
    """Name and text of what this rank saw in each case."""
    rank = dist.get_rank()
    found: list[tuple[str, str]] = []

    def case(
        names: tuple[str | None, str | None], provoke: Callable[[Any], Any], seconds: float = 20
    ) -> None:
        group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        try:
            provoke(group)
        except Exception as error:
            if names[rank] != _ANY:
                found.append((str(names[rank]), f"{type(error).__name__}: {error}"))
        else:
            assert names[rank] in (None, _ANY), f"{names[rank]}: no error"
        dist.barrier()

    late = time.sleep
    case(
        ("a collective timed out", None),
        lambda g: late(1.3) if rank else dist.all_reduce(torch.ones(2), group=g),
        1,
    )
    case(
        ("a rank misses the barrier", None),
        lambda g: late(1.3) if rank else dist.monitored_barrier(g, SECOND),
    )
    case(
        (_ANY, "models differ in shape"),
        lambda g: DistributedDataParallel(nn.Linear(2 + rank, 2), process_group=g),
        3,
    )
    both = "models differ in parameters"
    case(
        (both, both),
        lambda g: DistributedDataParallel(nn.Linear(2, 2, bias=rank == 0), process_group=g),
    )
    case(
        (_ANY, "sizes differ in a collective"),
        lambda g: dist.all_gather([torch.ones(2)] * 2, _ones(rank), group=g),
        3,
    )
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    both = "collectives differ between ranks"
    case((both, both), lambda g: dist.all_reduce(_ones(rank), group=g))
    case(
        (both, both),
        lambda g: (
            dist.all_reduce(_ones(0), group=g) if rank else dist.broadcast(_ones(0), 0, group=g)
        ),
    )
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG")
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    return [*found, _abort(folder, rank)]


def _ones(more: int) -> torch.Tensor:
    return torch.ones(2 + more)


def _abort(folder: str, rank: int) -> tuple[str, str]:
    """gloo aborts a rank whose tensor is the smaller; all that is left of it is its log, and its
    peer has lost it.
    """
    child = multiprocessing.get_context("fork").Process(target=_sizes_differ, args=(folder, rank))
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert rank == 1 or child.exitcode == -6, f"gloo no longer aborts: {child.exitcode}"
    return "a peer is gone" if rank else "sizes differ in a collective", Path(
        folder, f"log-{rank}"
    ).read_text()


def _sizes_differ(folder: str, rank: int) -> None:
    handle = os.open(f"{folder}/log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(handle, 2)
    store = dist.FileStore(f"{folder}/store", 2)
    group = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30))  # type: ignore[attr-defined]
    group.allreduce([_ones(rank * 100_000)]).wait()
