"""Write the copies of a run into shared memory; each is complete when it is written.

A copy is made after a step, before people read of it, and the ranks wait for it. So little may
happen in it: what is the same at each copy is agreed on once, with the first one.

    first copy   each rank describes its blocks → rank 0 gives each block to one of those that hold
                 it → each rank makes a file a part, of the size that it needs, and maps it
    each copy    tensors → their places in the mapped files, one copy in memory
                 → one all-reduce: every rank has written, and nothing has changed
    commit       rank 0 renames the folder

Two folders take turns, so that the last complete copy stays until the next one is complete. The
files are those of the format `local` (`write.py`), but each block is in one of them, so that any
number of ranks can read them. They have no checksums: what could damage them between two reads of
one launch would damage the ranks' own memory as well.

    rank 0, of blocks  a: 8 bytes, b: 4 bytes       model/rank-00000.raw
    rank 1, of blocks  a: 8 bytes, c: 4 bytes       header | a | … | b |
                                                    header | c |           model/rank-00001.raw

Tests: tests/checkpoint/test_memory_writer.py, tests/faults/test_memory_copies.py
"""

import json
import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.commit import gloo_group
from lockstep.checkpoint.manifest import (
    CONFIG,
    GROUPS_KEY,
    MODEL,
    STATE,
    Manifest,
    raw_file,
)
from lockstep.checkpoint.memory import MemoryStorage
from lockstep.checkpoint.ranks import BlockInfo, Ranks, held_blocks
from lockstep.checkpoint.snapshot import (
    CheckpointPlan,
    Description,
    Part,
    Snapshot,
    Staged,
    merge,
    stage,
)
from lockstep.checkpoint.storage import FileInfo, step_name
from lockstep.checkpoint.write import padded, raw_header
from lockstep.torch_compat import foreach

_ALIGNED = 64  # bytes: where a block may begin in a file
# what a rank says of its part of a copy; the greatest of all ranks counts
_WRITTEN = 0
_CHANGED = 1
_FAILED = 2

Held = dict[str, dict[str, BlockInfo]]  # by part and name: what a rank holds
Share = dict[str, list[str]]  # by part: the names of the blocks that a rank writes


@dataclass(frozen=True)
class _Facts:
    """Keeps what has to be the same at each copy, so that its files and its plan are."""

    held: Held
    aliases: Mapping[str, tuple[str, ...]]
    params: dict[str, list[list[str]]]  # the names in each group of each optimizer

    @classmethod
    def of(cls, staged: Staged) -> "_Facts":
        params = {
            name: [group["params"] for group in groups["groups"]]
            for name, groups in staged.groups.items()
        }
        held = {part: held_blocks(content) for part, content in staged.parts.items()}
        return cls(held, staged.parts[MODEL].aliases, params)


@dataclass
class _Folder:
    """Holds one of the two folders, and this rank's files in it."""

    name: str  # now; on rank 0
    share: Share
    places: list[Tensor] = field(default_factory=list)  # of this rank's blocks, in the files
    sizes: dict[str, int] = field(default_factory=dict)  # of the files of all ranks; on rank 0

    def make(self, storage: MemoryStorage, rank: int, parts: Mapping[str, Part]) -> dict[str, int]:
        """Make and map this rank's files; return their sizes."""
        sizes = {}
        for part, names in self.share.items():
            blocks = {name: parts[part].blocks[name] for name in names}
            header, begins = raw_header(blocks, _ALIGNED)
            file = raw_file(part, rank)
            size = len(header) + sum(
                padded(block.tensor.nbytes, _ALIGNED) for block in blocks.values()
            )
            mapped = storage.make_mapped(self.name, file, size)
            mapped[: len(header)] = header
            content = torch.frombuffer(mapped, dtype=torch.uint8)
            for name, block in blocks.items():
                begin = len(header) + begins[name]
                place = content[begin : begin + block.tensor.nbytes]
                self.places.append(place.view(block.tensor.dtype).view(block.tensor.shape))
            sizes[file] = size
        return sizes

    def fill(self, parts: Mapping[str, Part]) -> None:
        """Copy this rank's blocks into its files."""
        blocks = [
            parts[part].blocks[name].tensor for part, names in self.share.items() for name in names
        ]
        with torch.no_grad():
            foreach.copy_(self.places, blocks)


class MemoryWriter:
    """Writes the copies of one run; every rank has one, and calls its methods at the same steps.

    Args:
        storage: where the copies lie; the ranks share it.
    """

    def __init__(self, storage: MemoryStorage) -> None:
        connected = dist.is_available() and dist.is_initialized()
        self._ranks = Ranks(gloo_group("memory: copies") if connected else None)
        self._storage = storage
        self._versions = {"torch": torch.__version__, "python": platform.python_version()}
        self._facts: _Facts | None = None  # of the copies that are in the folders
        self._plan: CheckpointPlan | None = None  # on rank 0
        self._folders: list[_Folder] = []
        self._written: _Folder | None = None  # by `write`, for `commit`

    def write(self, step: int, snapshot: Snapshot, *, config_yaml: str) -> int:
        """Write the state of a step, invisibly; return the bytes of the copy, on rank 0.

        It is complete on return: `commit`, or the resume of a run whose records have come to this
        step, makes it visible. The config is that of rank 0.

        Raises:
            UsageError: the state can't be stored.
            RunError: there is no room; the copies before are untouched.
        """
        failure = f"the copy of step {step} was not made"
        error: Exception | None = None
        staged: Staged | None = None
        said = _CHANGED
        folder = self._folders[0] if len(self._folders) == 2 else None
        try:
            staged = stage(snapshot)
            if folder is not None and self._is_as_planned(staged, folder):
                folder.fill(staged.parts)
                self._describe(step, staged, folder, config_yaml)
                said = _WRITTEN
        except Exception as caught:  # every rank raises it, after the vote
            error = caught
            said = _FAILED
        said = self._worst(said)
        if said == _FAILED:
            self._raise(failure, error)
        if said == _CHANGED:
            assert staged is not None
            folder = self._write_anew(failure, step, staged, config_yaml)
        assert folder is not None
        if self._ranks.is_main:
            self._storage.mark_complete(folder.name)
        self._written = folder
        return sum(folder.sizes.values())

    def commit(self, step: int) -> None:
        """Make the copy visible that was written, and take back the folder of the one before."""
        written = self._written
        assert written is not None, "a copy was written"
        self._written = None
        if self._ranks.is_main:
            name = step_name(step)
            self._storage.show(written.name, name)
            written.name = name
            for other in self._folders:
                if other is not written and self._storage.exists(other.name):
                    other.name = self._storage.hide(other.name)
            self._storage.delete_others(step)
        # the one that was just written is the next but one
        self._folders.sort(key=lambda folder: folder is written)

    def _is_as_planned(self, staged: Staged, folder: _Folder) -> bool:
        """Return whether this rank's part can be written into the folder as it is."""
        if any(groups["values"] for groups in staged.groups.values()):
            return False  # numbers of a rank's own parameters, which rank 0 lacks
        if self._ranks.is_main:
            kept = {} if self._plan is None else self._plan.groups
            numbers = {name: len(groups["groups"]) for name, groups in staged.groups.items()}
            if numbers != {name: len(groups["groups"]) for name, groups in kept.items()}:
                return False  # options of a group that rank 0 lacks
            if not self._storage.exists(folder.name):
                return False  # the run has gone back
        return _Facts.of(staged) == self._facts

    def _describe(self, step: int, staged: Staged, folder: _Folder, config_yaml: str) -> None:
        """Write the files beside the tensors, on rank 0."""
        if not self._ranks.is_main:
            return
        plan = self._plan
        assert plan is not None
        now = staged.groups
        groups = plan.groups
        if folder in self._folders:  # else it was planned just now
            groups = {name: _with_options(kept, now[name]) for name, kept in groups.items()}
        text = json.dumps({**staged.state, GROUPS_KEY: groups}, sort_keys=True) + "\n"
        beside = {STATE: text.encode(), CONFIG: config_yaml.encode()}
        files = {file: FileInfo(size, None) for file, size in folder.sizes.items()}
        files |= {file: FileInfo(len(data), zlib.crc32(data)) for file, data in beside.items()}
        manifest = Manifest(
            step, files, plan.parameters, tuple(plan.parts), self._versions, self._ranks.size
        )
        self._storage.describe(folder.name, beside, manifest.to_bytes())

    def _write_anew(self, failure: str, step: int, staged: Staged, config_yaml: str) -> _Folder:
        """Plan a copy with all ranks, and write it into a new folder."""
        facts = _Facts.of(staged)
        # One more folder is made where nothing has changed. On another rank something may have.
        keeps = len(self._folders) == 1 and facts == self._facts
        keeps = self._worst(_WRITTEN if keeps else _CHANGED) == _WRITTEN
        if not keeps:
            self._folders.clear()
        self._facts = facts
        made: list[_Folder] = []

        def plan(described: list[Description]) -> list[tuple[str, Share]]:
            self._plan = merge(described)
            if not keeps:
                self._storage.delete_drafts()
            name = self._storage.begin(step_name(step))
            shares = shared_out([rank.blocks for rank in described])
            return [(name, share) for share in shares]

        def describe() -> Description:
            tensors = {
                part: {name: block.info for name, block in content.blocks.items()}
                for part, content in staged.parts.items()
            }
            return Description(tensors, facts.aliases, staged.groups, facts.held)

        def make() -> dict[str, int]:
            sizes = made[0].make(self._storage, self._ranks.rank, staged.parts)
            made[0].fill(staged.parts)
            return sizes

        def finish(sizes: Sequence[dict[str, int]]) -> None:
            made[0].sizes = {file: size for rank in sizes for file, size in rank.items()}
            self._describe(step, staged, made[0], config_yaml)

        try:
            made.append(_Folder(*self._ranks.exchange(failure, describe, plan)))
            self._ranks.all_reduce(failure, make, finish)
        except Exception:
            self._facts = None
            self._folders.clear()
            if self._ranks.is_main:
                self._storage.delete_drafts()
            raise
        self._folders.insert(0, made[0])
        return made[0]

    def _worst(self, said: int) -> int:
        """Return the greatest of what the ranks say."""
        if self._ranks.size == 1:
            return said
        box = torch.full((1,), said, dtype=torch.int32)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self._ranks.group)
        return int(box.item())

    def _raise(self, failure: str, error: Exception | None) -> None:
        """Raise one rank's error on all ranks."""

        def own() -> None:
            if error is not None:
                raise error

        self._ranks.run(failure, own)


def shared_out(held: Sequence[Held]) -> list[Share]:
    """Give each block to one of the ranks that hold it: the one that has fewest bytes so far.

    Args:
        held: by rank.
    """
    holders: dict[tuple[str, str, Any], list[int]] = {}
    sizes: dict[tuple[str, str, Any], int] = {}
    for rank, parts in enumerate(held):
        for part, blocks in parts.items():
            for name, (_shape, dtype, block) in blocks.items():
                if block is not None:
                    key = part, name, block
                    holders.setdefault(key, []).append(rank)
                    sizes[key] = torch.Size(block[1]).numel() * dtype.itemsize
    shares: list[Share] = [{MODEL: []} for _ in held]  # each rank has a file of the model
    bytes_of = [0] * len(held)
    for key in sorted(holders, key=lambda key: -sizes[key]):
        rank = min(holders[key], key=bytes_of.__getitem__)
        bytes_of[rank] += sizes[key]
        part, name, _block = key
        shares[rank].setdefault(part, []).append(name)
    return shares


def _with_options(kept: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's groups with the options that they have now."""
    both = zip(kept["groups"], now["groups"], strict=True)
    groups = [{**group, "options": own["options"]} for group, own in both]
    return {"groups": groups, "values": kept["values"]}
