"""Read the tensors of a checkpoint of any format into blocks of any layout.

Nothing that is read is trusted: the description of a part is verified by its checksum, checked
field by field, and compared with the manifest and with the sizes of the files before anything is
allocated.

Tests: tests/checkpoint/test_ranks.py, tests/checkpoint/test_damage.py, tests/faults/test_loads.py
"""

import io
import zipfile
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from shlex import quote
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from lockstep.checkpoint.manifest import (
    JSON_LIMIT,
    METADATA,
    METADATA_LIMIT,
    MODEL,
    Manifest,
    count_of,
    counts_of,
    dtype_of,
    parse_json,
    problems_of_files,
    raw_file,
    text_of,
    unreadable_error,
)
from lockstep.checkpoint.metadata import StoredAt, StoredPart, check_sizes, parse_metadata
from lockstep.checkpoint.ranks import Ranks, narrow
from lockstep.checkpoint.snapshot import TensorBlock
from lockstep.checkpoint.storage import Location, read_into_buffer
from lockstep.errors import LockstepError, UsageError
from lockstep.heartbeat.writer import went_forward
from lockstep.torch_compat.checkpoint_format import read_items

# Bytes of a block that is read whole before it is unpacked, which takes twenty reads; torch asks
# for those of a larger one itself, so that it is never in memory twice.
_READ_AT_ONCE = 1 << 20
_READ_AT_ONCE_FROM_AFAR = 64 << 20


def open_part(checkpoint: Location, manifest: Manifest, part: str) -> "PartReader":
    """Return a reader for one part.

    Raise a DamagedError if its description or the size of a file is not as written.
    """
    if problems := problems_of_files(checkpoint, manifest, manifest.files_of(part), thorough=False):
        raise unreadable_error(f"{checkpoint}/{part}", problems[0])
    return (ShardedReader if manifest.ranks is None else LocalReader)(checkpoint, manifest, part)


def _compare_with_manifest(stored: StoredPart, manifest: Manifest) -> None:
    infos = stored.info()
    listed = {name: (info.shape, info.dtype) for name, info in manifest.parameters.items()}
    if infos != listed:
        name = min({*infos, *listed}, key=lambda n: (infos.get(n) == listed.get(n), n))
        raise ValueError(f"it disagrees with the manifest about {name}")


class ShardedReader:
    """Reads blocks of one part of DCP's files; raises a DamagedError if `.metadata` is refused."""

    def __init__(self, checkpoint: Location, manifest: Manifest, part: str) -> None:
        self.checkpoint = checkpoint
        self.part = part
        self.stored = read_stored_part(checkpoint, manifest, part)

    def read_into(self, blocks: dict[str, TensorBlock]) -> None:
        """Fill the blocks from the files of the ranks that wrote parts of them."""
        items: dict[StoredAt, list[ReadItem]] = defaultdict(list)
        for name, block in blocks.items():
            if block.tensor.numel():
                chunk = ChunkStorageMetadata(torch.Size(block.offset), block.tensor.size())
                for item in read_items(name, self.stored.tensors[name], chunk):
                    items[self.stored.places[item.storage_index]].append(item)
        places: dict[str, list[StoredAt]] = defaultdict(list)
        for place in items:
            places[place.relative_path].append(place)
        for path, of_file in places.items():
            with self.checkpoint.open(f"{self.part}/{path}") as stream:
                for place in sorted(of_file, key=lambda place: place.offset):
                    stored = self._load_block(stream, place)
                    self._copy(stored, items[place], blocks)

    def _load_block(self, stream: BinaryIO, place: StoredAt) -> Tensor:
        """Return a stored block, or raise a DamagedError."""
        file = f"{self.checkpoint}/{self.part}/{place.relative_path}"
        archive: BinaryIO = cast(BinaryIO, _FileSlice(stream, place.offset, place.length))
        is_remote = self.checkpoint.storage.is_remote
        if place.length <= (_READ_AT_ONCE_FROM_AFAR if is_remote else _READ_AT_ONCE):
            archive = io.BytesIO(archive.read())
        try:
            check_block(archive, place.length)
        except ValueError as error:
            raise unreadable_error(file, error) from None
        archive.seek(0)
        with _explained(file):
            stored: Tensor = torch.load(archive, map_location="cpu", weights_only=True)
            return stored

    def _copy(
        self, stored: Tensor, items: Sequence[ReadItem], blocks: Mapping[str, TensorBlock]
    ) -> None:
        """Copy parts of a stored block to where they belong."""
        with torch.no_grad(), _explained(f"{self.checkpoint}/{self.part}"):
            for item in items:
                target = blocks[item.dest_index.fqn].tensor
                part = narrow(stored, item.storage_offsets, item.lengths)
                narrow(target, item.dest_offsets, item.lengths).copy_(part)
                went_forward()


@contextmanager
def _explained(where: str) -> Generator[None, None, None]:
    """Raise a DamagedError for an error of torch while it reads bytes with correct checksums.

    Bytes that are not tensors make torch raise nearly any error.
    """
    try:
        yield
    except (LockstepError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise unreadable_error(where, f"{type(error).__name__}: {lines[0]}") from error


def read_stored_part(checkpoint: Location, manifest: Manifest, part: str) -> StoredPart:
    """Return the content of one part from its `.metadata`, after comparing its checksum."""
    file = f"{part}/{METADATA}"
    problems = problems_of_files(checkpoint, manifest, [file], thorough=True)
    try:
        if problems:
            raise ValueError(problems[0])
        stored = parse_metadata(checkpoint.read(file, METADATA_LIMIT))
        sizes = {
            listed.removeprefix(f"{part}/"): manifest.files[listed].size
            for listed in manifest.files_of(part)
        }
        if unlisted := {place.relative_path for place in stored.places.values()} - sizes.keys():
            raise ValueError(
                f"it points at {part}/{min(unlisted)}, which the manifest does not list"
            )
        check_sizes(stored, sizes)
        if part == MODEL:
            _compare_with_manifest(stored, manifest)
    except ValueError as error:
        raise unreadable_error(f"{checkpoint}/{file}", error) from None
    return stored


def check_block(block: BinaryIO, length: int) -> None:
    """Raise a ValueError if a stored block of `length` bytes would unpack to more than these.

    The block is a zip archive as torch writes it.

    A hostile archive may be compressed, so that a megabyte unpacks to a gigabyte. Only its
    directory is read.
    """
    try:
        with zipfile.ZipFile(block) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile:
        return  # torch's reader raises for other data, and reads only plain tensors
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("a block is compressed, as torch never writes it")
    if sum(entry.file_size for entry in entries) > length:
        raise ValueError("a block claims to hold more bytes than it has")


class _FileSlice(io.RawIOBase):
    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream = stream
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + to)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._length - self._at)
        self._stream.seek(self._offset + self._at)
        data = self._stream.read(remaining if size < 0 else min(size, remaining))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._stream.seek(self._offset + self._at)
        taken = read_into_buffer(self._stream, view)
        self._at += taken
        return taken


@dataclass(frozen=True)
class RawBlock:
    """A block of a tensor, `start` bytes into a raw file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    block: tuple[int, ...]  # the shape of the block
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.block) * self.dtype.itemsize


class LocalReader:
    """Reads blocks of one part from the raw files of all ranks.

    If a block has replicas, that of the first rank is read.
    """

    def __init__(self, checkpoint: Location, manifest: Manifest, part: str) -> None:
        self._checkpoint = checkpoint
        self._part = part
        self.by_rank: list[dict[str, RawBlock]] = []
        try:
            for rank in range(manifest.ranks or 0):
                file = raw_file(part, rank)
                listed = manifest.files.get(file)
                self.by_rank.append(
                    {} if listed is None else _read_header(checkpoint, file, listed.size)
                )
            self._raw_blocks = self._without_replicas()
            self.stored = StoredPart()
            for name, (first, *rest) in self._raw_blocks.items():
                chunks = [
                    ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.block))
                    for b in (first, *rest)
                ]
                properties = TensorProperties(first.dtype)
                self.stored.tensors[name] = TensorStorageMetadata(
                    properties, torch.Size(first.shape), chunks
                )
            if part == MODEL:
                _compare_with_manifest(self.stored, manifest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable_error(f"{checkpoint}/{part}", error) from None

    def _without_replicas(self) -> dict[str, list[RawBlock]]:
        """Return each tensor's blocks, each once though several ranks wrote it."""
        by_name: dict[str, dict[tuple[int, ...], RawBlock]] = {}
        for blocks in self.by_rank:
            for name, block in blocks.items():
                mine = by_name.setdefault(name, {})
                first = next(iter(mine.values()), block)
                if (first.shape, first.dtype) != (block.shape, block.dtype):
                    raise ValueError(f"ranks disagree about {name}")
                if prod(block.block) or not prod(block.shape):
                    mine.setdefault(block.offset, block)
        for name, mine in by_name.items():
            if sum(prod(b.block) for b in mine.values()) != prod(
                next(iter(mine.values())).shape if mine else (1,)
            ):
                raise ValueError(f"the blocks of {name} do not make up the whole of it")
        return {name: list(mine.values()) for name, mine in by_name.items()}

    def read_into(self, blocks: dict[str, TensorBlock]) -> None:
        with torch.no_grad(), _explained(f"{self._checkpoint}/{self._part}"):
            for name, block in blocks.items():
                for raw in self._raw_blocks[name] if block.tensor.numel() else ():
                    _copy_overlap(self._checkpoint, raw, block)
                    went_forward()

    def check_topology(
        self, blocks: Mapping[str, TensorBlock], owner: Mapping[str, str], ranks: Ranks
    ) -> None:
        """Refuse these raw shards unless each rank loads exactly the blocks that it saved."""
        full_name = f"{self._checkpoint.name}-full"
        source = quote(str(self._checkpoint))
        new = quote(str(full_name))
        fix = f"lockstep checkpoint convert {source} --to full --output {new}, then --resume {new}"
        if len(self.by_rank) != ranks.size:
            what = (
                f"{self._checkpoint} holds the raw shards of {len(self.by_rank)} ranks"
                " (checkpoint.format: local); "
            )
            what += f"this run has {ranks.size}"
            raise UsageError(what, fix=fix)
        mine = self.by_rank[ranks.rank]
        for name, block in blocks.items():
            raw = mine.get(owner.get(name, name))
            if raw is not None and raw.shape != block.shape:
                # another model: the comparison of all names and shapes raises a better error
                continue
            if raw is None or (raw.offset, raw.block) != (block.offset, tuple(block.tensor.shape)):
                what = (
                    f"{self._checkpoint} holds raw shards (checkpoint.format: local) of a run that"
                    f" laid {name} over "
                )
                what += "its ranks otherwise than this one"
                raise UsageError(what, fix=fix)


PartReader = ShardedReader | LocalReader


def _read_header(checkpoint: Location, file: str, size: int) -> dict[str, RawBlock]:
    """Return the blocks of one raw file, each of which lies inside it.

    Raise a ValueError, KeyError … otherwise.
    """
    with checkpoint.open(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, JSON_LIMIT):
            raise ValueError(f"the header of {file} claims {length} bytes")
        header = parse_json(stream.read(length))
    blocks = {}
    for name, info in header.items():
        shape, offset, block = (counts_of(info[key]) for key in ("shape", "offset", "block"))
        start = 8 + length + count_of(info["at"])
        raw = RawBlock(file, dtype_of(text_of(info["dtype"])), shape, offset, block, start)
        if raw.start + raw.num_bytes > size:
            raise ValueError(f"{file} claims more bytes for {name} than it has")
        if any(o + b > s for o, b, s in zip(offset, block, shape, strict=True)):
            raise ValueError(f"a block of {name} lies outside it")
        blocks[name] = raw
    return blocks


def _copy_overlap(checkpoint: Location, raw: RawBlock, block: TensorBlock) -> None:
    """Copy what a saved block and a wanted block have in common, if anything."""
    low = [max(a, b) for a, b in zip(raw.offset, block.offset, strict=True)]
    ends = zip(low, raw.offset, raw.block, block.offset, block.tensor.shape, strict=True)
    lengths = [min(a + n, b + m) - start for start, a, n, b, m in ends]
    if any(length <= 0 for length in lengths):
        return
    with checkpoint.open(raw.file) as stream:
        stream.seek(raw.start)
        data = bytearray(stream.read(raw.num_bytes))
    source = torch.frombuffer(data, dtype=raw.dtype).reshape(raw.block)
    here, there = (
        [a - b for a, b in zip(low, offset, strict=True)] for offset in (block.offset, raw.offset)
    )
    narrow(block.tensor, here, lengths).copy_(narrow(source, there, lengths))
