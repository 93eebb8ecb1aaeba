"""Opens, reads and writes the files of run directories, which may be a stranger's.

Does not import torch.

The run directory itself may be a link, and so may its folders `checkpoints/` and `logs/`, which
people keep on other disks. Nothing else in it is followed: a link could point at any file of the
reader. Only ordinary files are read, since a pipe has no end, and of each only so many bytes. What
is left out for that is told by a `LeftOutError`, or noted.

Tests: tests/report/test_hostile.py, tests/faults/test_security.py
"""

import json
import os
import secrets
import stat
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import UsageError
from lockstep.files.damaged_bytes import DamagedBytesError

LINE_BYTES = 1 << 20  # of a line of JSON
FILE_BYTES = 8 << 30  # of a file of lines
_DEPTH = 16  # levels of JSON; a record has four
_SUSPICIOUS = 64  # brackets from which on the depth is looked at

Note = Callable[[str], object]


class LeftOutError(DamagedBytesError):
    """A file that is there and is not read; the message says why, after the file's name."""


def open_file(folder: str | os.PathLike[str], *names: str) -> BinaryIO:
    """Open `folder/names…` for reading, without following a link below the folder.

    Raises LeftOutError: it is a link, a pipe, a device or a folder. FileNotFoundError: it is not
    there. Another OSError: the system does not open it.
    """
    shown = "/".join(names)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            deeper = _open_entry(name, os.O_DIRECTORY, place, shown)
            os.close(place)
            place = deeper
        # the opening of a pipe would wait for a writer
        handle = _open_entry(names[-1], os.O_NONBLOCK, place, shown)
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise LeftOutError(f"{shown} is not an ordinary file")
    return os.fdopen(handle, "rb")


def _open_entry(name: str, flags: int, place: int, shown: str) -> int:
    """Open what is called `name` in an open folder; raise as `open_file`, of a file as `shown`."""
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=place)
    except FileNotFoundError:
        raise
    except OSError as error:
        mode = 0
        with suppress(OSError):
            mode = os.lstat(name, dir_fd=place).st_mode
        if stat.S_ISLNK(mode):
            raise LeftOutError(f"{shown} is a link, or in one") from None
        if isinstance(error, NotADirectoryError) or stat.S_ISSOCK(mode):
            raise LeftOutError(f"{shown} is not an ordinary file, or in one") from None
        raise OSError(error.errno, error.strerror, shown) from None


def is_file(folder: Path, *names: str) -> bool:
    """Return whether there is an ordinary file of this name, no link, that can be opened."""
    try:
        open_file(folder, *names).close()
    except OSError:
        return False
    return True


def read_bytes(folder: Path, *names: str, limit: int) -> bytes:
    """Return the content of a file. Raises LeftOutError: it has more than `limit` bytes, too."""
    with open_file(folder, *names) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise LeftOutError(f"{'/'.join(names)} has more than {limit:,} bytes")
    return data


def read_text(folder: Path, *names: str, limit: int) -> str:
    """Return the content of a text file; what is not UTF-8 is replaced."""
    return read_bytes(folder, *names, limit=limit).decode(errors="replace")


def read_object(folder: Path, *names: str, limit: int) -> dict[str, Any]:
    """Return the JSON object in a file. Raises LeftOutError: it holds none, too."""
    found = parse_object(read_bytes(folder, *names, limit=limit))
    if found is None:
        raise LeftOutError(f"{'/'.join(names)} holds no JSON object")
    return found


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is none, or has too many levels."""
    brackets = (
        (text.count(b"[") + text.count(b"{"))
        if isinstance(text, bytes)
        else text.count("[") + text.count("{")
    )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or (brackets > _SUSPICIOUS and _is_deep(found)):
        return None
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def read_lines(folder: Path, name: str, note: Note | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, also of one that grows meanwhile.

    A line that is too long is passed over; of a file that is not there, there are none.

    Args:
        folder: of the file.
        name: of the file.
        note: is told what is left out, also that the system does not open the file; without it
            that is raised, since a file that can't be had is not an empty one.
    """
    tell = note or (lambda _text: None)
    try:
        file = open_file(folder, name)
    except FileNotFoundError:
        return
    except OSError as error:
        if note is None and not isinstance(error, LeftOutError):
            raise
        tell(str(error))
        return
    with file:
        left = FILE_BYTES
        too_long = 0
        while line := file.readline(LINE_BYTES):
            left -= len(line)
            if left < 0:
                tell(f"{name} was read up to its first {FILE_BYTES:,} bytes")
                break
            if len(line) < LINE_BYTES or line.endswith(b"\n"):
                yield line
                continue
            too_long += 1
            while line and not line.endswith(b"\n") and left >= 0:
                line = file.readline(LINE_BYTES)
                left -= len(line)
        if too_long:
            tell(f"{too_long:,} lines of {name} that have more than {LINE_BYTES:,} bytes")


def replace_file(path: Path, data: bytes | str) -> None:
    """Write a file of our own anew.

    It is the old one or the new one at any moment, and a link is replaced.
    """
    beside = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        create_file(beside, data)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def create_file(path: Path, data: bytes | str) -> None:
    """Write a file that is not there yet.

    Raises FileExistsError: something of this name is, even a broken link.
    """
    handle = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    with os.fdopen(handle, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def open_to_append(path: Path) -> int:
    """Open a file of our own for appending, and return its descriptor.

    Raises OSError: it is a link.
    """
    return os.open(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )


def write_result(path: Path, data: bytes | str) -> None:
    """Write a file that a user named. Raises UsageError: it exists, or can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_file(path, data)
    except FileExistsError:
        raise exists_already(path) from None
    except OSError as error:
        raise UsageError(
            f"{path} can't be written", why=error.strerror, fix="name another file"
        ) from None


def exists_already(path: Path) -> UsageError:
    """Return the error for a name that is taken: nothing is written over."""
    return UsageError(f"{path} exists already", fix="name another file, or move it away")


def printable(text: str) -> str:
    r"""Return a text for a terminal.

    Control characters, which could move its cursor, are shown as `\x1b`.

    Those that turn the direction of writing are shown so, too; line breaks and tabs are left.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        (
            character
            if character in "\n\t"
            or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn")
            else character.encode("unicode_escape", "surrogatepass").decode()
        )
        for character in text
    )
