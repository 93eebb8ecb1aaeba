"""Read whole tensors in one process, one at a time, of a checkpoint whose bytes are verified.

On a disk all checksums are compared first, and the tensors are then read. Of a checkpoint far away
each byte is sent once: pieces of a MiB are brought some way ahead of the reader, compared with
their checksums, and let go when the last tensor that needs them was read. What no tensor needs is
compared first, so that nothing is written of a checkpoint that is damaged there.

Tests: tests/checkpoint/test_read_once.py
"""

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lockstep.checkpoint.fetch import (
    DescribingFiles,
    FetchedLocation,
    HeldBytes,
    Ranges,
    describe,
    is_marked,
)
from lockstep.checkpoint.manifest import (
    DamagedError,
    Manifest,
    parse_manifest,
    verified_manifest,
)
from lockstep.checkpoint.storage import MANIFEST, MARK_BYTES, Location
from lockstep.division import ceil_div

_AHEAD = 32 << 20  # bytes that are brought at once

_Piece = tuple[str, int]  # a file, and the number of a MiB in it


class VerifiedSource:
    """A checkpoint that is near, whose checksums were compared."""

    def __init__(self, checkpoint: Location, manifest: Manifest) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifest

    def verify_further(self, part: str) -> None:
        """Verify one part more."""
        verified_manifest(self.checkpoint, part)

    def expect(self, part: str, needs: Mapping[str, Ranges]) -> None:
        """Take note of the tensors of a part that will be read, in order, and of their bytes."""

    def holding(self, part: str, name: str) -> AbstractContextManager[None]:
        """Return a block in which one tensor of a part is read."""
        return nullcontext()


class _FarSource(VerifiedSource):
    """A checkpoint that is far away, of which each byte is verified before it is used."""

    def __init__(
        self, checkpoint: Location, manifest: Manifest, described: DescribingFiles
    ) -> None:
        self._passing = _PassingBytes(checkpoint, manifest, described)
        near = FetchedLocation(checkpoint.storage, checkpoint.name, self._passing)
        super().__init__(near, manifest)
        self._needs: dict[str, list[Ranges]] = {}  # of the tensors of each part, in order
        self._order: dict[str, dict[str, int]] = {}

    def verify_further(self, part: str) -> None:
        pass  # it is verified as it is read

    def expect(self, part: str, needs: Mapping[str, Ranges]) -> None:
        self._needs[part] = list(needs.values())
        self._order[part] = {name: number for number, name in enumerate(needs)}
        self._passing.expect(self.manifest.files_of(part), needs.values())

    def holding(self, part: str, name: str) -> AbstractContextManager[None]:
        needs = self._needs[part]
        return self._passing.holding(needs, self._order[part][name])

    def finish(self, parts: Iterable[str]) -> None:
        """Compare what nobody has read after all."""
        together = {*parts, *self._needs}
        self._passing.finish(file for part in together for file in self.manifest.files_of(part))


@contextmanager
def verified(
    checkpoint: Location, part: str | None = None
) -> Generator[VerifiedSource, None, None]:
    """Open one part of a checkpoint (None: all of it), whose bytes are verified before use.

    Raises a DamagedError if a byte is not what was written, and what `read_manifest` raises; of a
    checkpoint far away in the block, at its end at the latest.
    """
    if checkpoint.is_remote:
        described = describe(checkpoint, part)
        manifest = parse_manifest(checkpoint, described.files[MANIFEST])
        if is_marked(manifest):
            source = _FarSource(checkpoint, manifest, described)
            yield source
            source.finish(manifest.parts if part is None else [part])
            return
    yield VerifiedSource(checkpoint, verified_manifest(checkpoint, part))


class _PassingBytes(HeldBytes):
    """The bytes of files that are held until all tensors that need them were read."""

    def __init__(
        self, checkpoint: Location, manifest: Manifest, described: DescribingFiles
    ) -> None:
        pinned = Location(checkpoint.storage, described.pinned)
        super().__init__(pinned, manifest, described.files)
        self._checkpoint = checkpoint
        self._held: dict[_Piece, memoryview] = {}
        self._uses: Counter[_Piece] = Counter()  # that are to come
        self._verified: set[_Piece] = set()

    def expect(self, files: Iterable[str], needs: Iterable[Ranges]) -> None:
        """Count the uses of each piece; compare those of the files that have none."""
        for ranges in needs:
            self._uses.update(_pieces_of(ranges))
        self._compare_rest(files)

    @contextmanager
    def holding(self, needs: Sequence[Ranges], first: int) -> Generator[None, None, None]:
        """Hold one of the ranges during the block; bring some of those that follow, too."""
        pieces = _pieces_of(needs[first])
        if not self._held.keys() >= pieces:
            self._bring(needs[number] for number in range(first, len(needs)))
        yield
        for piece in pieces:
            self._uses[piece] -= 1
            if self._uses[piece] <= 0:
                self._held.pop(piece, None)

    def at(self, file: str, position: int) -> memoryview:
        piece = (file, position // MARK_BYTES)
        if piece not in self._held:
            self._bring([{file: [(position, position + 1)]}])
        return self._held[piece][position % MARK_BYTES :]

    def finish(self, files: Iterable[str]) -> None:
        """Compare what nobody has read after all."""
        self._uses.clear()
        self._compare_rest(files)

    def _bring(self, needs: Iterable[Ranges]) -> None:
        """Bring the pieces of the first ranges that are not held, and of others while they fit."""
        wanted: dict[_Piece, None] = {}
        for ranges in needs:
            if wanted and len(wanted) * MARK_BYTES >= _AHEAD:
                break
            pieces = _pieces_of(ranges) - self._held.keys()
            wanted |= dict.fromkeys(p for p in pieces if not wanted or self._uses[p] > 0)
        parts: dict[_Piece, list[memoryview]] = defaultdict(list)
        problems: list[str] = []
        for read, data in self.read(self._ranges_of(wanted), problems):
            position = read.begin
            while position < read.end:
                piece = (read.file, position // MARK_BYTES)
                until = min((piece[1] + 1) * MARK_BYTES, read.end)
                parts[piece].append(data[position - read.begin : until - read.begin])
                position = until
        self._refuse(problems)
        for piece, views in parts.items():
            self._held[piece] = views[0] if len(views) == 1 else memoryview(b"".join(views))
            self._verified.add(piece)

    def _compare_rest(self, files: Iterable[str]) -> None:
        """Compare the pieces of files that were not compared, and that nobody will need."""
        rest: Ranges = {}
        for file in files:
            if file in self.files:
                continue
            size = self.manifest.files[file].size
            pieces = [(file, number) for number in range(ceil_div(size, MARK_BYTES))]
            left = [p for p in pieces if p not in self._verified and self._uses[p] <= 0]
            if left or not size:
                rest |= self._ranges_of(left) or {file: []}
                self._verified.update(left)
        self._refuse(self.check(rest))

    def _ranges_of(self, pieces: Iterable[_Piece]) -> Ranges:
        ranges: Ranges = defaultdict(list)
        for file, number in pieces:
            begin = number * MARK_BYTES
            size = self.manifest.files[file].size
            ranges[file].append((begin, min(begin + MARK_BYTES, size)))
        return ranges

    def _refuse(self, problems: Sequence[str]) -> None:
        if problems:
            what = f"the checkpoint {self._checkpoint} is damaged"
            raise DamagedError(what, why="; ".join(problems[:4]))


def _pieces_of(ranges: Ranges) -> set[_Piece]:
    return {
        (file, number)
        for file, spans in ranges.items()
        for begin, end in spans
        for number in range(begin // MARK_BYTES, ceil_div(end, MARK_BYTES))
    }
