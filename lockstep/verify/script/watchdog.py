"""Ends a script whose ranks wait for each other, and says where each of them is.

A thread in each rank looks whether the rank computes. When none has used the processor for a while, no collective will
end any more: each rank writes what it has recorded, and where its main thread is.
"""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from lockstep.launch.failures import descendants, is_running, short_path

PATIENCE = 15.0  # seconds for which no rank may compute; longer than a script sleeps on purpose
_POLL = 0.5
_BUSY = 0.05  # share of the processor from which on a rank computes
_GRACE = 3.0  # seconds for the other ranks to write where they are
_NOT_OWN = re.compile(r"<frozen |/lib/python\d|/site-packages/|/lockstep/(verify|launch|torch_compat)/|<string>")


def watch(folder: Path, rank: int, world: int, write: Callable[[], None]) -> None:
    """Watch this process from a thread; `folder` is that of all ranks, and `write` writes what is recorded."""
    main = threading.get_ident()
    threading.Thread(target=_watch, args=(folder, rank, world, write, main), daemon=True).start()


def _watch(folder: Path, rank: int, world: int, write: Callable[[], None], main: int) -> None:
    mark, since, used = folder / f"idle-{rank}", time.monotonic(), time.process_time()
    while True:
        time.sleep(_POLL)
        now = time.process_time()
        if now - used > _BUSY * _POLL or any(map(is_running, descendants(os.getpid()))):
            since = time.monotonic()
            mark.unlink(missing_ok=True)
        elif time.monotonic() - since > PATIENCE:
            mark.touch()
        used = now
        if mark.exists() and all((folder / f"idle-{other}").exists() for other in range(world)):
            break
    mark_hang(folder, rank).write_text(json.dumps(_place(main)))
    write()
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and len(list(folder.glob("hang-*.json"))) < world:
        time.sleep(_POLL / 10)
    os._exit(0)


def _place(thread: int) -> str:
    """Return the innermost line of the user's code, and what it waits in."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    own = [frame for frame in frames if not _NOT_OWN.search(frame.filename)]
    if not own:
        return ""
    return f"{short_path(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}"


def mark_hang(folder: Path, rank: int) -> Path:
    """Return the file that says where a rank hangs."""
    return folder / f"hang-{rank}.json"


def places(folder: Path, ranks: int) -> dict[int, str]:
    """Return where each rank hangs, as written; empty if the ranks did not hang."""
    found = {rank: mark_hang(folder, rank) for rank in range(ranks)}
    return {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
