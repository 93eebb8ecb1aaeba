"""Third stop, write: every rank writes its share of the tensors into the draft, in one of three formats.

    sharded   PART/__RANK_0.distcp   each rank its own blocks, replicas shared out; any number of ranks loads them
    full      PART/__0_0.distcp      whole tensors, which rank 0 gathers one at a time
    local     PART/rank-00000.raw    each rank's blocks as they lie in its memory, replicas too; for the same ranks

`sharded` and `full` are torch.distributed.checkpoint's (DCP's) files, with its `.metadata` in each part; its own `load`
reads them. A raw file has 8 bytes with the length of its header; the header, JSON: name → dtype, shape, offset, block,
at; then the blocks' elements.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from lockstep.checkpoint.manifest import METADATA, raw_file
from lockstep.checkpoint.plan import CheckpointPlan, Description, global_plan, local_plan
from lockstep.checkpoint.ranks import Ranks, TensorSource, blocks_of, gather_tensor, sources_of
from lockstep.checkpoint.snapshot import Part, Staged, TensorBlock, dtype_name, tensor_bytes
from lockstep.checkpoint.storage import ChecksumStream, FileFacts, Location
from lockstep.errors import RunError

Format = Literal["sharded", "full", "local"]


@dataclass(frozen=True)
class WrittenFiles:
    """What one rank wrote: its files (path inside the checkpoint), and what `finish` needs besides."""

    files: dict[str, FileFacts]
    results: Any = None


class FormatWriter(ABC):
    """Writes the tensors of one checkpoint in one format; every rank has one.

    Args:
        staged: what this rank holds.
        ranks: the ranks that save together.
        doing: what fails if this fails, for messages.
    """

    raw_ranks: int | None = None  # `Manifest.ranks`

    def __init__(self, staged: Staged, ranks: Ranks, doing: str) -> None:
        self.staged, self.ranks, self.doing = staged, ranks, doing

    @abstractmethod
    def describe(self) -> Any:
        """Return what rank 0 must know of this rank's blocks; no values."""

    @abstractmethod
    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[Any]:
        """Return the share of each rank; on rank 0."""

    @abstractmethod
    def write(self, draft: Location, share: Any) -> WrittenFiles:
        """Write this rank's share; on every rank."""

    def finish(self, draft: Location, written: Sequence[WrittenFiles]) -> dict[str, FileFacts]:
        """Write what comes after all shares, and return the facts of all tensor files; on rank 0."""
        return {file: facts for rank in written for file, facts in rank.files.items()}


def writer_of(format: Format, staged: Staged, ranks: Ranks, doing: str) -> FormatWriter:
    """Return the writer of a format. One rank's blocks are whole tensors: all formats are then `sharded`."""
    kinds: dict[Format, type[FormatWriter]] = {"sharded": ShardedWriter, "full": FullWriter, "local": LocalWriter}
    return (kinds[format] if ranks.size > 1 else ShardedWriter)(staged, ranks, doing)


def _require_seen(draft: Location) -> None:
    if not draft.storage.sees(draft.name):
        raise RunError(
            f"{draft} was made by rank 0, but this rank does not see it",
            why="the folder of checkpoints is not shared between the hosts",
            fix="choose an --output-dir on a file system that all hosts mount",
        )


# ---- sharded ----


class ShardedWriter(FormatWriter):
    """Writes DCP's files, each block once."""

    def __init__(self, staged: Staged, ranks: Ranks, doing: str) -> None:
        super().__init__(staged, ranks, doing)
        self.metadata: dict[str, Metadata] = {}

    def describe(self) -> dict[str, SavePlan]:
        return {part: local_plan(content) for part, content in self.staged.parts.items()}

    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[dict[str, SavePlan]]:
        return self.share_out(plan.parts, [rank.blocks for rank in ranks])

    def share_out(self, parts: Sequence[str], ranks: Sequence[dict[str, SavePlan]]) -> list[dict[str, SavePlan]]:
        """Return what each rank is to write of each part, and keep the metadata."""
        shares: list[dict[str, SavePlan]] = [{} for _ in ranks]
        for part in parts:
            plans, self.metadata[part] = global_plan([rank.get(part, SavePlan([])) for rank in ranks])
            for share, plan in zip(shares, plans, strict=True):
                share[part] = plan
        return shares

    def write(self, draft: Location, share: dict[str, SavePlan]) -> WrittenFiles:
        _require_seen(draft)
        return self.write_parts(draft, share, self.staged.parts)

    def write_parts(self, draft: Location, share: dict[str, SavePlan], parts: dict[str, Part]) -> WrittenFiles:
        """Write what the plans give to this rank."""
        written = WrittenFiles({}, {})
        for part, plan in share.items():
            files = _PartFiles(draft, part)
            written.results[part] = files.write(plan, parts.get(part, Part()))
            written.files.update(files.facts)
        return written

    def finish(self, draft: Location, written: Sequence[WrittenFiles]) -> dict[str, FileFacts]:
        files = super().finish(draft, written)
        for part, metadata in self.metadata.items():
            part_files = _PartFiles(draft, part)
            part_files.finish(metadata, [rank.results[part] for rank in written])
            files |= part_files.facts
        return files


class _PartFiles(FileSystemWriter):
    """DCP's writer of one part of a draft; `facts` holds size and checksum of each file written."""

    def __init__(self, draft: Location, part: str) -> None:
        # The storage makes files durable. No copying ahead: pieces staged on CPU need none, and it would touch the
        # current device of a background thread.
        super().__init__(Path(part), per_thread_copy_ahead=0, sync_files=False)
        self.facts: dict[str, FileFacts] = {}
        self.fs = _DraftFiles(draft, self.facts)

    def write(self, plan: SavePlan, part: Part) -> list[WriteResult]:
        """Write what the plan gives to this rank; no file if that is nothing."""
        if not plan.items:
            return []
        results: list[WriteResult] = self.write_data(plan, _PieceSavePlanner(part)).wait()
        return results

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP's own holds the absolute path and a random id: the same state would differ in bytes


class _DraftFiles(FileSystem):
    """Creates DCP's files in a draft; `.metadata` at once by its name, for nobody sees a draft."""

    def __init__(self, draft: Location, facts: dict[str, FileFacts]) -> None:
        self._draft, self._facts = draft, facts

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[ChecksumStream, None, None]:
        assert mode == "wb"
        file = PurePath(path).as_posix().removesuffix(".tmp")
        with self._draft.create(file) as stream:
            yield stream
        self._facts[file] = stream.facts

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # DCP asks whether it must remove an older `.metadata` first

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert (PurePath(path).name, PurePath(new_path).name) == (f"{METADATA}.tmp", METADATA)


class _PieceSavePlanner(DefaultSavePlanner):
    """Gives DCP the blocks of a part."""

    def __init__(self, part: Part) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.part = part

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.part.block(write_item.index.fqn)


# ---- full ----


class FullWriter(ShardedWriter):
    """Has rank 0 write whole tensors; each is gathered when its turn to be written comes."""

    def __init__(self, staged: Staged, ranks: Ranks, doing: str) -> None:
        super().__init__(staged, ranks, doing)
        self._sources: dict[str, dict[str, TensorSource]] = {}
        self._ended = False  # all ranks have left the gathering

    def describe(self) -> Any:
        return {part: blocks_of(content) for part, content in self.staged.parts.items()}

    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[dict[str, SavePlan]]:
        self._sources = {part: sources_of([rank.blocks.get(part, {}) for rank in ranks]) for part in plan.parts}
        alone = self.share_out(plan.parts, [{part: local_plan(content) for part, content in self._wholes().items()}])
        return [*alone, *({} for _ in ranks[1:])]

    def write(self, draft: Location, share: dict[str, SavePlan]) -> WrittenFiles:
        if not self.ranks.is_main:
            while self._gather(None):
                pass
            return WrittenFiles({})
        failed: Exception | None = None
        written = WrittenFiles({})
        try:
            written = self.write_parts(draft, share, self._wholes())
        except Exception as error:
            failed = error
        if not self._ended:
            self._gather(failed)
        if failed is not None:
            raise failed
        return written

    def finish(self, draft: Location, written: Sequence[WrittenFiles]) -> dict[str, FileFacts]:
        return super().finish(draft, written[:1])

    def _wholes(self) -> dict[str, Part]:
        """Return parts of whole tensors without values, which are gathered when DCP reads them."""
        return {
            part: Part(
                {
                    name: TensorBlock.whole(torch.empty(s.shape, dtype=s.dtype, device="meta"))
                    for name, s in sources.items()
                },
                read=partial(self._read, part),
            )
            for part, sources in self._sources.items()
        }

    def _read(self, part: str, name: str) -> Tensor:
        (whole,) = self._gather((part, name))
        assert whole is not None, "rank 0 gets it"
        return whole

    def _gather(self, wanted: tuple[str, str] | Exception | None) -> list[Tensor | None]:
        """Gather the tensor that rank 0 wants: its part and its name. Every rank calls it.

        Args:
            wanted: rank 0's counts: None: no more of them; an error: it is raised on all ranks.

        Returns:
            the tensor, on other ranks than 0 None; an empty list if rank 0 wants no more.
        """

        def ask() -> tuple[str, str, TensorSource] | None:
            if isinstance(wanted, Exception):
                raise wanted
            return None if wanted is None else (*wanted, self._sources[wanted[0]][wanted[1]])

        self._ended = True
        asked = self.ranks.broadcast(self.doing, ask)
        if asked is None:
            return []
        part, name, source = asked
        piece = self.staged.parts.get(part, Part()).pieces.get(name)
        whole = gather_tensor(source, piece, self.doing, self.ranks)
        self._ended = False  # not reached where an exchange failed: it failed on all ranks
        return [whole]


# ---- local ----


class LocalWriter(FormatWriter):
    """Writes each rank's blocks as they are: nothing is planned, shared out or moved."""

    def __init__(self, staged: Staged, ranks: Ranks, doing: str) -> None:
        super().__init__(staged, ranks, doing)
        self.raw_ranks = ranks.size

    def describe(self) -> None:
        return None

    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[None]:
        return [None] * len(ranks)

    def write(self, draft: Location, share: None) -> WrittenFiles:
        _require_seen(draft)
        files = {raw_file(part, self.ranks.rank): content for part, content in self.staged.parts.items()}
        return WrittenFiles({file: _write_raw(draft, file, content) for file, content in files.items()})


def _write_raw(draft: Location, file: str, part: Part) -> FileFacts:
    header: dict[str, Any] = {}
    position = 0
    for name, piece in part.pieces.items():
        header[name] = {
            "dtype": dtype_name(piece.tensor.dtype), "shape": list(piece.shape), "offset": list(piece.offset),
            "block": list(piece.tensor.shape), "at": position,
        }  # fmt: skip
        position += piece.tensor.numel() * piece.tensor.element_size()
    text = json.dumps(header).encode()
    with draft.create(file) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in part.pieces:
            stream.write(tensor_bytes(part.block(name)))
    return stream.facts
