"""What can't be read is not damaged: a run ends with one error, and goes on from no older state."""

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import DamagedError, Location, UnreachableError
from lockstep.checkpoint.host_disk import Disk, OwnDisk
from lockstep.checkpoint.host_disks import DisksClient
from lockstep.checkpoint.memory import MemoryStorage
from lockstep.checkpoint.posix import PosixStorage
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.run_directory import records, run_files, run_mirror
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_files import LeftOutError, open_file
from tests.checkpoint.shared import CONFIG, blank, save, snapshot
from tests.checkpoint.test_fetch import Far
from tests.faults.tiny import Points, events, trainer

NEWEST = "step-00000002"
FILES = [
    "manifest.json",
    "state.json",
    "config.yaml",
    "model/.metadata",
    "model/__0_0.distcp",
    "optimizer/main/__0_0.distcp",
]
REFUSALS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES)


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Failing(PosixStorage):
    """A folder of which some files can't be read: at the opening, or at the first byte."""

    def __init__(self, root: Path, file: str, error: OSError, *, is_open: bool) -> None:
        super().__init__(root)
        self.file = file
        self.error = error
        self.is_open = is_open

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        if (name, file) != (NEWEST, self.file):
            with super().open(name, file) as stream:
                yield stream
            return
        if not self.is_open:
            raise self.error
        with super().open(name, file) as stream:
            yield Unreadable(stream, self.error)  # type: ignore[misc]


class FailingFar(Failing):
    """The same far away."""

    is_remote = True


class Unreadable:
    """A file that has a size, and fails where it is read."""

    def __init__(self, stream: BinaryIO, error: OSError) -> None:
        self._stream = stream
        self._error = error

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(to, whence)

    def read(self, size: int = -1) -> bytes:
        raise self._error


def two_checkpoints(folder: Path) -> None:
    for step in (1, 2):
        save(folder, step, shift=float(step))


def load(saved: Location, is_verified: bool) -> int:
    return int(checkpoint.load(saved, blank(snapshot()), is_verified=is_verified)["step"])


CHOICES: dict[str, Callable[[Failing], Any]] = {
    "newest": lambda storage: checkpoint.newest(storage, thorough=True),
    "resume_point": checkpoint.resume_point,
    "load_newest": lambda storage: checkpoint.load_newest(storage, load),
    "rotate": lambda storage: checkpoint.rotate(storage, keep=1),
    "verify": lambda storage: checkpoint.verify(Location(storage, NEWEST)),
    "load": lambda storage: checkpoint.load(Location(storage, NEWEST), blank(snapshot())),
    "digest": lambda storage: checkpoint.digest(Location(storage, NEWEST)),
}


@pytest.mark.fault(
    "storage: it does not give a checkpoint that it has",
    "a read fails (EIO, ESTALE, a time-out, no right) while a run chooses where to resume, loads,"
    " or deletes old checkpoints",
    "one error, and nothing is loaded, set aside or deleted: what can't be read is not damaged, and"
    " no older checkpoint is taken in its place",
)
@pytest.mark.parametrize("kind", [Failing, FailingFar], ids=["near", "far"])
@pytest.mark.parametrize("is_open", [False, True], ids=["at the opening", "at a byte"])
@pytest.mark.parametrize("name", CHOICES)
def test_what_can_not_be_read_is_not_passed_over(
    tmp_path: Path,
    name: str,
    is_open: bool,
    kind: type[Failing],
    caplog: pytest.LogCaptureFixture,
) -> None:
    two_checkpoints(tmp_path)
    of_a_part = ("state.json", "config.yaml", "optimizer/main/__0_0.distcp")
    for number, file in enumerate(FILES):
        if name == "digest" and file in of_a_part:
            continue  # it is of the model alone
        error = refusal(REFUSALS[number % len(REFUSALS)])
        storage = kind(tmp_path, file, error, is_open=is_open)
        with pytest.raises(UnreachableError, match="may be whole") as caught:
            CHOICES[name](storage)
        assert str(error.strerror) in str(caught.value)
        assert checkpoint.list_checkpoints(tmp_path) == [
            tmp_path / f"step-{step:08d}" for step in (1, 2)
        ]
    assert "passing over" not in caplog.text


@pytest.mark.parametrize("kind", [Failing, FailingFar], ids=["near", "far"])
@pytest.mark.parametrize("error", [FileNotFoundError("gone"), DamagedBytesError("other bytes")])
def test_what_is_known_to_be_damaged_is_passed_over(
    tmp_path: Path, kind: type[Failing], error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    """By a storage of one's own, too."""
    two_checkpoints(tmp_path)
    for file in FILES:
        storage = kind(tmp_path, file, error, is_open=False)
        found = checkpoint.load_newest(storage, load)
        assert found is not None
        assert found[0].name == "step-00000001", file
    assert caplog.text.count("passing over") == len(FILES)


def test_a_list_that_can_not_be_had_is_not_empty(tmp_path: Path) -> None:
    class Unlisted(PosixStorage):
        def names(self) -> list[str]:
            raise refusal(errno.ESTALE)

    for choose in (
        checkpoint.newest,
        checkpoint.resume_point,
        checkpoint.list_checkpoints,
        lambda storage: checkpoint.set_aside(storage, after=0),
    ):
        with pytest.raises(UnreachableError, match=os.strerror(errno.ESTALE)):
            choose(Unlisted(tmp_path))
    (tmp_path / "checkpoints").symlink_to(tmp_path / "a disk that is not mounted")
    with pytest.raises(UnreachableError, match="No such file"):
        checkpoint.newest(tmp_path / "checkpoints")


def test_a_copy_in_memory_that_can_not_be_read_is_not_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryStorage(tmp_path)
    checkpoint.save(memory, 2, snapshot(), config_yaml=CONFIG)
    memory.hide(NEWEST)  # a draft that another rank has not noted to be complete
    monkeypatch.setattr(run_files, "_open_entry", lambda *_args: refuse_now())
    with pytest.raises(UnreachableError):
        memory.holdings()


def refuse_now() -> Any:
    raise refusal(errno.EMFILE)


class Told(Disk):
    """A disk that says one thing of every object."""

    def __init__(self, name: str, answer: bytes | OSError) -> None:
        self.name = name
        self._answer = answer

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if isinstance(self._answer, OSError):
            raise self._answer
        return self._answer

    def create(self, key: str, data: Any) -> None:
        raise NotImplementedError

    size = created = inside = below = delete = create  # type: ignore[assignment]


def test_a_host_that_does_not_answer_may_have_what_another_has_damaged(tmp_path: Path) -> None:
    gone = FileNotFoundError("none")
    damaged = DamagedBytesError("damaged")
    away = OSError("does not answer")
    cases: list[tuple[list[bytes | OSError], type[OSError] | bytes]] = [
        ([damaged, away], OSError),
        ([away, damaged], OSError),
        ([gone, away], OSError),
        ([away, gone], OSError),
        ([damaged, gone], DamagedBytesError),
        ([gone, gone], FileNotFoundError),
        ([away, b"whole"], b"whole"),
    ]
    for answers, expected in cases:
        client = DisksClient(OwnDisk(tmp_path))
        client.disks = [Told(str(number), answer) for number, answer in enumerate(answers)]
        if isinstance(expected, bytes):
            assert client.get("data/x") == expected
            continue
        with pytest.raises(OSError) as caught:
            client.get("data/x")
        assert type(caught.value) is expected, answers


def test_old_checkpoints_stay_while_the_best_can_not_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was no candidate then, and deleted; and a save counted as failed for what is old."""
    keep = {"save_total_limit": 1, "keep_best": "loss", "save_steps": 4, "async": False}
    run = trainer(tmp_path, checkpoint=keep)
    open_entry = run_files._open_entry

    def refuse_states(name: str, *rest: Any) -> int:
        if name == "state.json" and run.step.progress.step == 8:
            raise refusal(errno.EIO)
        return open_entry(name, *rest)

    monkeypatch.setattr(run_files, "_open_entry", refuse_states)
    with caplog.at_level(logging.WARNING):
        run.train(Points())
    assert caplog.text.count("no older checkpoint is deleted now: Input/output error") == 1
    assert not events(tmp_path, "save_failed")
    assert [event["step"] for event in events(tmp_path, "save")] == [4, 8, 12]


def test_records_that_can_not_be_read_are_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": 1.0})
    assert run.recorded_step == 3
    monkeypatch.setattr(records, "is_file", lambda *_names: True)
    with monkeypatch.context() as refused:
        refused.setattr(run_files, "_open_entry", lambda *_args: refuse_now())
        for read in (
            lambda: run.recorded_step,
            run.read_metrics,
            run.read_events,
            lambda: run.drop_after(1),
            lambda: list(run_mirror._names(tmp_path)) and open_file(tmp_path, "metrics.jsonl"),
        ):
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                read()
        notes: list[str] = []
        assert list(records.read_lines(run.metrics, notes.append)) == []
        assert len(notes) == 1, "a report goes on, and tells it"
    assert len(run.read_metrics()) == 3


def test_what_is_not_an_ordinary_file_is_damage(tmp_path: Path) -> None:
    """A link, a folder, a socket: whatever the system says where they are opened."""
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for names in (["link"], ["folder"], ["socket"], ["file", "inside"], ["link", "inside"]):
            with pytest.raises(LeftOutError):
                open_file(tmp_path, *names)
    storage = Far(tmp_path)
    save(tmp_path, 1)
    state = tmp_path / "step-00000001/state.json"
    state.unlink()
    state.symlink_to("/etc/hostname")
    with pytest.raises(DamagedError):
        checkpoint.load(Location(storage, "step-00000001"), blank(snapshot()))
