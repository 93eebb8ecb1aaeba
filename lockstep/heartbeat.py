"""Where each rank is, told to the launcher of its machine at the price of a write to memory.

A rank maps a small file and writes its process, step, phase and the time into it; the launcher reads the files. The
clock is the machine's monotonic one, the same for all of its processes. Nothing here imports torch.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "LOCKSTEP_HEARTBEATS"  # set by the launcher for its ranks
DUMP = "dump"  # a file of this name in the folder asks the ranks for their last collectives
PHASES = ("step", "first", "pause", "done")  # a step; one with nothing to compare it to; an evaluation or a save
_LAYOUT = struct.Struct("<qqqd")  # process, step, phase, seconds


@dataclass(frozen=True)
class Beat:
    """Where a rank was, and when it said so (seconds, monotonic)."""

    rank: int
    process: int
    step: int
    phase: str
    time: float


class Heartbeat:
    """A rank's own. Without a folder (no launcher watches) it does nothing.

    Args:
        folder: the launcher's, or None.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._map: mmap.mmap | None = None
        if folder is None or not folder.is_dir():
            return
        handle = os.open(folder / f"beat-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, _LAYOUT.size)
            self._map = mmap.mmap(handle, _LAYOUT.size)
        finally:
            os.close(handle)

    @classmethod
    def of_this_rank(cls, rank: int) -> "Heartbeat":
        """Into the folder that the launcher names in the environment, if one did."""
        folder = os.environ.get(FOLDER)
        return cls(None if folder is None else Path(folder), rank)

    def beat(self, step: int, phase: str) -> None:
        """Say that `step` (from 1) is under way."""
        if self._map is not None:
            _LAYOUT.pack_into(self._map, 0, os.getpid(), step, PHASES.index(phase), time.monotonic())


def read_beats(folder: Path) -> list[Beat]:
    """All ranks' of this machine that have begun, by rank."""
    found = []
    for path in folder.glob("beat-*"):
        data = path.read_bytes()
        if len(data) == _LAYOUT.size:
            process, step, phase, seconds = _LAYOUT.unpack(data)
            if process and 0 <= phase < len(PHASES):
                found.append(Beat(int(path.name.removeprefix("beat-")), process, step, PHASES[phase], seconds))
    return sorted(found, key=lambda beat: beat.rank)


def forget_beats(folder: Path) -> None:
    """Before ranks are started anew."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
