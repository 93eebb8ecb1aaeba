"""Reads the state of rank processes (stopped by a signal or not; Linux) and the stacks that they write on SIGQUIT."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.failures import short_path

_DATA_WORKER = "pt_data_worker"  # torch's name for them
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_TORCH = re.compile(r"/torch/|<frozen ")
_COLLECTIVE = re.compile(r"/torch/distributed/")
_OURS = re.compile(r"/lockstep/|/torch/|/site-packages/|/lib/python\d|<frozen ")


@dataclass(frozen=True)
class Stopped:
    """A process that a signal such as SIGSTOP has stopped.

    Attributes:
        rank: the rank, or the rank that owns the data worker.
        process: the process id.
        is_worker: whether it is a data worker.
    """

    rank: int
    process: int
    is_worker: bool

    def __str__(self) -> str:
        return f"its data worker (process {self.process})" if self.is_worker else "it"


def stopped_processes(pids: Mapping[int, int]) -> list[Stopped]:
    """Return the stopped ranks and data workers, by rank.

    Args:
        pids: rank → process.
    """
    found = []
    for rank, pid in sorted(pids.items()):
        if is_stopped(pid):
            found.append(Stopped(rank, pid, is_worker=False))
        found += [
            Stopped(rank, child, is_worker=True)
            for child in descendants(pid)
            if is_stopped(child) and _name(child) == _DATA_WORKER
        ]
    return found


def is_stopped(pid: int) -> bool:
    """Return whether any thread of the process is stopped: the main one may be in the kernel when the signal comes."""
    return any(_state(path) == "T" for path in Path(f"/proc/{pid}").glob("task/*"))


def is_running(pid: int) -> bool:
    """Return whether the process has not ended; a zombie has ended."""
    return _state(Path(f"/proc/{pid}")) not in ("", "Z", "X")


def descendants(pid: int) -> Iterator[int]:
    """Yield the children of the process, and their children."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue  # the thread has ended
        for child in map(int, children):
            yield child
            yield from descendants(child)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stacks_file(logs: Path, rank: int) -> Path:
    """Return the file for a rank's stacks."""
    return logs / f"rank-{rank}.stacks.txt"


@dataclass(frozen=True)
class Stack:
    """Frames of a rank's main thread, innermost first: (file, line, function)."""

    frames: tuple[tuple[str, int, str], ...] = ()

    @property
    def place(self) -> str | None:
        """The innermost frame of the user's code if there is one, else the innermost of all."""
        if not self.frames:
            return None
        own = next((frame for frame in self.frames if not _OURS.search(frame[0])), self.frames[0])
        return f"{short_path(own[0])}:{own[1]} in {own[2]}"

    @property
    def in_torch(self) -> bool:
        """Whether the innermost frame is in torch."""
        return bool(self.frames) and bool(_TORCH.search(self.frames[0][0]))

    @property
    def in_collective(self) -> bool:
        """Whether the user's own code waits in a collective."""
        for file, _, _ in self.frames:
            if _COLLECTIVE.search(file):
                return True
            if not _OURS.search(file):
                return False
        return False


def newest_stack(logs: Path, rank: int) -> Stack:
    """Return the newest stack that the rank wrote; empty if there is none."""
    try:
        text = stacks_file(logs, rank).read_text(errors="replace")
    except OSError:
        return Stack()
    blocks = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)
    return Stack(tuple((m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(blocks[-1])))
