"""Compares over ranks the data that they were given, before the first step.

Every rank is to have all data, because Lockstep shares them out. Data that are cut by rank
beforehand would be cut twice, and most samples never seen. What is compared are lengths, the order
of the first step, and summaries of a few samples. A sample that a rank reads twice with other
results draws random numbers that are not seeded: it tells nothing.

Tests: tests/data/test_ranks.py, tests/launch/test_hosts_compared.py
"""

import logging
import zlib
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.data.fingerprint import Row, alike, same_row
from lockstep.errors import UsageError
from lockstep.process_group.collectives import is_main_process
from lockstep.process_group.objects import all_gather_objects

_log = logging.getLogger("lockstep")

MOST_ITEMS = 8  # of a stream that are compared


@dataclass(frozen=True)
class Probed:
    """A sample, summarised twice."""

    index: int
    first: list[Row]
    second: list[Row]

    @property
    def repeats(self) -> bool:
        """Return whether reading it again gave the same."""
        return alike(self.first, self.second)


@dataclass(frozen=True)
class DataEvidence:
    """The facts that one rank knows of its data.

    Attributes:
        length: of the dataset or the iterable, None if it has none.
        order: a checksum of the first step's samples, by index; None for streams.
        samples: some of a dataset that this rank reads.
        items: summaries of a stream's first items.
        seed: what torch's generator was seeded with; another on each rank if a script seeds
            nothing.
    """

    length: int | None
    order: int | None = None
    samples: list[Probed] = field(default_factory=list)
    items: list[list[Row]] = field(default_factory=list)
    seed: int = field(default_factory=torch.initial_seed)


def several_ranks() -> bool:
    """Return whether there are ranks to compare with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def order_checksum(micro_batches: Sequence[Sequence[int]]) -> int:
    """Return a checksum of the samples of a step."""
    return zlib.crc32(repr([list(indices) for indices in micro_batches]).encode())


def require_same_data(
    data: Any, mine: DataEvidence, *, sampler: Any = None, reproducible: bool = False
) -> None:
    """Compare the data of all ranks, or raise a UsageError on each of them.

    All ranks call it together.

    `sampler` is the user's own, if the order is its.
    """
    ranks = all_gather_objects(mine) if several_ranks() else [mine]
    _check_repeats(ranks, reproducible)
    for rank, its in enumerate(ranks[1:], start=1):
        difference = _difference(ranks[0], its, rank)
        if difference is None and its.order != ranks[0].order:
            difference = f"the {type(sampler).__name__} gives rank {rank} other samples than rank 0"
            data = sampler
        may_be_random = (
            its.seed != ranks[0].seed and its.length == ranks[0].length and _cut_of(data) is None
        )
        if difference is not None and may_be_random and not reproducible:
            _warn(
                f"{difference}, and ranks are seeded differently: data that are made of random"
                " numbers need the same seed on all ranks, such as torch.manual_seed(0) before"
                " they are made; of data that are cut by rank most samples are never seen"
            )
        elif difference is not None:
            why = (
                "every rank is to have all data, because Lockstep shares them out: what is cut by"
                " rank beforehand is cut twice, and most samples are never seen"
            )
            fix = (
                f"delete {_cut_of(data) or _ANY_CUT} and hand over all data. Where each rank's are"
                " its own on purpose, say so: data.rank_sharded = True; where they come from random"
                " numbers, seed these alike on all ranks"
            )
            raise UsageError(difference, where="the training or validation data", why=why, fix=fix)


# by identity: tensors compare to no single bool
_known: MutableMapping[Any, list[Probed]] = WeakIdKeyDictionary()


def remember(dataset: Any, probed: list[Probed]) -> None:
    """Keep what was read of a dataset, for its next use in this process.

    That is an evaluation, or another call of `steps`.
    """
    with suppress(TypeError):  # not every dataset can be referred to weakly
        _known[dataset] = probed


def known(dataset: Any) -> list[Probed] | None:
    """Return what `remember` has kept; None if nothing."""
    try:
        return _known.get(dataset)
    except TypeError:
        return None


def _difference(first: DataEvidence, other: DataEvidence, rank: int) -> str | None:
    """Say how the data of a rank differ from those of rank 0; None if they are the same."""
    if first.length != other.length:
        return (
            f"rank 0 has {first.length} samples or batches of data, and rank {rank} has"
            f" {other.length}"
        )
    same_length = (
        "" if first.length is None else f"ranks 0 and {rank} have {first.length} each, but "
    )
    of_first = {probed.index: probed for probed in first.samples}
    for its in other.samples:
        mine = of_first.get(its.index, its)
        if mine.repeats and its.repeats and not alike(mine.first, its.first):
            return (
                f"{same_length}dataset[{its.index}] on rank {rank} is another sample than on rank 0"
            )
    if all(map(alike, first.items, other.items)) and len(first.items) == len(other.items):
        return None
    if _share_a_column(first.items, other.items):
        _warn(
            f"{same_length}the items of rank {rank} differ in part from those of rank 0: either the"
            " data are cut by rank, and samples are never seen, or they draw random numbers that"
            " are not seeded"
        )
        return None
    return f"{same_length}the first items of rank {rank} are others than those of rank 0"


def _share_a_column(first: list[list[Row]], other: list[list[Row]]) -> bool:
    """Return whether both ranks have the same values in one column of their items.

    The values differ between items, as labels do.
    """
    sizes = {len(item) for item in (*first, *other)}
    if len(first) != len(other) or len(first) < 2 or len(sizes) != 1:
        return False
    for column in range(sizes.pop()):
        mine = [item[column] for item in first]
        its = [item[column] for item in other]
        if all(map(same_row, mine, its)) and not all(same_row(mine[0], row) for row in mine):
            return True
    return False


def _check_repeats(ranks: Sequence[DataEvidence], reproducible: bool) -> None:
    """Warn of samples that differ when they are read again.

    Under `reproducible` they are refused.
    """
    changing = next((probed for its in ranks for probed in its.samples if not probed.repeats), None)
    if changing is None:
        return
    what = f"dataset[{changing.index}] is another when it is read again with the same seeds"
    why = "it draws from a generator that was not found, such as one that is made anew in each call"
    fix = (
        "draw from Python's, NumPy's or torch's global generators, or keep one as an attribute:"
        " these are seeded"
    )
    if reproducible:
        raise UsageError(what, where="distributed.reproducible", why=why, fix=fix)
    _warn(f"{what}: {why}. What it is depends on ranks, workers and restarts\n  do: {fix}")


_ANY_CUT = (
    "the line that picks a rank's part (dataset.shard(…), Subset(…), a slice [rank::world], a file"
    " for each rank)"
)


def _cut_of(data: Any) -> str | None:
    """Return the call that may have cut the data, as a user writes it.

    None for data that do not tell.
    """
    dataset = getattr(data, "dataset", data) if hasattr(data, "batch_sampler") else data
    kinds = {kind.__name__ for kind in type(dataset).__mro__}
    if type(dataset).__module__.startswith("datasets."):
        return "dataset.shard(…) or split_dataset_by_node(…)"
    if "Subset" in kinds:
        return f"{type(dataset).__name__}(dataset, …)"
    if "Sampler" in kinds or "BatchSampler" in kinds:
        return f"the {type(dataset).__name__}"
    return None


def _warn(text: str) -> None:
    if is_main_process():
        _log.warning("warning: %s", text)
