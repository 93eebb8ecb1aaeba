"""Keep checkpoints in a bucket: S3, Google Cloud Storage or Azure.

A bucket has neither folders nor a rename. What it has is a put on the condition that there is no
object of this name yet, and that one makes a checkpoint visible:

    PREFIX/data/step-00000100.tmp-HOST-PID-RANDOM/     the files of a draft, under its own name
        state.json                     a file of up to 8 MiB: one object
        model/__0_0.distcp.part-00000  a longer one: objects of 8 MiB …
        model/__0_0.distcp.parts       … and, after them, their number and the length of the file
        manifest.json
    PREFIX/commits/step-00000100       put last, on that condition: the name of the draft

Without an object in `commits/` there is no checkpoint. A second writer of the same step has a draft
of its own, and is told by the refused put. Moving a checkpoint is a second commit of the same data,
and then the deletion of the first; deleting one begins with the commit. Every object is put under
the condition and under a name that is used once, so that nothing is ever overwritten.

Why parts of our own, and not the service's multipart uploads: those take no condition, and one that
a dead writer left costs money and is in no listing. Parts here are objects like any other, and
`sweep` finds them. A writer holds at most `_IN_FLIGHT` + 1 parts, whatever the size of the file.

Tests: tests/checkpoint/test_object_store.py, tests/checkpoint/test_protocols.py
"""

import io
import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from lockstep.checkpoint.local_cache import LocalCache
from lockstep.checkpoint.manifest import Manifest, read_manifest
from lockstep.checkpoint.posix import ABANDONED_SECONDS, draft_name, is_draft, writer_has_ended
from lockstep.checkpoint.storage import (
    MANIFEST,
    ByteSink,
    FilePiece,
    Location,
    Storage,
    step_of,
)
from lockstep.checkpoint.streams import SizedStream
from lockstep.division import ceil_div, round_up
from lockstep.errors import LockstepError
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.files.object_client import RETRY_SECONDS, ObjectClient
from lockstep.heartbeat.writer import went_forward

PART_BYTES = 8 << 20
_IN_FLIGHT = 3  # parts that are sent, or read ahead, at a time
_BEGUN = ".begun"  # the first object of a draft, by which other ranks see it
_INDEX_LIMIT = 1 << 10  # bytes of an index, and of a commit


class ObjectStorage(Storage):
    """Keeps checkpoints in a bucket; `checkpoint.storage: s3://bucket/prefix` is short for one.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
        retry_seconds: the limit for a request and all its retries.
        options: obstore's options of the service, such as `endpoint` and `region`; no credentials.
    """

    is_remote = True

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS, **options: Any) -> None:
        self._use(ObjectClient(url, retry_seconds=retry_seconds, **options))

    def _use(self, client: ObjectClient) -> None:
        """Keep the checkpoints in the objects of a client."""
        self._client = client
        self._begun: set[str] = set()  # the drafts of this object, which `sweep` spares
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, "object-store")
        self._cache: LocalCache | None = None
        self._manifests: dict[str, Manifest] = {}  # by draft, for the cache
        self._before_commit: Callable[[], object] = lambda: None

    def __str__(self) -> str:
        return self._client.url

    @property
    def client(self) -> ObjectClient:
        """The objects of the prefix."""
        return self._client

    def cache_in(self, folder: Path) -> None:
        """Keep the newest checkpoints that are written here in a folder of this machine, too."""
        self._cache = LocalCache(folder, str(self))

    def call_before_commit(self, call: Callable[[], object]) -> None:
        """Have a call made before each commit, which fails with it: it copies the run's records."""
        self._before_commit = call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStorage) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def check(self) -> None:
        self._client.check()

    def names(self) -> list[str]:
        """Return the names in `commits/`; one that a late listing still has is left out."""
        listed = list(self._client.inside("commits"))
        are_there = self._pool.map(self.exists, listed)
        return [name for name, is_there in zip(listed, are_there, strict=True) if is_there]

    def exists(self, name: str) -> bool:
        return self._client.exists(f"commits/{name}")

    def sees(self, draft: str) -> bool:
        return self._client.exists(f"data/{draft}/{_BEGUN}")

    def committed_at(self, name: str) -> float:
        return self._client.modified(f"commits/{name}")

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        """Open a file for reading; only the ranges that are read are sent, and a little ahead."""
        draft = self.pinned(name)
        if (cached := self._cached(draft, file)) is not None:
            with cached:
                yield cached
            return
        key = f"data/{draft}/{file}"
        try:
            parts = [key]
            size = self._client.size(key)
        except FileNotFoundError:
            index = self._read_json(f"{key}.parts")
            size = int(index["size"])
            if size <= 0 or index["part_bytes"] != PART_BYTES:
                what = f"{self}/{key}.parts is not the index of a file"
                raise DamagedBytesError(what) from None
            parts = [_part(key, number) for number in range(ceil_div(size, PART_BYTES))]
        with io.BufferedReader(_Reader(self._client, self._pool, parts, size), 1 << 20) as stream:
            yield cast(BinaryIO, stream)

    def read(self, name: str, file: str, limit: int) -> bytes:
        """Return the content of a file, in one request if it is one object."""
        draft = self.pinned(name)
        if self._cache is None or file == MANIFEST:
            with suppress(FileNotFoundError):  # it is of several parts
                data = self._client.get_within(f"data/{draft}/{file}", limit)
                if data is not None:
                    return data
        return super().read(draft, file, limit)

    def pinned(self, name: str) -> str:
        """Return the name of the draft, under which nothing is ever overwritten."""
        return name if is_draft(name) else self._draft_of(name)

    def read_pieces(
        self, name: str, pieces: Sequence[FilePiece]
    ) -> Generator[tuple[FilePiece, memoryview], None, None]:
        """Yield the bytes of pieces in order, while the next ones are on their way.

        A file's size tells its objects, which are not asked for theirs first.
        """
        draft = self.pinned(name)
        under_way: deque[tuple[FilePiece, Future[memoryview]]] = deque()
        try:
            for piece in pieces:
                if (cached := self._cached(draft, piece.file)) is not None:
                    cached.close()
                    yield from super().read_pieces(draft, [piece])
                    continue
                for within in _within_objects(piece):
                    if len(under_way) > _IN_FLIGHT:
                        earlier, data = under_way.popleft()
                        yield earlier, data.result()
                    under_way.append((within, self._pool.submit(self._get, draft, within)))
            while under_way:
                earlier, data = under_way.popleft()
                yield earlier, data.result()
        finally:
            for _, data in under_way:
                data.cancel()

    def _get(self, draft: str, piece: FilePiece) -> memoryview:
        """Return bytes of one object."""
        key = f"data/{draft}/{piece.file}"
        if piece.size <= PART_BYTES:
            return self._client.get_piece(key, piece.begin, piece.end - piece.begin, piece.size)
        number, begin = divmod(piece.begin, PART_BYTES)
        part_size = min(PART_BYTES, piece.size - number * PART_BYTES)
        return self._client.get_piece(_part(key, number), begin, piece.end - piece.begin, part_size)

    def begin(self, name: str) -> str:
        draft = draft_name(name)
        self._begun.add(draft)
        self._client.put_new(f"data/{draft}/{_BEGUN}", draft.encode())
        return draft

    @contextmanager
    def write(self, draft: str, file: str) -> Iterator[ByteSink]:
        """Write a file of a draft; it is there when the block ends well."""
        upload = _Upload(self._client, self._pool, f"data/{draft}/{file}")
        try:
            if self._cache is None:
                yield upload
                upload.finish()
            else:
                with self._cache.writing(draft, file, upload) as both:
                    yield both
                    upload.finish()
        finally:
            upload.wait()

    def commit(self, draft: str, name: str, manifest: bytes) -> None:
        with self.write(draft, MANIFEST) as stream:
            stream.write(manifest)
        self._before_commit()
        self._client.put_new(f"commits/{name}", _as_json({"draft": draft}))
        self._begun.discard(draft)

    def move(self, name: str, new_name: str) -> None:
        """Commit the same data by another name, and take the first commit back."""
        self._client.put_new(f"commits/{new_name}", _as_json({"draft": self._draft_of(name)}))
        self._client.delete([f"commits/{name}"])

    def delete(self, name: str) -> None:
        draft = name
        if not is_draft(name):
            draft = self._draft_of(name)
            self._client.delete([f"commits/{name}"])  # from here on it is not a checkpoint
        self._begun.discard(draft)
        if draft not in self._committed():  # an interrupted move leaves two commits of the same
            self._remove(draft)

    def sweep(self) -> list[str]:
        """Delete the drafts of dead writers, whatever they left."""
        drafts = [name for name in self._client.inside("data") if is_draft(name)]
        committed = self._committed() if drafts else set()
        dead = [
            draft
            for draft in drafts
            if draft not in committed and draft not in self._begun and self._is_dead(draft)
        ]
        for draft in dead:
            self._remove(draft)
        return dead

    def _cached(self, draft: str, file: str) -> BinaryIO | None:
        """Open a file of a checkpoint in the cache, if it is there and whole."""
        if self._cache is None or file == MANIFEST:
            return None
        try:
            manifest = self._manifests.get(draft) or read_manifest(Location(self, draft))
        except (OSError, LockstepError):  # whoever reads the bucket's is told
            return None
        self._manifests[draft] = manifest
        info = manifest.files.get(file)
        return None if info is None else self._cache.open(draft, file, info)

    def _is_dead(self, draft: str) -> bool:
        """Return whether a draft without a commit has no writer.

        One with a manifest may have been committed a moment ago, and the listing of the commits be
        late: only its age tells.
        """
        if self._commit_of_its_name(draft):
            return False
        files = self._client.below(f"data/{draft}")
        if not files:
            return False
        if writer_has_ended(draft) and f"data/{draft}/{MANIFEST}" not in files:
            return True
        return time.time() - max(files.values()) > ABANDONED_SECONDS

    def _commit_of_its_name(self, draft: str) -> bool:
        try:
            return self._draft_of(draft.partition(".tmp-")[0]) == draft
        except FileNotFoundError:
            return False

    def _committed(self) -> set[str]:
        """Return the drafts that are checkpoints."""
        committed = set()
        for name in self._client.inside("commits"):
            try:
                committed.add(self._draft_of(name))
            except FileNotFoundError:  # another process has just deleted it
                continue
        return committed

    def _draft_of(self, name: str) -> str:
        draft = self._read_json(f"commits/{name}").get("draft")
        if not isinstance(draft, str) or not is_draft(draft):
            what = f"{self}/commits/{name} does not name the data of a checkpoint"
            raise DamagedBytesError(what)
        return draft

    def _read_json(self, key: str) -> dict[str, Any]:
        data = self._client.get(key)
        try:
            content = json.loads(data[:_INDEX_LIMIT])
        except ValueError:
            raise DamagedBytesError(f"{self}/{key} is damaged") from None
        if not isinstance(content, dict):
            raise DamagedBytesError(f"{self}/{key} is damaged")
        return content

    def _remove(self, draft: str) -> None:
        """Delete the objects of a draft; `.begun` last, so that it is swept if this is cut off."""
        if self._cache is not None:
            self._cache.drop(draft)
        keys = sorted(self._client.below(f"data/{draft}"), key=lambda key: key.endswith(_BEGUN))
        self._client.delete(keys[:-1])
        self._client.delete(keys[-1:])
        went_forward()


class _Upload:
    """A file that is written: its full parts are sent by threads while the next one is filled."""

    def __init__(self, client: ObjectClient, pool: ThreadPoolExecutor, key: str) -> None:
        self._client = client
        self._pool = pool
        self._key = key
        self._buffer = bytearray()
        self._sent = 0  # parts
        self._pending: deque[Future[None]] = deque()

    def write(self, data: Any, /) -> None:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if len(self._buffer) == PART_BYTES:  # more follows: it is not a file of one part
                self._send()
            more = view[done : done + PART_BYTES - len(self._buffer)]
            self._buffer += more
            done += len(more)

    def finish(self) -> None:
        """Send the rest; the object that makes it a file comes last."""
        if not self._sent:
            self._client.put_new(self._key, bytes(self._buffer))
            return
        size = self._sent * PART_BYTES + len(self._buffer)
        self._send()
        while self._pending:
            self._await_one()
        if self._client.exists(self._key):
            raise FileExistsError(f"{self._client.url}/{self._key} exists already")
        index = _as_json({"part_bytes": PART_BYTES, "size": size})
        self._client.put_new(f"{self._key}.parts", index)

    def wait(self) -> None:
        """Wait for the parts that are still being sent after a failure, and ignore their errors."""
        for pending in self._pending:
            pending.cancel()
        for pending in self._pending:
            if not pending.cancelled():
                pending.exception()
        self._pending.clear()

    def _send(self) -> None:
        while len(self._pending) >= _IN_FLIGHT:
            self._await_one()
        part = _part(self._key, self._sent)
        self._pending.append(self._pool.submit(self._client.put_new, part, self._buffer))
        self._buffer = bytearray()
        self._sent += 1

    def _await_one(self) -> None:
        self._pending.popleft().result()
        went_forward()


class _Reader(SizedStream):
    """A file of one or more objects, read by ranges.

    Whoever reads from end to end finds the next parts already under way.
    """

    def __init__(
        self, client: ObjectClient, pool: ThreadPoolExecutor, parts: list[str], size: int
    ) -> None:
        super().__init__(size)
        self._client = client
        self._pool = pool
        self._parts = parts
        self._next = 0  # where a reader in order goes on
        self._in_order = 0  # bytes read in order since the last jump
        self._ahead: dict[int, Future[bytes]] = {}  # parts under way

    def fill(self, view: memoryview, position: int) -> int:
        """Read at most to the end of a part."""
        if position != self._next:
            self._in_order = 0
        number, offset = divmod(position, PART_BYTES) if len(self._parts) > 1 else (0, position)
        length = min(len(view), self._length(number) - offset)
        if length <= 0:
            return 0
        if number in self._ahead:
            view[:length] = self._ahead[number].result()[offset : offset + length]
        else:
            view[:length] = self._client.get_range(self._parts[number], offset, length)
        went_forward()
        self._next = position + length
        self._in_order += length
        self._read_ahead(number)
        return length

    def close(self) -> None:
        for pending in self._ahead.values():
            pending.cancel()
        self._ahead.clear()
        super().close()

    def _length(self, number: int) -> int:
        """Return the bytes of a part; none beyond the end."""
        if len(self._parts) == 1:
            return self._size if number == 0 else 0
        return max(0, min(PART_BYTES, self._size - number * PART_BYTES))

    def _read_ahead(self, number: int) -> None:
        for passed in [part for part in self._ahead if part < number]:
            self._ahead.pop(passed).cancel()
        if self._in_order < PART_BYTES // 2:
            return
        for part in range(number + 1, min(number + 1 + _IN_FLIGHT, len(self._parts))):
            if part not in self._ahead:
                self._ahead[part] = self._pool.submit(
                    self._client.get_range, self._parts[part], 0, self._length(part)
                )


def _within_objects(piece: FilePiece) -> Iterator[FilePiece]:
    """Yield the parts of a piece that lie in one object each."""
    begin = piece.begin
    while begin < piece.end:
        end = min(piece.end, round_up(begin + 1, PART_BYTES))
        yield replace(piece, begin=begin, end=end)
        begin = end


def _part(key: str, number: int) -> str:
    return f"{key}.part-{number:05d}"


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def in_bucket(url: str) -> ObjectStorage | Location:
    """Return the checkpoints below a URL, or the one that it names."""
    prefix, _, name = url.rpartition("/")
    if step_of(name) is None:
        return ObjectStorage(url)
    return Location(ObjectStorage(prefix), name)
