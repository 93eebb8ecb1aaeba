"""Load from a storage that is far away: what a rank needs is sent once, and its checksums compared.

Before a tensor changes, every checksum is compared. On a disk the files are read twice for this,
once for their checksums and once for their values, which the page cache has by then. Over a network
each rank brings the ranges of the files that it needs into its memory, in one pass with their
checksums: the manifest has those of each MiB (`FileInfo.marks`). So a load holds this rank's share
of the checkpoint once more, until it ends. What no rank needs is read for its checksums alone.

Rank 0 reads the files that describe the checkpoint, and sends them to the others.

Tests: tests/checkpoint/test_fetch.py, tests/checkpoint/test_damage.py
"""

import io
import threading
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from lockstep.checkpoint.manifest import (
    CONFIG,
    JSON_LIMIT,
    METADATA,
    METADATA_LIMIT,
    MODEL,
    STATE,
    Manifest,
    damage_by,
    damaged_error,
    parse_manifest,
    read_manifest_bytes,
    unreachable_error,
    unreadable_error,
)
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.storage import (
    MANIFEST,
    MARK_BYTES,
    Checkpoint,
    FileInfo,
    FilePiece,
    Location,
)
from lockstep.checkpoint.streams import SizedStream
from lockstep.division import ceil_div
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.heartbeat.writer import went_forward
from lockstep.machine.progress import Advance

_TOGETHER = 4  # descriptions that are read at a time
_DEALT = 64 << 20  # bytes of a file that are given to one rank for their checksums

Ranges = dict[str, list[tuple[int, int]]]  # by file: begins and ends of bytes


class HeldBytes:
    """The bytes of a checkpoint's files that this rank holds, each compared with its checksum."""

    def __init__(self, source: Location, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        self._source = source
        self.manifest = manifest
        self.files = files  # whole ones
        self._begins: dict[str, list[int]] = defaultdict(list)  # of the pieces, in order
        self._pieces: dict[str, list[memoryview]] = defaultdict(list)
        self._lock = threading.RLock()  # of the pieces
        self._ends_early = False

    def fetch(self, ranges: Ranges) -> list[str]:
        """Bring ranges of files here; return a line for each damage.

        Raise an UnreachableError if the storage does not give them.
        """
        problems: list[str] = []
        by_file: dict[str, list[tuple[int, memoryview]]] = defaultdict(list)
        with self._lock:
            for piece, data in self.read(ranges, problems):
                by_file[piece.file].append((piece.begin, data))
            for file, pieces in by_file.items():
                together = [*zip(self._begins[file], self._pieces[file], strict=True), *pieces]
                together.sort(key=lambda begin_and_piece: begin_and_piece[0])
                self._begins[file] = [begin for begin, _ in together]
                self._pieces[file] = [data for _, data in together]
        return problems

    @contextmanager
    def fetching(self) -> Generator["Fetch", None, None]:
        """Yield what fetches in a thread during the block, which cuts it short if it fails."""
        try:
            with ThreadPoolExecutor(1, "fetch") as thread:
                try:
                    yield Fetch(self, thread)
                finally:
                    self._ends_early = True
        finally:
            self._ends_early = False

    def check(self, ranges: Ranges) -> list[str]:
        """Compare the checksums of ranges of files; return a line for each damage."""
        problems: list[str] = []
        for _ in self.read(ranges, problems):
            pass
        return problems

    def at(self, file: str, position: int) -> memoryview:
        """Return the bytes from a position to the end of a piece; it is fetched if need be."""
        for attempt in ("held", "fetched"):
            with self._lock:
                number = bisect_right(self._begins[file], position) - 1
                if number >= 0:
                    inside = position - self._begins[file][number]
                    piece = self._pieces[file][number]
                    if inside < len(piece):
                        return piece[inside:]
            problems = self.fetch({file: [(position, position + 1)]}) if attempt == "held" else []
            if problems:
                raise unreadable_error(str(self._source), problems[0])
        raise AssertionError("a fetched range is held")

    def size(self, file: str) -> int:
        return self.manifest.files[file].size

    def read(
        self, ranges: Ranges, problems: list[str]
    ) -> Generator[tuple[FilePiece, memoryview], None, None]:
        """Yield the bytes of ranges, from mark to mark, whose checksums are right."""
        for file, of_file in ranges.items():
            info = self.manifest.files[file]
            wanted = [
                FilePiece(file, info.size, begin, end)
                for begin, end in _to_marks(of_file, info.size)
            ]
            pieces = self._source.storage.read_pieces(self._source.name, wanted)
            try:
                if not info.size:
                    _require_empty(self._source.size(file))
                for piece in _verified(pieces, info):
                    yield piece
                    if self._ends_early:
                        return
            except _OtherBytesError:
                problems.append(f"{file}: its checksum is not that of what was written")
            except OSError as error:
                problems.append(damage_by(error, self._source, file))
            finally:
                pieces.close()


class Fetch:
    """Brings ranges of files here, while the ranks compare what they are to load."""

    def __init__(self, held: HeldBytes, thread: ThreadPoolExecutor) -> None:
        self._held = held
        self._thread = thread
        self._under_way: Future[list[str]] | None = None

    def begin(self, ranges: Ranges) -> None:
        self._under_way = self._thread.submit(self._held.fetch, ranges)

    def problems(self) -> list[str]:
        """Wait for the bytes; return a line for each problem with them."""
        assert self._under_way is not None, "it was begun"
        return self._under_way.result()


class _OtherBytesError(Exception):
    """Raised for bytes that are not those that were written."""


def _require_empty(size: int) -> None:
    if size:
        raise DamagedBytesError(f"{size} bytes, where 0 were written")


def _verified(
    pieces: Iterable[tuple[FilePiece, memoryview]], info: FileInfo
) -> Generator[tuple[FilePiece, memoryview], None, None]:
    """Yield pieces of one file once the checksum until the next mark is right."""
    read: list[tuple[FilePiece, memoryview]] = []  # since the last mark
    crc = 0
    for piece, data in pieces:
        if not read:
            crc = info.crc_until(piece.begin)
        crc = zlib.crc32(data, crc)
        read.append((piece, data))
        went_forward()
        if piece.end % MARK_BYTES == 0 or piece.end == info.size:
            if crc != info.crc_until(piece.end) or len(data) != piece.end - piece.begin:
                raise _OtherBytesError
            yield from read
            read = []


@dataclass(frozen=True)
class FetchedLocation(Location):
    """The address of a checkpoint far away, of which bytes are held here."""

    held: HeldBytes = field(compare=False, repr=False)

    @property
    def is_remote(self) -> bool:
        return False

    def pinned(self) -> Location:
        return self

    @contextmanager
    def open(self, file: str) -> Generator[BinaryIO, None, None]:
        if file in self.held.files:
            yield io.BytesIO(self.held.files[file])
            return
        with io.BufferedReader(_HeldStream(self.held, file)) as stream:
            yield cast(BinaryIO, stream)

    def read(self, file: str, limit: int) -> bytes:
        with self.open(file) as stream:
            return stream.read(limit)

    def checksum(self, file: str, advance: Advance = lambda _bytes: None) -> FileInfo:
        """Return that of a file that was compared as it was read, or read it."""
        if file in self.held.files and file in self.held.manifest.files:
            return self.held.manifest.files[file]
        return super().checksum(file, advance)


class _HeldStream(SizedStream):
    """A file of a checkpoint far away, read from the bytes that are held here."""

    def __init__(self, held: HeldBytes, file: str) -> None:
        super().__init__(held.size(file))
        self._held = held
        self._file = file

    def fill(self, view: memoryview, position: int) -> int:
        data = self._held.at(self._file, position)[: len(view)]
        view[: len(data)] = data
        return len(data)


@dataclass(frozen=True)
class DescribingFiles:
    """Holds what describes a checkpoint far away: the manifest, and the files without tensors."""

    pinned: str  # the name of the checkpoint's files, which means these alone
    files: Mapping[str, bytes]


def describe(checkpoint: Location, part: str | None = None) -> DescribingFiles:
    """Read what describes a checkpoint, and compare the checksums; one rank does it for all.

    With `part`, what describes that part alone. What nearly every checkpoint has is asked for
    together with the manifest that lists it: over a network each answer takes its time.

    Raise a DamagedError if a description is not what was written, and what `read_manifest` raises.
    """
    try:
        source = checkpoint.pinned()
    except (FileNotFoundError, DamagedBytesError):
        source = checkpoint  # whoever reads the manifest says why
    except OSError as error:
        raise unreachable_error(str(checkpoint), error) from None
    asked: dict[str, Future[bytes | str]] = {}
    with ThreadPoolExecutor(_TOGETHER, "descriptions") as pool:

        def ask(files: Mapping[str, int]) -> None:
            for file, limit in files.items():
                if file not in asked:
                    asked[file] = pool.submit(_content, source, file, limit)

        described = {} if part else {STATE: JSON_LIMIT, CONFIG: JSON_LIMIT}
        ask({f"{part or MODEL}/{METADATA}": METADATA_LIMIT} | described)
        data = read_manifest_bytes(checkpoint, source)
        manifest = parse_manifest(checkpoint, data)
        if manifest.ranks is None:
            parts = [part] if part else manifest.parts
            described |= {f"{each}/{METADATA}": METADATA_LIMIT for each in parts}
        ask(described)
        contents = {file: asked[file].result() for file in described}
    files = {MANIFEST: data}
    problems: list[str] = []
    for file, content in contents.items():
        if isinstance(content, str):
            problems.append(content)
        elif len(content) != (size := manifest.files[file].size):
            problems.append(f"{file}: {len(content)} bytes, where {size} were written")
        elif zlib.crc32(content) != manifest.files[file].crc32:
            problems.append(f"{file}: its checksum is not that of what was written")
        else:
            files[file] = content
    if problems:
        raise damaged_error(checkpoint, problems)
    return DescribingFiles(source.name, files)


def _content(source: Location, file: str, limit: int) -> bytes | str:
    """Return a file, or how it is damaged; raise an UnreachableError if it could not be read."""
    try:
        return source.read(file, limit)
    except ValueError as error:
        return f"{file}: {error}"
    except OSError as error:
        return damage_by(error, source, file)


def is_marked(manifest: Manifest) -> bool:
    """Return whether parts of all files can be verified, which older versions did not prepare."""
    return all(info.is_marked for info in manifest.files.values())


def with_description(checkpoint: Location, description: DescribingFiles) -> FetchedLocation | None:
    """Return a checkpoint far away whose bytes are verified as they arrive; no rank waits.

    None if it has no marks.
    """
    manifest = parse_manifest(checkpoint, description.files[MANIFEST])
    if not is_marked(manifest):
        return None
    source = Location(checkpoint.storage, description.pinned)
    held = HeldBytes(source, manifest, description.files)
    return FetchedLocation(checkpoint.storage, checkpoint.name, held)


def fetched(path: Checkpoint) -> Location:
    """Return a checkpoint, if it is far away with the files that describe it.

    Rank 0 reads them, and every rank calls it. A checkpoint that is near, or that an older version
    of Lockstep wrote without marks, is returned as it is.

    Raise a DamagedError if a description is not what was written, and what `read_manifest` raises.
    """
    checkpoint = locate(path)
    if not checkpoint.is_remote:
        return checkpoint
    failure = f"the checkpoint {checkpoint} could not be loaded"
    description = Ranks().broadcast(failure, lambda: describe(checkpoint))
    return with_description(checkpoint, description) or checkpoint


def deal_rest(
    manifest: Manifest, described: Iterable[str], needed: Sequence[Ranges]
) -> list[Ranges]:
    """Share out among the ranks the bytes that none of them needs, for their checksums.

    Args:
        manifest: of the checkpoint.
        described: the files that rank 0 has read.
        needed: by rank, what it needs.
    """
    shares: list[Ranges] = [{} for _ in needed]
    dealt = 0
    for file, info in manifest.files.items():
        if file in set(described):
            continue
        everywhere = [span for ranges in needed for span in ranges.get(file, ())]
        if not info.size:  # that it is there, and has nothing in it
            shares[dealt % len(shares)][file] = []
            dealt += 1
        position = 0
        for begin, end in [*_to_marks(everywhere, info.size), (info.size, info.size)]:
            while position < begin:
                until = min(position + _DEALT, begin)
                shares[dealt % len(shares)].setdefault(file, []).append((position, until))
                position = until
                dealt += 1
            position = max(position, end)
    return shares


def _to_marks(ranges: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return ranges of a file widened to marks, in order; those that touch become one."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        first = begin // MARK_BYTES * MARK_BYTES
        last = min(ceil_div(end, MARK_BYTES) * MARK_BYTES, size)
        if spans and first <= spans[-1][1]:
            first, earlier = spans.pop()
            last = max(last, earlier)
        spans.append((first, last))
    return [(first, last) for first, last in spans if first < last]
