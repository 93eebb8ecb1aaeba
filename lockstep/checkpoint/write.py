"""Write tensors into the draft, in one of three formats: the third stop of a save.

Every rank writes its share:

    sharded   PART/__RANK_0.distcp   each rank its own blocks, each replica once; any number of
                                     ranks loads them
    full      PART/__0_0.distcp      full tensors, which rank 0 gathers one at a time
    local     PART/rank-00000.raw    each rank's blocks as they lie in its memory, replicas too; for
                                     the same ranks

`sharded` and `full` are torch.distributed.checkpoint's (DCP's) files, with its `.metadata` in each
part. A raw file has 8 bytes with the length of its header; the header, JSON: name → dtype, shape,
offset, block, at; the blocks' elements.

Tests: tests/checkpoint/test_ranks.py, tests/checkpoint/test_background.py
"""

import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import IO, Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lockstep.checkpoint.archives import form_of
from lockstep.checkpoint.manifest import METADATA, dtype_name, raw_file
from lockstep.checkpoint.ranks import Ranks, TensorSource, gather_tensor, held_blocks, sources_of
from lockstep.checkpoint.snapshot import (
    CheckpointPlan,
    Description,
    Part,
    Staged,
    TensorBlock,
    global_plan,
    local_plan,
)
from lockstep.checkpoint.storage import FileInfo, Location
from lockstep.division import round_up
from lockstep.errors import RunError
from lockstep.models.safetensors_files import tensor_bytes
from lockstep.torch_compat.checkpoint_format import stored_at, tensor_file

Format = Literal["sharded", "full", "local"]

_COLLECTED = 1 << 20  # bytes of small pieces that are handed on together


@dataclass(frozen=True)
class WrittenFiles:
    """The files that one rank wrote, by their paths in the checkpoint, and results for `finish`."""

    files: dict[str, FileInfo]
    results: Any = None


class FormatWriter(ABC):
    """Writes the tensors of one checkpoint in one format; every rank has one."""

    raw_ranks: int | None = None  # `Manifest.ranks`

    def __init__(self, staged: Staged, ranks: Ranks, failure: str) -> None:
        self.staged = staged
        self.ranks = ranks
        self.failure = failure

    def describe(self) -> Any:
        """Return what `plan` needs to know of this rank's blocks, without their values."""
        return None

    @abstractmethod
    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[Any]:
        """Return the share that each rank is to write; on rank 0."""

    @abstractmethod
    def write(self, draft: Location, share: Any) -> WrittenFiles:
        """Write this rank's share; on every rank."""

    def finish(self, draft: Location, written: Sequence[WrittenFiles]) -> dict[str, FileInfo]:
        """Write the files that come after all shares; return size and checksum of each tensor file.

        It is called on rank 0.
        """
        return {file: info for rank in written for file, info in rank.files.items()}


def writer_of(format: Format, staged: Staged, ranks: Ranks, failure: str) -> FormatWriter:
    """Return the writer of a format.

    One rank alone has whole tensors and writes `sharded` in any case.
    """
    kinds: dict[Format, type[FormatWriter]] = {
        "sharded": ShardedWriter,
        "full": FullWriter,
        "local": LocalWriter,
    }
    return (kinds[format] if ranks.size > 1 else ShardedWriter)(staged, ranks, failure)


def _require_seen(draft: Location) -> None:
    if not draft.storage.sees(draft.name):
        what = f"{draft} was made by rank 0, but this rank does not see it"
        why = "the folder of checkpoints is not shared between the hosts"
        raise RunError(
            what, why=why, fix="choose an --output-dir on a file system that all hosts mount"
        )


class ShardedWriter(FormatWriter):
    """Writes DCP's files, each block once."""

    def __init__(self, staged: Staged, ranks: Ranks, failure: str) -> None:
        super().__init__(staged, ranks, failure)
        self.metadata: dict[str, Metadata] = {}

    def describe(self) -> dict[str, SavePlan]:
        return {part: local_plan(content) for part, content in self.staged.parts.items()}

    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[dict[str, SavePlan]]:
        return self.assign(plan.parts, [rank.blocks for rank in ranks])

    def assign(
        self, parts: Sequence[str], ranks: Sequence[dict[str, SavePlan]]
    ) -> list[dict[str, SavePlan]]:
        shares: list[dict[str, SavePlan]] = [{} for _ in ranks]
        for part in parts:
            plans, self.metadata[part] = global_plan(
                [rank.get(part, SavePlan([])) for rank in ranks]
            )
            for share, plan in zip(shares, plans, strict=True):
                share[part] = plan
        return shares

    def write(self, draft: Location, share: dict[str, SavePlan]) -> WrittenFiles:
        _require_seen(draft)
        return self.write_parts(draft, share, self.staged.parts)

    def write_parts(
        self, draft: Location, share: dict[str, SavePlan], parts: dict[str, Part]
    ) -> WrittenFiles:
        written = WrittenFiles({}, {})
        for part, plan in share.items():
            files = _PartFiles(draft, part)
            written.results[part] = files.write_blocks(plan, parts.get(part, Part()))
            written.files.update(files.info)
        return written

    def finish(self, draft: Location, written: Sequence[WrittenFiles]) -> dict[str, FileInfo]:
        files = super().finish(draft, written)
        for part, metadata in self.metadata.items():
            part_files = _PartFiles(draft, part)
            part_files.finish(metadata, [rank.results[part] for rank in written])
            files |= part_files.info
        return files


class _PartFiles(FileSystemWriter):
    """DCP's writer of one part of a draft; `info` holds size and checksum of each file written.

    Blocks are written here: DCP takes a third of a millisecond for each, however small it is.
    """

    def __init__(self, draft: Location, part: str) -> None:
        super().__init__(Path(part), sync_files=False)  # the storage syncs files
        self.info: dict[str, FileInfo] = {}
        self.fs: _DraftFiles = _DraftFiles(draft, self.info)
        self._part = part

    def write_blocks(self, plan: SavePlan, content: Part) -> list[WriteResult]:
        """Write this rank's blocks one after the other into a file; none make no file."""
        if not plan.items:
            return []
        file = tensor_file(plan)
        results = []
        with self.fs.create_stream(f"{self._part}/{file}", "wb") as stream:
            for item in plan.items:
                begin = stream.tell()
                _write_archive(content.tensor(item.index.fqn), cast(IO[bytes], stream))
                length = stream.tell() - begin
                results.append(WriteResult(item.index, length, stored_at(file, begin, length)))
        return results

    def storage_meta(self) -> StorageMeta:
        # DCP's has an absolute path and a random id, which would differ for the same state
        return StorageMeta()


def _write_archive(block: Tensor, stream: IO[bytes]) -> None:
    """Write a block as `torch.save` does."""
    tensor = block.detach().cpu()
    form = form_of(tensor)
    if form is not None:
        for piece in form.pieces(tensor):
            stream.write(piece)
        return
    if tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()  # else all of the memory that it is a part of would be written
    torch.save(tensor, stream)


class _DraftFiles(FileSystem):
    """Creates DCP's files in a draft.

    `.metadata` without a temporary name, because nobody sees a draft.
    """

    def __init__(self, draft: Location, info: dict[str, FileInfo]) -> None:
        self._draft = draft
        self._file_info = info

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Create a file, and collect the forty pieces as which `torch.save` writes a tensor."""
        assert mode == "wb"
        file = PurePath(path).as_posix().removesuffix(".tmp")
        with (
            self._draft.create(file) as stream,
            io.BufferedWriter(stream, _COLLECTED) as collected,
        ):
            yield collected
        self._file_info[file] = stream.info

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # DCP asks whether it must remove an older `.metadata` first

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert (PurePath(path).name, PurePath(new_path).name) == (f"{METADATA}.tmp", METADATA)


class FullWriter(ShardedWriter):
    """Has rank 0 write whole tensors, each of which is gathered just before it is written."""

    def __init__(self, staged: Staged, ranks: Ranks, failure: str) -> None:
        super().__init__(staged, ranks, failure)
        self._sources: dict[str, dict[str, TensorSource]] = {}
        self._ended = False  # whether the other ranks have left the loop of `_gather`

    def describe(self) -> Any:
        return {part: held_blocks(content) for part, content in self.staged.parts.items()}

    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[dict[str, SavePlan]]:
        self._sources = {
            part: sources_of([rank.blocks.get(part, {}) for rank in ranks]) for part in plan.parts
        }
        alone = self.assign(
            plan.parts, [{part: local_plan(content) for part, content in self._wholes().items()}]
        )
        return [*alone, *({} for _ in ranks[1:])]

    def write(self, draft: Location, share: dict[str, SavePlan]) -> WrittenFiles:
        """Gather tensors on rank 0, which writes them; the other ranks only send."""
        if not self.ranks.is_main:
            while self._gather(None):
                pass
            return WrittenFiles({})
        try:
            written = self.write_parts(draft, share, self._wholes())
        except Exception as error:
            if not self._ended:
                self._gather(error)
            raise
        self._gather(None)
        return written

    def finish(self, draft: Location, written: Sequence[WrittenFiles]) -> dict[str, FileInfo]:
        return super().finish(draft, written[:1])

    def _wholes(self) -> dict[str, Part]:
        """Return parts of whole tensors without values.

        `_read` gathers the values when DCP asks for them.
        """
        return {
            part: Part(
                {n: TensorBlock.unread(s.shape, s.dtype) for n, s in sources.items()},
                read=partial(self._read, part),
            )
            for part, sources in self._sources.items()
        }

    def _read(self, part: str, name: str) -> Tensor:
        (full,) = self._gather((part, name))
        assert full is not None, "rank 0 gets it"
        return full

    def _gather(self, wanted: tuple[str, str] | Exception | None) -> list[Tensor | None]:
        """Gather the tensor that rank 0 wants.

        None ends the loop, with an empty list, an error is raised on all.
        """

        def ask() -> tuple[str, str, TensorSource] | None:
            if isinstance(wanted, Exception):
                raise wanted
            return None if wanted is None else (*wanted, self._sources[wanted[0]][wanted[1]])

        self._ended = True
        asked = self.ranks.broadcast(self.failure, ask)
        if asked is None:
            return []
        part, name, source = asked
        block = self.staged.parts.get(part, Part()).blocks.get(name)
        full = gather_tensor(source, block, self.failure, self.ranks)
        self._ended = False  # not reached if an exchange failed, which ends the loop on all ranks
        return [full]


class LocalWriter(FormatWriter):
    """Writes each rank's blocks as they are, without a plan."""

    def __init__(self, staged: Staged, ranks: Ranks, failure: str) -> None:
        super().__init__(staged, ranks, failure)
        self.raw_ranks = ranks.size

    def plan(self, plan: CheckpointPlan, ranks: Sequence[Description]) -> list[None]:
        return [None] * len(ranks)

    def write(self, draft: Location, share: None) -> WrittenFiles:
        """Write this rank's blocks one after the other into a file, after a header."""
        _require_seen(draft)
        files = {}
        for part, content in self.staged.parts.items():
            header, _ = raw_header(content.blocks)
            file = raw_file(part, self.ranks.rank)
            with draft.create(file) as stream:
                stream.write(header)
                for name in content.blocks:
                    stream.write(tensor_bytes(content.tensor(name)))
            files[file] = stream.info
        return WrittenFiles(files)


def raw_header(blocks: Mapping[str, TensorBlock], aligned: int = 1) -> tuple[bytes, dict[str, int]]:
    """Return the head of a raw file, which says where blocks lie, as `LocalReader` reads it.

    Args:
        blocks: by name, in the order in which they come after the head.
        aligned: of how many bytes the head's length, and each block's room, is a multiple.

    Returns:
        (the head, where each block begins behind it)
    """
    described: dict[str, Any] = {}
    begins: dict[str, int] = {}
    position = 0
    for name, block in blocks.items():
        begins[name] = position
        described[name] = {
            "dtype": dtype_name(block.tensor.dtype),
            "shape": list(block.shape),
            "offset": list(block.offset),
            "block": list(block.tensor.shape),
            "at": position,
        }
        position += round_up(block.tensor.nbytes, aligned)
    text = json.dumps(described).encode()
    text += b" " * (round_up(8 + len(text), aligned) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text, begins
