"""Read the tensors of a checkpoint of any format into blocks of any layout.

Nothing that is read is trusted: the description of a part is verified by its checksum, checked
field by field, and compared with the manifest and with the sizes of the files before anything is
allocated.

Tests: tests/checkpoint/test_ranks.py, tests/checkpoint/test_damage.py, tests/faults/test_loads.py
"""

import io
import sys
import zipfile
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from shlex import quote
from typing import BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import skip_data

from lockstep.checkpoint.archives import begin_of_data, form_for
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
    unreachable_error,
    unreadable_error,
)
from lockstep.checkpoint.metadata import StoredAt, StoredPart, check_sizes, parse_metadata
from lockstep.checkpoint.ranks import Ranks, narrow
from lockstep.checkpoint.snapshot import TensorBlock
from lockstep.checkpoint.storage import Location, read_all, read_into_buffer
from lockstep.checkpoint.streams import SizedStream
from lockstep.errors import LockstepError, UsageError
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.heartbeat.writer import went_forward
from lockstep.models.safetensors_files import tensor_bytes
from lockstep.torch_compat.checkpoint_format import read_items

# Bytes of a block that is read whole before it is unpacked, which takes twenty reads; torch asks
# for those of a larger one itself, so that it is never in memory twice.
_READ_AT_ONCE = 1 << 20
_READ_AT_ONCE_FROM_AFAR = 64 << 20
_LONGEST_HEAD = 64 << 10  # bytes before the elements of an archive; torch writes one or two KiB


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
        # (dtype, shape, length of an archive) → what came before the elements of the last one
        self._heads: dict[tuple[torch.dtype, torch.Size, int], bytes] = {}

    def read_into(self, blocks: dict[str, TensorBlock]) -> None:
        """Fill the blocks from the files of the ranks that wrote parts of them."""
        items = self._items(blocks)
        places: dict[str, list[StoredAt]] = defaultdict(list)
        for place in items:
            places[place.relative_path].append(place)
        for path, of_file in places.items():
            with self.checkpoint.open(f"{self.part}/{path}") as stream:
                for run in _runs(of_file, self._read_at_once):
                    if run[-1].end - run[0].offset > self._read_at_once:
                        self._read_large(stream, run[0], items[run[0]], blocks)
                    else:
                        self._read_run(stream, run, items, blocks)

    def needed(self, blocks: Mapping[str, TensorBlock]) -> dict[str, list[tuple[int, int]]]:
        """Return, by file, where the bytes begin and end that `read_into` reads.

        A block that is not in the checkpoint needs none.
        """
        here = {name: block for name, block in blocks.items() if name in self.stored.tensors}
        needed: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place in self._items(here):
            needed[f"{self.part}/{place.relative_path}"].append((place.offset, place.end))
        return dict(needed)

    def _items(self, blocks: Mapping[str, TensorBlock]) -> dict[StoredAt, list[ReadItem]]:
        """Return, by stored block, the parts of it that fill the blocks."""
        items: dict[StoredAt, list[ReadItem]] = defaultdict(list)
        for name, block in blocks.items():
            if block.tensor.numel():
                chunk = ChunkStorageMetadata(torch.Size(block.offset), block.tensor.size())
                for item in read_items(name, self.stored.tensors[name], chunk):
                    items[self.stored.places[item.storage_index]].append(item)
        return items

    @property
    def _read_at_once(self) -> int:
        return _READ_AT_ONCE_FROM_AFAR if self.checkpoint.is_remote else _READ_AT_ONCE

    def _read_run(
        self,
        stream: BinaryIO,
        run: Sequence[StoredAt],
        items: Mapping[StoredAt, Sequence[ReadItem]],
        blocks: Mapping[str, TensorBlock],
    ) -> None:
        """Read stored blocks that lie one after the other at once, and copy them."""
        first = run[0].offset
        archives = memoryview(bytearray(run[-1].end - first))
        stream.seek(first)
        if (held := read_all(stream, archives)) < len(archives):
            why = f"it ends after {first + held} bytes, and {run[-1].end} are needed"
            raise unreadable_error(self._file_of(run[0]), why)
        for place in run:
            archive = archives[place.offset - first : place.end - first]
            form = form_for(*self._kept_form(items[place][0]))
            stored = None if form is None else form.tensor(archive)
            if stored is None:
                stored = self._unpack(cast(BinaryIO, io.BytesIO(archive)), place)
            self._copy(stored, items[place], blocks)

    def _read_large(
        self,
        stream: BinaryIO,
        place: StoredAt,
        items: Sequence[ReadItem],
        blocks: Mapping[str, TensorBlock],
    ) -> None:
        """Read a large stored block, straight into the tensor that wants all of it if there is one.

        Else it would be in memory twice, and new memory takes longer than to read.
        """
        archive = cast(BinaryIO, _FileSlice(stream, place.offset, place.length))
        target = self._sole_target(items, blocks)
        begin = None if target is None else self._begin_of_elements(archive, place, target)
        if target is None or begin is None:
            archive.seek(0)
            self._copy(self._unpack(archive, place), items, blocks)
            return
        archive.seek(begin)
        elements = tensor_bytes(target)
        if read_all(archive, elements) < len(elements):
            raise unreadable_error(self._file_of(place), "it ends within a block")

    def _sole_target(
        self, items: Sequence[ReadItem], blocks: Mapping[str, TensorBlock]
    ) -> Tensor | None:
        """Return the memory that a whole stored block belongs in, if that is all that wants it."""
        if len(items) != 1:
            return None
        (item,) = items
        dtype, shape = self._kept_form(item)
        target = narrow(blocks[item.dest_index.fqn].tensor, item.dest_offsets, item.lengths)
        is_sole = (
            type(target) is Tensor
            and target.is_cpu
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
            and (target.dtype, target.shape) == (dtype, shape)
        )
        return target if is_sole else None

    def _begin_of_elements(self, archive: BinaryIO, place: StoredAt, target: Tensor) -> int | None:
        """Return where in an archive the elements of the target lie, row by row; None if not so.

        Archives of one dtype and shape begin alike (`archives.py`), so torch looks at one of them.
        """
        form = (target.dtype, target.shape, place.length)
        head = self._heads.get(form)
        if head is not None and archive.read(len(head)) == head:
            return len(head)
        begin = self._look_for_elements(archive, place, target)
        if begin is not None and begin <= _LONGEST_HEAD:
            archive.seek(0)
            self._heads[form] = archive.read(begin)
        return begin

    def _look_for_elements(self, archive: BinaryIO, place: StoredAt, target: Tensor) -> int | None:
        """Have torch say whether an archive has the elements of the target, and find them."""
        with _explained(self._file_of(place)):
            begin = self._checked(archive, place)
            if begin is None:
                return None
            archive.seek(0)
            with skip_data():
                form: Tensor = torch.load(archive, map_location="cpu", weights_only=True)
        is_same = (
            type(form) is Tensor
            and form.is_contiguous()
            and not (form.is_conj() or form.is_neg())
            and (form.dtype, form.shape) == (target.dtype, target.shape)
            and form.untyped_storage().nbytes() == target.nbytes
        )
        return begin if is_same else None

    def _unpack(self, archive: BinaryIO, place: StoredAt) -> Tensor:
        """Return the tensor of an archive, or raise a DamagedError."""
        self._checked(archive, place)
        archive.seek(0)
        with _explained(self._file_of(place)):
            stored: Tensor = torch.load(archive, map_location="cpu", weights_only=True)
            return stored

    def _checked(self, archive: BinaryIO, place: StoredAt) -> int | None:
        """Check a block as `check_block`, and return what it returns; raise a DamagedError."""
        with _explained(self._file_of(place)):
            try:
                return check_block(archive, place.length)
            except ValueError as error:
                raise unreadable_error(self._file_of(place), error) from None

    def _kept_form(self, item: ReadItem) -> tuple[torch.dtype, torch.Size]:
        """Return dtype and shape of the stored block that an item is read from."""
        stored = self.stored.tensors[item.storage_index.fqn]
        offset = item.storage_index.offset
        chunk = stored.chunks[item.storage_index.index or 0]
        if chunk.offsets != offset:
            chunk = next(chunk for chunk in stored.chunks if chunk.offsets == offset)
        return stored.properties.dtype, chunk.sizes

    def _file_of(self, place: StoredAt) -> str:
        return f"{self.checkpoint}/{self.part}/{place.relative_path}"

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


def _runs(places: Sequence[StoredAt], limit: int) -> Generator[list[StoredAt], None, None]:
    """Group blocks of a file that lie one after the other, as many as have `limit` bytes or one."""
    run: list[StoredAt] = []
    for place in sorted(places, key=lambda place: place.offset):
        if run and (place.offset != run[-1].end or place.end - run[0].offset > limit):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


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


def check_block(block: BinaryIO, length: int) -> int | None:
    """Raise a ValueError if a stored block of `length` bytes would unpack to more than these.

    The block is a zip archive as torch writes it. A hostile one may be compressed, so that a
    megabyte unpacks to a gigabyte. Only its directory is read.

    Returns:
        where the only elements in it begin; None if they are several, or in another byte order.
    """
    try:
        with zipfile.ZipFile(block) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("a block is compressed, as torch never writes it")
            if sum(entry.file_size for entry in entries) > length:
                raise ValueError("a block claims to hold more bytes than it has")
            return _sole_data(block, archive, entries)
    except zipfile.BadZipFile:
        return None  # torch's reader raises for other data, and reads only plain tensors


def _sole_data(
    block: BinaryIO, archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo]
) -> int | None:
    """Return where the only elements of an archive begin."""
    data = [entry for entry in entries if "/data/" in entry.filename]
    orders = [entry for entry in entries if entry.filename.endswith("/byteorder")]
    if len(data) != 1 or any(archive.read(entry).decode() != sys.byteorder for entry in orders):
        return None
    return begin_of_data(block, data[0])


class _FileSlice(SizedStream):
    """A part of a file, as a file: `length` bytes from `offset` on."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        super().__init__(length)
        self._stream = stream
        self._offset = offset

    def fill(self, view: memoryview, position: int) -> int:
        self._stream.seek(self._offset + position)
        return read_into_buffer(self._stream, view)


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
        except (
            DamagedBytesError,
            FileNotFoundError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise unreadable_error(f"{checkpoint}/{part}", error) from None
        except OSError as error:
            raise unreachable_error(f"{checkpoint}/{part}", error) from None

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

    def needed(self, blocks: Mapping[str, TensorBlock]) -> dict[str, list[tuple[int, int]]]:
        """Return, by file, where the bytes begin and end that `read_into` reads.

        A block that is not in the checkpoint needs none.
        """
        needed: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, block in blocks.items():
            for raw in self._raw_blocks.get(name, ()) if block.tensor.numel() else ():
                if raw.shape == block.shape and _overlap(raw, block) is not None:
                    needed[raw.file].append((raw.start, raw.start + raw.num_bytes))
        return dict(needed)

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
                f" (checkpoint.format: local); this run has {ranks.size}"
            )
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
                    f" laid {name} over its ranks otherwise than this one"
                )
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
    overlap = _overlap(raw, block)
    if overlap is None:
        return
    low, lengths = overlap
    with checkpoint.open(raw.file) as stream:
        stream.seek(raw.start)
        data = bytearray(stream.read(raw.num_bytes))
    source = torch.frombuffer(data, dtype=raw.dtype).reshape(raw.block)
    here, there = (
        [a - b for a, b in zip(low, offset, strict=True)] for offset in (block.offset, raw.offset)
    )
    narrow(block.tensor, here, lengths).copy_(narrow(source, there, lengths))


def _overlap(raw: RawBlock, block: TensorBlock) -> tuple[list[int], list[int]] | None:
    """Return where a saved and a wanted block overlap, and how far; None if they do not."""
    low = [max(a, b) for a, b in zip(raw.offset, block.offset, strict=True)]
    ends = zip(low, raw.offset, raw.block, block.offset, block.tensor.shape, strict=True)
    lengths = [min(a + n, b + m) - start for start, a, n, b, m in ends]
    return None if any(length <= 0 for length in lengths) else (low, lengths)
