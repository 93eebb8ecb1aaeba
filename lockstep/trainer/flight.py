"""A rank's last collectives, from torch's flight recorder, when the launcher asks for them.

A rank that hangs sits in a collective and runs no Python of its own; a thread beside it does. Under nccl and gloo alike
the recorder is torch's; where it keeps nothing, nothing is written.
"""

import threading
from pathlib import Path

import torch

from lockstep.heartbeat import DUMP

_LOOK_SECONDS = 0.5


def answer_in_background(folder: Path | None, rank: int) -> None:
    """Leave `flight-RANK.json` in the folder once the file `dump` is there; a daemon thread. None: nobody asks."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if folder is None or dump is None:
        return

    def watch() -> None:
        pause = threading.Event()
        while not (folder / DUMP).exists():
            if not folder.is_dir():
                return  # the launcher is gone
            pause.wait(_LOOK_SECONDS)
        beside = folder / f".flight-{rank}"
        beside.write_bytes(dump())
        beside.rename(folder / f"flight-{rank}.json")

    threading.Thread(target=watch, name="flight", daemon=True).start()
