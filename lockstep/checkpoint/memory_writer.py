"""Write the copies of a run into shared memory; each is complete when it is written.

A copy is made after a step, before people read of it, and the ranks wait for it. So little may
happen in it: what is the same at each copy is agreed on once, with the first one.

    first copy   each rank describes its blocks → rank 0 gives each block to one of those that hold
                 it → each rank makes a file a part, of the size that it needs, and maps it
    each copy    tensors → their places in the mapped files, one copy in memory
                 → one all-reduce: every rank has written, and nothing has changed
    commit       the first rank of each host renames the folder

Each host has all files of a copy; where there are several, `memory_hosts.py` says who writes or
sends what of them, and it comes before the all-reduce.

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

from lockstep.checkpoint.manifest import (
    CONFIG,
    GROUPS_KEY,
    MODEL,
    STATE,
    Manifest,
    raw_file,
)
from lockstep.checkpoint.memory import MemoryStorage
from lockstep.checkpoint.memory_hosts import (
    Duties,
    Exchange,
    Held,
    Share,
    duties_of,
    host_of,
    leads_host,
)
from lockstep.checkpoint.ranks import Ranks, held_blocks
from lockstep.checkpoint.snapshot import (
    CheckpointPlan,
    Description,
    Part,
    Snapshot,
    Staged,
    describe,
    merge,
    stage,
)
from lockstep.checkpoint.storage import MANIFEST, FileInfo, step_name
from lockstep.checkpoint.write import raw_header
from lockstep.division import round_up
from lockstep.torch_compat import foreach

_ALIGNED = 64  # bytes: where a block may begin in a file
# outcomes of a rank's part of a copy; the greatest of all ranks counts
_WRITTEN = 0
_CHANGED = 1
_FAILED = 2


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
    """Holds one of the two folders, and the files in it that this rank writes."""

    name: str  # now; on the first rank of each host
    share: Share
    duties: Duties
    exchange: Exchange
    # part and name of a block → its places in the files: its own, and in a twin of another's
    places: list[tuple[str, str, Tensor]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # of the files of all ranks; on rank 0

    def make(self, storage: MemoryStorage, rank: int, parts: Mapping[str, Part]) -> dict[str, int]:
        """Make and map this rank's files, and their twins; return the sizes of its own."""
        sizes = self._make(storage, rank, self.share, parts)
        for owner, share in self.duties.twins:
            self._make(storage, owner, share, parts)
        return sizes

    def _make(
        self, storage: MemoryStorage, owner: int, share: Share, parts: Mapping[str, Part]
    ) -> dict[str, int]:
        """Make and map the files of a rank, from blocks of this one; return their sizes."""
        sizes = {}
        contents = {}
        for part, names in share.items():
            blocks = {name: parts[part].blocks[name] for name in names}
            header, begins = raw_header(blocks, _ALIGNED)
            file = raw_file(part, owner)
            size = len(header) + sum(
                round_up(block.tensor.nbytes, _ALIGNED) for block in blocks.values()
            )
            mapped = storage.make_mapped(self.name, file, size)
            mapped[: len(header)] = header
            content = torch.frombuffer(mapped, dtype=torch.uint8)
            for name, block in blocks.items():
                begin = len(header) + begins[name]
                place = content[begin : begin + block.tensor.nbytes]
                place = place.view(block.tensor.dtype).view(block.tensor.shape)
                self.places.append((part, name, place))
            sizes[file] = size
            contents[file] = content
        if share is self.share:
            self.exchange.keep_own([content for _, content in sorted(contents.items())])
        return sizes

    def fill(self, parts: Mapping[str, Part]) -> None:
        """Copy this rank's blocks into its files."""
        blocks = [parts[part].blocks[name].tensor for part, name, _ in self.places]
        with torch.no_grad():
            foreach.copy_([place for _, _, place in self.places], blocks)


class MemoryWriter:
    """Writes the copies of one run; every rank has one, and calls its methods at the same steps.

    Args:
        storage: where the copies lie; the ranks of a host share it.
    """

    def __init__(self, storage: MemoryStorage) -> None:
        self._ranks = Ranks.on_gloo("memory: copies")
        self._storage = storage
        self._versions = {"torch": torch.__version__, "python": platform.python_version()}
        self._facts: _Facts | None = None  # of the copies that are in the folders
        self._plan: CheckpointPlan | None = None  # on rank 0
        self._folders: list[_Folder] = []
        self._written: _Folder | None = None  # by `write`, for `commit`
        self._leads: bool | None = None  # this is the first rank of its host; None: not asked yet
        # on the first rank of a host without rank 0: the step that is shown once it is recorded
        self._unproven: tuple[_Folder, int] | None = None

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
        outcome = _CHANGED
        self._show_proven()
        folder = self._folders[0] if len(self._folders) == 2 else None
        beside: dict[str, bytes] | None = None
        try:
            staged = stage(snapshot)
            if folder is not None and self._is_as_planned(staged, folder):
                folder.fill(staged.parts)
                beside = self._describe(step, staged, folder, config_yaml)
                outcome = _WRITTEN
        except Exception as caught:  # every rank raises it, after the vote
            error = caught
            outcome = _FAILED
        if folder is not None and folder.duties.several:
            received = folder.exchange.run(beside)
            try:
                if received is not None and outcome == _WRITTEN:
                    self._put_beside(folder, received)
            except Exception as caught:
                error = caught
                outcome = _FAILED
        outcome = self._worst_outcome(outcome)
        if outcome == _FAILED:
            self._raise(failure, error)
        if outcome == _CHANGED:
            assert staged is not None
            folder = self._write_anew(failure, step, staged, config_yaml)
        assert folder is not None
        if self._leads:
            self._storage.mark_complete(folder.name)
        self._written = folder
        return sum(folder.sizes.values())

    def commit(self, step: int) -> None:
        """Make the copy visible that was written, and take back the folder of the one before.

        A host without rank 0 does so before its next copy: by then the step is recorded, since
        whoever has done the step after it has waited for rank 0 in that.
        """
        written = self._written
        assert written is not None, "a copy was written"
        self._written = None
        if self._ranks.is_main:
            self._show(written, step)
        elif self._leads:
            self._unproven = written, step
        # the one that was just written is the next but one
        self._folders.sort(key=lambda folder: folder is written)

    def _show_proven(self) -> None:
        """Show the copy before this one on a host without rank 0."""
        unproven = self._unproven
        self._unproven = None
        if unproven is not None and self._storage.exists(unproven[0].name):
            self._show(*unproven)

    def _show(self, written: _Folder, step: int) -> None:
        name = step_name(step)
        self._storage.show(written.name, name)
        written.name = name
        for other in self._folders:
            if other is not written and self._storage.exists(other.name):
                other.name = self._storage.hide(other.name)
        self._storage.delete_others(step)

    def _is_as_planned(self, staged: Staged, folder: _Folder) -> bool:
        """Return whether this rank's part can be written into the folder as it is."""
        if any(groups["values"] for groups in staged.groups.values()):
            return False  # numbers of a rank's own parameters, which rank 0 lacks
        if self._ranks.is_main:
            kept = {} if self._plan is None else self._plan.groups
            numbers = {name: len(groups["groups"]) for name, groups in staged.groups.items()}
            if numbers != {name: len(groups["groups"]) for name, groups in kept.items()}:
                return False  # options of a group that rank 0 lacks
        if self._leads and not self._storage.exists(folder.name):
            return False  # the run has gone back
        return _Facts.of(staged) == self._facts

    def _describe(
        self, step: int, staged: Staged, folder: _Folder, config_yaml: str
    ) -> dict[str, bytes] | None:
        """Write the files beside the tensors, on rank 0, and return them; elsewhere None."""
        if not self._ranks.is_main:
            return None
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
        described = {**beside, MANIFEST: manifest.to_bytes()}
        self._put_beside(folder, described)
        return described

    def _put_beside(self, folder: _Folder, beside: Mapping[str, bytes]) -> None:
        """Write the files beside the tensors into the folder of this rank's host."""
        files = {file: data for file, data in beside.items() if file != MANIFEST}
        self._storage.describe(folder.name, files, beside[MANIFEST])

    def _write_anew(self, failure: str, step: int, staged: Staged, config_yaml: str) -> _Folder:
        """Plan a copy with all ranks, and write it into a new folder."""
        if self._leads is None:
            self._leads = leads_host(self._storage, self._ranks)
        facts = _Facts.of(staged)
        # One more folder is made where nothing has changed. On another rank something may have.
        keeps = len(self._folders) == 1 and facts == self._facts
        keeps = self._worst_outcome(_WRITTEN if keeps else _CHANGED) == _WRITTEN
        if not keeps:
            self._folders.clear()
        self._facts = facts
        try:
            folder = self._plan_folder(failure, step, staged, facts.held, deletes_drafts=not keeps)
            self._fill_new(folder, failure, step, staged, config_yaml)
        except Exception:
            self._facts = None
            self._folders.clear()
            if self._leads:
                self._storage.delete_drafts()
            raise
        self._folders.insert(0, folder)
        return folder

    def _plan_folder(
        self, failure: str, step: int, staged: Staged, held: Held, *, deletes_drafts: bool
    ) -> _Folder:
        """Decide with all ranks who writes which blocks; return the folder, still without files.

        Args:
            failure: what was not done, if it fails.
            step: whose copy it is.
            staged: this rank's state.
            held: the blocks of it that this rank holds.
            deletes_drafts: the folders so far are of another plan.
        """

        def describe_own() -> tuple[Description, str]:
            if self._leads and deletes_drafts:
                self._storage.delete_drafts()
            return describe(staged, held), host_of(self._storage)

        def decide(described: list[tuple[Description, str]]) -> list[tuple[str, Share, Duties]]:
            """Begin the folder on rank 0, and give each rank its share and duties."""
            descriptions = [description for description, _ in described]
            self._plan = merge(descriptions)
            name = self._storage.begin(step_name(step))
            held_by_rank = [description.blocks for description in descriptions]
            shares = shared_out(held_by_rank)
            duties = duties_of(shares, held_by_rank, [host for _, host in described])
            return [(name, *both) for both in zip(shares, duties, strict=True)]

        name, share, duties = self._ranks.exchange(failure, describe_own, decide)
        return _Folder(name, share, duties, Exchange(duties, self._ranks.group))

    def _fill_new(
        self, folder: _Folder, failure: str, step: int, staged: Staged, config_yaml: str
    ) -> None:
        """Make the files of a new folder on each host, and write the copy into them."""
        beside: list[dict[str, bytes] | None] = []  # on rank 0

        def make() -> dict[str, int]:
            sizes = folder.make(self._storage, self._ranks.rank, staged.parts)
            folder.fill(staged.parts)
            return sizes

        def describe_copy(sizes: list[dict[str, int]]) -> list[dict[str, int]]:
            """Write the files beside the tensors on rank 0, whose manifest has all sizes."""
            folder.sizes = {file: size for rank in sizes for file, size in rank.items()}
            beside.append(self._describe(step, staged, folder, config_yaml))
            return sizes

        sizes = self._ranks.all_reduce(failure, make, describe_copy)
        if not folder.duties.several:
            return

        exchange = folder.exchange
        self._ranks.run(failure, lambda: exchange.make(self._storage, folder.name, sizes))
        received = exchange.run(beside[0] if beside else None)
        self._ranks.run(
            failure, lambda: None if received is None else self._put_beside(folder, received)
        )

    def _worst_outcome(self, outcome: int) -> int:
        """Return the greatest outcome of all ranks."""
        if self._ranks.size == 1:
            return outcome
        box = torch.full((1,), outcome, dtype=torch.int32)
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
