"""A rank's last collectives, from torch's flight recorder, when the launcher asks for them.

A rank that hangs sits in a collective and runs no Python of its own; a thread beside it does. Under nccl and gloo alike
the recorder is torch's; where it keeps nothing, nothing is written.
"""

import atexit
import threading
from pathlib import Path

from lockstep.heartbeat import DUMP
from lockstep.torch_compat import flight_recorder

_LOOK_SECONDS = 0.5

_answering: set[Path] = set()


def answer_in_background(folder: Path | None, rank: int) -> None:
    """Leave `flight-RANK.json` in the folder whenever the file `dump` is new, by a thread that the interpreter joins.

    Args:
        folder: the launcher's; None: nobody asks. One thread answers there, however often this is called.
    """
    read = flight_recorder.read
    if folder is None or read is None or folder in _answering:
        return
    _answering.add(folder)
    ends = threading.Event()

    def watch() -> None:
        answered = 0.0
        while not ends.wait(_LOOK_SECONDS) and folder.is_dir():
            asked = _modified(folder / DUMP)
            if asked > answered:
                beside = folder / f".flight-{rank}"
                beside.write_bytes(read())
                beside.rename(folder / f"flight-{rank}.json")
                answered = asked

    thread = threading.Thread(target=watch, name="flight", daemon=True)
    thread.start()

    def end() -> None:
        ends.set()
        thread.join()

    atexit.register(end)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
