"""Gathers numbers of every rank by one small all-gather, and summarises them: least, median, most, rank of the most."""

from collections.abc import Sequence
from statistics import median
from typing import Any

Spread = list[float | int]  # [least, median, most, rank of the most]


def gather(values: Sequence[float]) -> list[list[float]]:
    """Return `values` of every rank, by rank; all ranks call it with equally many. It waits for device and ranks."""
    import torch
    import torch.distributed as dist

    if not _several():
        return [list(values)]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return [row.tolist() for row in table]


def gather_objects(value: Any) -> list[Any]:
    """Return `value` of every rank, by rank; for rare use."""
    import torch.distributed as dist

    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def spread(values: Sequence[float]) -> Spread:
    """Return [least, median, most, rank of the most], to 6 digits."""
    most = max(range(len(values)), key=values.__getitem__)
    return [*(float(f"{v:.6g}") for v in (min(values), median(values), values[most])), most]


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
