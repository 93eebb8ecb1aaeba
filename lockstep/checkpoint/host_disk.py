"""The objects on one disk of one host, and a server through which other hosts use them.

An object is a file, created whole under a name that is used once:

    FOLDER/data/step-00000100.tmp-HOST-PID-RANDOM/model/__0_0.distcp.part-00000
    FOLDER/commits/step-00000100
    FOLDER/.incoming/RANDOM        while it is written; a killed writer's stays, and is swept

In its file an object is followed by a seal, its length and the CRC-32 of its bytes. A disk gives
nothing of an object that is not as its seal says, so that who reads can take the copy on another
host's disk.

The server answers those who know the run's token, which rank 0 draws at each start of the ranks.

Tests: tests/checkpoint/test_host_disks.py
"""

import hmac
import http.client
import json
import os
import re
import secrets
import struct
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

from lockstep.checkpoint.posix import ABANDONED_SECONDS, sync_folder
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.run_directory.run_files import open_file

_SAFE = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=+-]+")  # a part of a key
_INCOMING = ".incoming"
_SECONDS = 60.0  # for an answer
_TRIES = 3  # of a request whose connection was lost
_PIECE = 1 << 20  # bytes that are read at once to compare a checksum
_SEAL = struct.Struct(">QI")  # at the end of a file: length and CRC-32 of what is before it


_ERRORS = {404: FileNotFoundError, 409: FileExistsError, 422: DamagedBytesError}


class Disk(ABC):
    """The objects of one disk, by their keys.

    Each method raises an OSError: FileNotFoundError and FileExistsError, as their names say, and
    `read` and `size` a DamagedBytesError.
    """

    name: str

    @abstractmethod
    def create(self, key: str, data: Any) -> None:
        """Create an object, durably. One of the same bytes may be there, of an earlier try."""

    @abstractmethod
    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of an object; fewer than `length` where it ends."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size of an object."""

    @abstractmethod
    def created(self, key: str) -> float:
        """Return when an object was created, damaged or not, in seconds since 1970."""

    @abstractmethod
    def inside(self, folder: str) -> list[str]:
        """Return the names right below a folder."""

    @abstractmethod
    def below(self, folder: str) -> dict[str, float]:
        """Return the keys of all objects below a folder, and when they were created."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is gone is passed over."""


class OwnDisk(Disk):
    """A folder on a disk of this host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)
        # key → size of the file and its time of change, when its checksum was found right
        self._verified: dict[str, tuple[int, int]] = {}

    def create(self, key: str, data: Any) -> None:
        """Write the object under another name, and link it to its own when it is on the disk."""
        path = self._path(key)
        with self._written(path, data) as beside:
            try:
                os.link(beside, path)
            except FileExistsError:
                if path.read_bytes() != bytes(data) + _seal(data):
                    raise

    def repair(self, key: str, data: bytes) -> None:
        """Put an object's bytes, as another disk has them, in the place of a damaged copy."""
        path = self._path(key)
        with self._written(path, data) as beside:
            beside.replace(path)

    @contextmanager
    def _written(self, path: Path, data: Any) -> Iterator[Path]:
        """Yield a file with an object and its seal, to which the block gives its own name."""
        _make_folders(path.parent)
        incoming = self.root / _INCOMING
        incoming.mkdir(exist_ok=True)
        beside = incoming / secrets.token_hex(16)
        try:
            with beside.open("xb") as stream:
                stream.write(data)
                stream.write(_seal(data))
                stream.flush()
                os.fsync(stream.fileno())
            yield beside
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(path.parent)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._path(key)
        with open_file(self.root, *key.split("/")) as stream:
            size = self._verified_size(key, stream)
            stream.seek(start)
            length_left = max(0, size - start)
            return stream.read(length_left if length is None else min(length_left, length))

    def size(self, key: str) -> int:
        self._path(key)
        with open_file(self.root, *key.split("/")) as stream:
            return _sealed_size(key, stream)

    def _verified_size(self, key: str, stream: BinaryIO) -> int:
        """Return the size of an object, whose checksum is compared once for each file."""
        size = _sealed_size(key, stream)
        status = os.fstat(stream.fileno())
        seen = (status.st_size, status.st_mtime_ns)
        if self._verified.get(key) != seen:
            if _SEAL.pack(size, _checksum(stream, size)) != stream.read():
                raise DamagedBytesError(f"{key} is damaged")
            self._verified[key] = seen
        return size

    def created(self, key: str) -> float:
        return self._path(key).stat().st_mtime

    def inside(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(self._path(folder)))
        return []

    def below(self, folder: str) -> dict[str, float]:
        times = {}
        for path in sorted(self._path(folder).rglob("*")):
            with suppress(FileNotFoundError):
                if path.is_file():
                    times[path.relative_to(self.root).as_posix()] = path.stat().st_mtime
        return times

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            self._verified.pop(key, None)
            for folder in path.relative_to(self.root).parents:
                if len(folder.parts) > 1:  # `data` and `commits` stay
                    with suppress(OSError):  # it is not empty
                        (self.root / folder).rmdir()

    def sweep(self) -> None:
        """Delete what killed writers were writing."""
        for name in self.inside(_INCOMING):
            path = self.root / _INCOMING / name
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(_SAFE.fullmatch(part) for part in parts):
            raise OSError(f"{key!r} is not the name of an object")
        return self.root.joinpath(*parts)


class OtherDisk(Disk):
    """A disk of another host, through its server."""

    def __init__(self, name: str, address: str, port: int, token: str) -> None:
        self.name = name
        self._address = address
        self._port = port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connections = threading.local()  # one for each thread

    def create(self, key: str, data: Any) -> None:
        self._ask("PUT", key, data=bytes(data))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        part = {} if length is None else {"Range": f"bytes={start}-{start + length - 1}"}
        return b"" if length == 0 else self._ask("GET", key, part)

    def size(self, key: str) -> int:
        return int(json.loads(self._ask("GET", f"?size={key}")))

    def created(self, key: str) -> float:
        return float(json.loads(self._ask("GET", f"?created={key}")))

    def inside(self, folder: str) -> list[str]:
        names: list[str] = json.loads(self._ask("GET", f"?inside={folder}"))
        return names

    def below(self, folder: str) -> dict[str, float]:
        times: dict[str, float] = json.loads(self._ask("GET", f"?below={folder}"))
        return times

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask("DELETE", key)

    def _ask(
        self, method: str, key: str, more: dict[str, str] | None = None, data: bytes | None = None
    ) -> bytes:
        """Send a request, again if its connection is lost, and return what is answered."""
        target = f"/{quote(key, safe='/?=')}"
        for left in reversed(range(_TRIES)):
            connection = getattr(self._connections, "one", None)
            if connection is None:
                connection = http.client.HTTPConnection(self._address, self._port, timeout=_SECONDS)
                self._connections.one = connection
            try:
                connection.request(method, target, data, {**self._headers, **(more or {})})
                answer = connection.getresponse()
                body = bytes(answer.read())
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self._connections.one = None
                if not left:
                    what = f"{type(error).__name__}: {error}"
                    raise OSError(f"{self.name} does not answer ({what})") from None
        if answer.status >= HTTPStatus.BAD_REQUEST:
            text = body.decode(errors="replace")
            raise _ERRORS.get(answer.status, OSError)(f"{self.name}: {text}")
        return body


class DiskServer:
    """Serves the disk of this host to the other hosts of a run, in threads of this process."""

    def __init__(self, disk: OwnDisk, address: str, token: str) -> None:
        handler = type("_Bound", (_Handler,), {"disk": disk, "token": token})
        self._server = ThreadingHTTPServer((address, 0), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    disk: OwnDisk
    token: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Send an object, a part of one, or what is known of some."""
        question, separator, about = self._key().partition("=")
        if separator and question in ("?size", "?created", "?inside", "?below"):
            look: Any = getattr(self.disk, question[1:])
            self._answer(lambda: json.dumps(look(about)).encode())
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        length = int(asked[2]) - start + 1 if asked else None
        self._answer(lambda: self.disk.read(self._key(), start, length))

    def do_PUT(self) -> None:
        """Create an object."""

        def create() -> bytes:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise OSError(f"Content-Length is {length!r}")
            self.disk.create(self._key(), self.rfile.read(int(length)))
            return b""

        self._answer(create)

    def do_DELETE(self) -> None:
        """Delete an object."""

        def delete() -> bytes:
            self.disk.delete([self._key()])
            return b""

        self._answer(delete)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""

    def _key(self) -> str:
        return unquote(self.path.removeprefix("/"))

    def _answer(self, work: Any) -> None:
        """Do the work for whoever knows the token, and send what it returns, or its error.

        Of others not even what they send is read.
        """
        status = HTTPStatus.OK
        authorization = self.headers.get("Authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            status = HTTPStatus.UNAUTHORIZED
            body = b"this is not the token of the run"
            self.close_connection = True  # what it sends would be taken for a request
        else:
            try:
                body = work()
            except FileNotFoundError:
                status = HTTPStatus.NOT_FOUND
                body = f"there is no {self._key()}".encode()
            except FileExistsError:
                status = HTTPStatus.CONFLICT
                body = f"{self._key()} exists already".encode()
            except DamagedBytesError as error:
                status = HTTPStatus.UNPROCESSABLE_ENTITY
                body = str(error).encode()
            except OSError as error:
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                body = str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _seal(data: Any) -> bytes:
    return _SEAL.pack(len(data), zlib.crc32(data))


def _checksum(stream: BinaryIO, size: int) -> int:
    """Return the CRC-32 of the first bytes of a file, which are read piece by piece."""
    stream.seek(0)
    checksum = 0
    while size > 0:
        piece = stream.read(min(size, _PIECE))
        if not piece:  # it was cut short meanwhile
            break
        checksum = zlib.crc32(piece, checksum)
        size -= len(piece)
    return checksum


def _sealed_size(key: str, stream: BinaryIO) -> int:
    """Return the size of an object by its file, or raise a DamagedBytesError.

    What is cut off or appended is found without reading the bytes.
    """
    size = os.fstat(stream.fileno()).st_size - _SEAL.size
    if size >= 0:
        stream.seek(size)
        if _SEAL.unpack(stream.read(_SEAL.size))[0] == size:
            return size
    raise DamagedBytesError(f"{key} is damaged: it is cut short, or longer than it was")


def _make_folders(path: Path) -> None:
    if not path.is_dir():
        _make_folders(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
