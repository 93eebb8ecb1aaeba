"""Files that are written once, from start to end: what is read back is what went in, whatever its
size.
"""

import errno
import fcntl
import os
import threading
import zlib
from pathlib import Path

import pytest

from lockstep.checkpoint import posix
from lockstep.checkpoint.posix import UncachedFile
from lockstep.checkpoint.storage import ChecksumStream

SIZES = [
    0,
    1,
    4095,
    4096,
    posix._BUFFER - 1,
    posix._BUFFER,
    posix._BUFFER + 1,
    3 * posix._BUFFER + 4097,
]


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize("piece", [1000, 1 << 20, 64 << 20])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_in_pieces_is_read_back(tmp_path: Path, size: int, piece: int) -> None:
    data = content(size)
    with UncachedFile(tmp_path / "file") as file:
        stream = ChecksumStream(file)
        for begin in range(0, size, piece):
            assert stream.write(data[begin : begin + piece]) == len(data[begin : begin + piece])
            assert stream.tell() == min(begin + piece, size)
        os.fsync(file.fileno())
    info = stream.info
    assert (tmp_path / "file").read_bytes() == data
    assert (info.size, info.crc32) == (size, zlib.crc32(data))


def test_writing_goes_on_after_a_sync_at_any_place(tmp_path: Path) -> None:
    data = content(3 * posix._BUFFER)
    with UncachedFile(tmp_path / "file") as stream:
        stream.write(data[:5000])
        os.fsync(stream.fileno())
        assert (tmp_path / "file").read_bytes() == data[:5000]
        stream.write(data[5000:])
    assert (tmp_path / "file").read_bytes() == data


def test_full_buffers_go_past_the_page_cache_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = []
    set_direct = posix._set_direct

    def watched(handle: int, wanted: bool) -> None:
        direct.append(wanted)
        set_direct(handle, wanted)

    monkeypatch.setattr(posix, "_set_direct", watched)
    with UncachedFile(tmp_path / "file") as stream:
        stream.write(content(2 * posix._BUFFER + 100))
    assert direct == [True, True, False]


def test_a_file_system_that_can_not_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(handle: int, command: int, flags: int = 0) -> int:
        if command == posix.fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no direct writes here")
        return os.O_WRONLY

    monkeypatch.setattr(posix.fcntl, "fcntl", refuses)
    with UncachedFile(tmp_path / "file") as stream:
        stream.write(content(posix._BUFFER + 9))
    assert (tmp_path / "file").read_bytes() == content(posix._BUFFER + 9)


def test_one_that_refuses_the_write_itself_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    tries = []

    def refuses(handle: int, data: memoryview) -> int:
        tries.append(bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT))
        if tries[-1]:
            raise OSError(errno.EINVAL, "blocks are larger here")
        return write(handle, data)

    monkeypatch.setattr(os, "write", refuses)
    data = content(3 * posix._BUFFER)
    with UncachedFile(tmp_path / "file") as stream:
        stream.write(data)
    assert (tmp_path / "file").read_bytes() == data
    assert tries == [True, False, False, False], "tried once"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda handle, data: write(handle, bytes(data[: max(1, len(data) // 2 + 7)]))
    )
    data = content(posix._BUFFER + 10_000)
    with UncachedFile(tmp_path / "file") as stream:
        stream.write(data)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_told_when_the_bytes_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, mode=0o777: opened("/dev/full", os.O_WRONLY)
    )
    stream = UncachedFile(tmp_path / "file")
    stream.write(b"a few bytes")
    with pytest.raises(OSError, match="No space left"):
        stream.fileno()
    stream.close()


def test_a_disk_that_fills_up_behind_the_writer_is_told_and_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    calls = []

    def fills_up(handle: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(os, "write", fills_up)
    before = threading.active_count()
    stream = UncachedFile(tmp_path / "file")
    stream.write(content(posix._BUFFER))
    with pytest.raises(OSError, match="No space left"):
        stream.write(content(3 * posix._BUFFER))
    stream.close()
    assert calls == [posix._BUFFER] * 2
    assert threading.active_count() == before
    assert stream.closed


def test_what_is_full_is_written_while_the_next_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    let = threading.Event()

    def slow(handle: int, data: memoryview) -> int:
        assert let.wait(200)
        return write(handle, data)

    monkeypatch.setattr(os, "write", slow)
    data = content(2 * posix._BUFFER - 1)
    with UncachedFile(tmp_path / "file") as stream:
        stream.write(data)  # returns, though nothing is written yet
        let.set()
    assert (tmp_path / "file").read_bytes() == data
