"""Answers the launcher, which asks the ranks of a run that hangs for their last collectives."""

from contextlib import suppress
from pathlib import Path

from lockstep.heartbeat.files import DUMP
from lockstep.store_threads import StoreThread
from lockstep.torch_compat import flight_recorder

_LOOK_SECONDS = 0.5
_answering: dict[Path, StoreThread] = {}  # this rank's folder, and the thread that looks into it


def dump_collectives_on_request(folder: Path | None, rank: int) -> None:
    """Write the last collectives to `flight-RANK.json` when the launcher asks for them.

    It asks by a new file `dump` in its folder, where `flight-RANK.json` is written. A rank that
    goes on as another one, after deaths, has another folder, and answers there alone.

    A rank that hangs waits in a collective and runs no Python; a thread beside it does.
    """
    read = flight_recorder.read
    if folder is None or read is None or folder in _answering:
        return
    for thread in _answering.values():
        thread.closing.set()
    _answering.clear()

    def watch(thread: StoreThread) -> None:
        answered = 0.0
        while not thread.closing.wait(_LOOK_SECONDS) and folder.is_dir():
            asked = 0.0
            with suppress(OSError):
                asked = (folder / DUMP).stat().st_mtime
            if asked > answered:
                beside = folder / f".flight-{rank}"
                beside.write_bytes(read())
                beside.rename(folder / f"flight-{rank}.json")
                answered = asked

    _answering[folder] = StoreThread(watch, "flight")
