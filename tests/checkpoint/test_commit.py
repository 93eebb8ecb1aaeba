"""Law 2, by force: a save killed at any system call, or refused by the disk, leaves what was there, whole."""

import ctypes
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import posix
from lockstep.checkpoint.storage import Location
from lockstep.errors import RunError
from tests.checkpoint.shared import assert_same, blank, files_of, save, snapshot

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}


def watch_disk(root: Path, before: Callable[[str, str], None]) -> None:
    """Call `before(name, path)` ahead of each change that this process makes to the disk below `root`.

    Python announces the system calls itself (audit events), so that nothing in the product has to cooperate; fsync and
    writes, which it does not announce, are wrapped. It can't be undone: for a process of its own.
    """
    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            changes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        else:
            changes = event in _CHANGES
        if changes and str(root) in str(arguments[0]):
            before(event, str(arguments[0]))

    writes: Counter[str] = Counter()
    sync, set_direct = os.fsync, posix._set_direct  # called ahead of every write

    def watched_sync(handle: int) -> None:
        before("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def watched_write(handle: int, direct: bool) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        writes[path] += 1
        if writes[path].bit_count() == 1:  # of many little writes in a row: the 1st, 2nd, 4th, 8th …
            before("write", path)
        set_direct(handle, direct)

    os.fsync = watched_sync
    posix._set_direct = watched_write
    sys.addaudithook(hear)


def killed_at(moment: int, root: Path, work: Callable[[], object]) -> tuple[bool, list[str]]:
    """Do `work` in a forked process that is killed, by SIGKILL, just before its change number `moment`.

    Returns:
        (whether it was killed, the changes it came to).
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def before(name: str, path: str) -> None:
            nonlocal count
            os.write(write, f"{name} {Path(path).name}\n".encode())
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        try:
            watch_disk(root, before)
            work()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        changes = said.read().splitlines()
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), changes


def moments(root: Path, work: Callable[[], object]) -> Iterator[list[str]]:
    """Each moment at which `work` can be killed, until it gets through; yields the changes that it came to."""
    moment, killed = 0, True
    while killed:
        killed, changes = killed_at(moment, root, work)
        yield changes
        moment += 1


@pytest.mark.fault(
    "process: killed inside a commit",
    "SIGKILL at each operation on files of a save in turn",
    "the old checkpoints are whole, and the new one is whole or invisible",
)
def test_a_kill_at_any_moment_of_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    old = save(tmp_path, 1)
    new = tmp_path / "step-00000002"
    seen_old = seen_new = 0
    for _ in moments(tmp_path, lambda: save(tmp_path, 2, shift=1.0)):
        there = checkpoint.list_checkpoints(tmp_path)
        assert there in ([old], [old, new])
        found = checkpoint.newest(tmp_path, thorough=True, on_damaged=lambda path, why: pytest.fail(f"{path}: {why}"))
        assert found == there[-1]
        target = blank(snapshot())
        checkpoint.load(found, target)
        assert_same(snapshot(1.0 if found == new else 0.0), target)
        seen_old, seen_new = seen_old + (found == old), seen_new + (found == new)
        if found == new:
            shutil.rmtree(new)
    assert seen_old > 50, "every file is made, written and synced, every folder made and synced"
    assert seen_new == 2, "from the rename on: before the folder above is synced, and at the end"


@pytest.mark.fault(
    "storage: leftovers of a killed save",
    "an unfinished folder stays behind",
    "no run resumes from it, and the next save removes it",
)
def test_the_next_save_sweeps_what_the_killed_one_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    killed_at(40, tmp_path, lambda: save(tmp_path, 2))
    assert len(list(tmp_path.iterdir())) == 2
    save(tmp_path, 2)
    checkpoint.rotate(tmp_path, keep=5)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]


@pytest.mark.fault(
    "process: killed inside a rotation",
    "SIGKILL while an old checkpoint is deleted",
    "it is whole or gone, never half",
)
def test_a_kill_at_any_moment_of_a_deletion_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for _ in moments(tmp_path, lambda: checkpoint.rotate(tmp_path, keep=1)):
        for path in checkpoint.list_checkpoints(tmp_path):
            assert checkpoint.verify(path) == []
        assert checkpoint.newest(tmp_path) == tmp_path / "step-00000003"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.fault(
    "storage: power is cut",
    "what was written and not synced is lost",
    "every file and folder is synced before the rename that makes a checkpoint, and the folder above after it",
)
def test_trap_50_everything_is_synced_before_the_rename(tmp_path: Path) -> None:
    """A power cut after the rename must find every byte and every name; torch syncs no folder."""
    save(tmp_path, 1)
    _, changes = killed_at(10**9, tmp_path, lambda: save(tmp_path, 2))
    rename = next(i for i, change in enumerate(changes) if change.startswith("os.rename step-"))
    made = [i for i, change in enumerate(changes[:rename]) if change.split()[0] in ("open", "write", "os.mkdir")]
    for i in made:
        name = changes[i].split()[1]
        assert f"fsync {name}" in changes[i + 1 : rename], f"{changes[i]} is not synced before the rename"
    last = max(i for i, change in enumerate(changes[:rename]) if change.startswith(("open ", "os.rename")))
    assert changes[last] == "open manifest.json", "the manifest is the last file"
    inside = ("model", "main", "plain_sgd", "optimizer", "ema", "extra")
    for folder in inside:
        assert f"fsync {folder}" in changes[last:rename], f"{folder} got names after it was synced"
    assert changes[rename + 1 :] == [f"fsync {tmp_path.name}"]


def test_the_folders_above_are_named_durably_too(tmp_path: Path) -> None:
    """The first checkpoint of a run also makes `checkpoints/`: its name must not be lost either."""
    _, changes = killed_at(10**9, tmp_path, lambda: save(tmp_path / "run" / "checkpoints", 1))
    assert changes[:4] == ["os.mkdir run", f"fsync {tmp_path.name}", "os.mkdir checkpoints", "fsync run"]


def test_no_file_is_written_over(tmp_path: Path) -> None:
    draft = Location(posix.PosixStorage(tmp_path), posix.PosixStorage(tmp_path).begin("step-00000001"))
    draft.put("model/file", b"first")
    with pytest.raises(FileExistsError):
        draft.put("model/file", b"second")
    assert (tmp_path / draft.name / "model" / "file").read_bytes() == b"first"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 kB; a test that needs it is skipped where none can be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=128k") != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield place
    finally:
        libc.umount2(bytes(place), 2)


@pytest.mark.fault(
    "storage: the disk is full",
    "a write fails with ENOSPC",
    "one message with what to do; the old checkpoint is whole, nothing of the new one stays",
)
def test_trap_50_a_full_disk_leaves_the_old_checkpoint(small_disk: Path) -> None:
    """Overwriting in place, a full disk destroys the only checkpoint."""
    old = save(small_disk, 1)
    (small_disk / "ballast").write_bytes(bytes((os.statvfs(small_disk).f_bavail - 6) * 4096))
    with pytest.raises(RunError, match="No space left on device") as caught:
        save(small_disk, 2)
    assert "save_total_limit" in str(caught.value)
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "step-00000001"]
    assert checkpoint.verify(old) == []
    (small_disk / "ballast").unlink()
    assert checkpoint.verify(save(small_disk, 2)) == []


@pytest.mark.fault(
    "storage: a limit on file sizes",
    "a write is cut short (EFBIG)",
    "the save fails with one message, whatever the size",
)
def test_a_limit_on_file_size_is_an_error_at_any_size(tmp_path: Path) -> None:
    """The write that fails may be any: in the tensors, in the metadata, in the manifest."""
    old = save(tmp_path, 1)
    largest = max(file.stat().st_size for file in files_of(old))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, 100, 1000, 3000, largest - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(RunError, match="File too large"):
                save(tmp_path, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == [old]
    assert checkpoint.verify(old) == []


def as_nobody(work: Callable[[], object]) -> str:
    """The message of the error that `work` fails with, in a forked process without root's rights."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:  # root may write anywhere
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
        except RunError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        message = said.read()
    os.waitpid(child, 0)
    return message


@pytest.mark.fault(
    "storage: no right to write",
    "the folder belongs to somebody else",
    "one message with the folder and what to do",
)
def test_a_folder_that_may_not_be_written_is_one_message(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tmp_path.chmod(0o555)
    tmp_path.parent.chmod(0o755)
    message = as_nobody(lambda: save(tmp_path, 2))
    tmp_path.chmod(0o755)
    assert "the checkpoint of step 2 was not written" in message
    assert "Permission denied" in message
    assert "choose another --output-dir" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.fault(
    "storage: a file where the folder should be",
    "a file is called `checkpoints`",
    "one message",
)
def test_a_file_in_the_way_of_the_folder_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match=r"Not a directory|File exists"):
        save(tmp_path / "checkpoints", 1)
