"""Law 2, by force: a save killed at any moment, or refused by the disk, leaves what was there,
whole.
"""

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import posix
from lockstep.checkpoint.storage import Location
from lockstep.errors import RunError
from tests.checkpoint.places import Folder, Place, remove
from tests.checkpoint.shared import assert_same, blank, files_of, save, snapshot


@pytest.mark.fault(
    "process: killed inside a commit",
    "SIGKILL at each operation on files of a save in turn; in a storage without files, at each of"
    " its lines",
    "the old checkpoints are whole, and the new one is whole or invisible",
)
def test_a_kill_at_any_moment_of_a_save_leaves_the_old_or_the_new(place: Place) -> None:
    place.save(1)
    old = "step-00000001"
    new = "step-00000002"
    seen_old = seen_new = 0
    for _ in place.moments(lambda: place.save(2, shift=1.0)):
        there = place.names()
        assert there in ([old], [old, new])
        place.once_a_state(_assert_newest_loads, there[-1], new)
        seen_old = seen_old + (there[-1] == old)
        seen_new = seen_new + (there[-1] == new)
        if there[-1] == new:
            remove(checkpoint.list_checkpoints(place.directory)[-1])
    assert seen_old > 40, "every file is made, written and synced, every folder made and synced"
    if isinstance(place, Folder):
        assert seen_new == 2, (
            "from the rename on: before the folder above is synced, and at the end"
        )
    assert seen_new >= 1


def _assert_newest_loads(place: Place, name: str, new: str) -> None:
    """The newest checkpoint is whole, and holds what was saved."""
    with patch("lockstep.checkpoint.keep._warn", side_effect=AssertionError):
        found = checkpoint.newest(place.directory, thorough=True)
    assert found is not None
    assert found.name == name
    target = blank(snapshot())
    checkpoint.load(found, target)
    assert_same(snapshot(1.0 if name == new else 0.0), target)


def _assert_all_are_whole(place: Place) -> None:
    for path in checkpoint.list_checkpoints(place.directory):
        assert checkpoint.verify(path) == []


@pytest.mark.fault(
    "storage: leftovers of a killed save",
    "an unfinished checkpoint stays behind",
    "no run resumes from it, and the next save removes it",
)
def test_the_next_save_sweeps_what_the_killed_one_left(place: Place) -> None:
    place.save(1)
    assert place.killed_at(40, lambda: place.save(2))[0]
    assert place.names() == ["step-00000001"]
    if isinstance(place, Folder):
        assert len(list(place.directory.iterdir())) == 2
    place.save(3)
    checkpoint.rotate(place.directory, keep=5)
    assert place.storage.sweep() == []
    assert place.names() == ["step-00000001", "step-00000003"]
    if isinstance(place, Folder):
        assert sorted(path.name for path in place.directory.iterdir()) == place.names()


@pytest.mark.fault(
    "process: killed inside a rotation",
    "SIGKILL while an old checkpoint is deleted",
    "it is whole or gone, never half",
)
def test_a_kill_at_any_moment_of_a_deletion_leaves_no_half_checkpoint(place: Place) -> None:
    for step in (1, 2, 3):
        place.save(step)
    for _ in place.moments(lambda: checkpoint.rotate(place.directory, keep=1)):
        place.once_a_state(_assert_all_are_whole)
        assert place.names()[-1] == "step-00000003"
    assert place.names() == ["step-00000003"]
    assert place.storage.sweep() == []
    if isinstance(place, Folder):
        assert [path.name for path in place.directory.iterdir()] == ["step-00000003"]


@pytest.mark.fault(
    "process: killed while later checkpoints are set aside",
    "SIGKILL while a run goes back to an earlier step",
    "each of them is whole, by its old name or its new one",
)
def test_a_kill_at_any_moment_of_setting_aside_loses_nothing(place: Place) -> None:
    for step in (1, 2):
        place.save(step, shift=float(step))
    digest = checkpoint.digest(checkpoint.list_checkpoints(place.directory)[1])
    for _ in place.moments(lambda: checkpoint.set_aside(place.directory, after=1)):
        place.once_a_state(_assert_second_is_whole, digest)
        place.storage.sweep()
        # A bucket's move that was cut off leaves both names. Each further one would be asked for by
        # the next try, which would never come to its end.
        for name in place.storage.names():
            if "step-00000002" in place.names() and name.startswith("step-00000002."):
                place.storage.delete(name)
    assert place.names() == ["step-00000001"]


def _assert_second_is_whole(place: Place, digest: str) -> None:
    """All checkpoints are whole; the second one has this digest by each of its names."""
    _assert_all_are_whole(place)
    named = [name for name in place.storage.names() if name.startswith("step-00000002")]
    assert {checkpoint.digest(path) for path in map(place.storage.path, named)} == {digest}, (
        "none is half"
    )


@pytest.mark.fault(
    "storage: power is cut",
    "what was written and not synced is lost",
    "every file and folder is synced before the rename that makes a checkpoint, and the folder"
    " above after it",
)
def test_trap_50_everything_is_synced_before_the_rename(tmp_path: Path) -> None:
    """A power cut after the rename must find every byte and every name; torch syncs no folder."""
    save(tmp_path, 1)
    _, changes = Folder(tmp_path).killed_at(10**9, lambda: save(tmp_path, 2))
    rename = next(i for i, change in enumerate(changes) if change.startswith("os.rename step-"))
    made = [
        i
        for i, change in enumerate(changes[:rename])
        if change.split()[0] in ("open", "write", "os.mkdir")
    ]
    for i in made:
        name = changes[i].split()[1]
        assert f"fsync {name}" in changes[i + 1 : rename], (
            f"{changes[i]} is not synced before the rename"
        )
    last = max(
        i for i, change in enumerate(changes[:rename]) if change.startswith(("open ", "os.rename"))
    )
    assert changes[last] == "open manifest.json", "the manifest is the last file"
    inside = ("model", "main", "plain_sgd", "optimizer", "ema", "extra")
    for folder in inside:
        assert f"fsync {folder}" in changes[last:rename], f"{folder} got names after it was synced"
    assert changes[rename + 1 :] == [f"fsync {tmp_path.name}"]


def test_a_rank_syncs_what_it_writes_into_the_draft_of_another(tmp_path: Path) -> None:
    """On another host, the syncs of the rank that commits need not reach what this one has made."""
    storage = posix.PosixStorage(tmp_path)
    draft = storage.begin("step-00000001")

    def as_another_rank() -> None:
        posix._in_flight.clear()
        Location(storage, draft).put("optimizer/main/rank-00001.raw", b"x")

    _, changes = Folder(tmp_path).killed_at(10**9, as_another_rank)
    written = changes.index("fsync rank-00001.raw")
    assert changes[written + 1 :] == ["fsync main", "fsync optimizer", f"fsync {draft}"]


def test_the_folders_above_are_named_durably_too(tmp_path: Path) -> None:
    """The first checkpoint of a run also makes `checkpoints/`: its name must not be lost either."""
    _, changes = Folder(tmp_path).killed_at(
        10**9, lambda: save(tmp_path / "run" / "checkpoints", 1)
    )
    assert changes[:4] == [
        "os.mkdir run",
        f"fsync {tmp_path.name}",
        "os.mkdir checkpoints",
        "fsync run",
    ]


@pytest.mark.promise("Nothing that exists is written over, except what Lockstep itself wrote")
def test_no_file_is_written_over(tmp_path: Path) -> None:
    draft = Location(
        posix.PosixStorage(tmp_path), posix.PosixStorage(tmp_path).begin("step-00000001")
    )
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
    """The message of the error that `work` fails with, in a forked process without
    root's rights.
    """
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
