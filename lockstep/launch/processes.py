"""What the kernel says of ranks' processes: which of them a signal has stopped, data workers too (Linux)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_DATA_WORKER = "pt_data_worker"  # the name that torch gives them


@dataclass(frozen=True)
class Stopped:
    """A process that a signal has stopped, SIGSTOP for instance.

    Attributes:
        rank: which it is, or whose data worker.
        process: its number.
        is_worker: whether it is a data worker.
    """

    rank: int
    process: int
    is_worker: bool

    def __str__(self) -> str:
        return f"its data worker (process {self.process})" if self.is_worker else "it"


def stopped_processes(pids: Mapping[int, int]) -> list[Stopped]:
    """The ranks that are stopped, and the data workers that are; by rank.

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
    """Whether any thread of the process is stopped: the main one may be in the kernel when the signal comes."""
    return any(_state(path) == "T" for path in Path(f"/proc/{pid}").glob("task/*"))


def is_running(pid: int) -> bool:
    """Whether the process has not ended; one that nobody has waited for yet has."""
    return _state(Path(f"/proc/{pid}")) not in ("", "Z", "X")


def descendants(pid: int) -> Iterator[int]:
    """Children of the process, and theirs."""
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
