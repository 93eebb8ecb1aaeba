"""Scripts under the launcher, as their users would start them."""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.forked import Forked
from tests.ranks import REPOSITORY

CLEAN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


# seconds for what comes soon on an idle machine, and must not fail a test on a busy one
PATIENCE = 200.0


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    folder: Path

    def log(self, rank: int) -> str:
        return (self.folder / f"runs/script/logs/rank-{rank}.log").read_text()

    def said(self, rank: int) -> dict[str, object]:
        """What the rank left in `said-RANK.json`."""
        found: dict[str, object] = json.loads((self.folder / f"said-{rank}.json").read_text())
        return found


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a launcher sets."""
    kept = {name: value for name, value in os.environ.items() if name not in CLEAN}
    # No part is empty: Python takes that for the working directory, and does not start where that
    # is gone.
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | more


def start(folder: Path, *command: str, fresh: bool = False, **more: str) -> subprocess.Popen[str]:
    """Start `python -m lockstep COMMAND` in `folder`, as a fork (`tests.forked`) unless it is to be
    a fresh process.
    """
    return (subprocess.Popen if fresh else Forked)(
        [sys.executable, "-m", "lockstep", *command],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_a_terminal(folder: Path, *arguments: str, columns: int = 0, **more: str) -> str:
    """What `python ARGUMENTS` writes to a terminal of so many columns (0: it does not say); it must
    end well.
    """
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    start_process = Forked if arguments[0] == "-m" else subprocess.Popen
    process = start_process(
        [sys.executable, *arguments],
        cwd=folder,
        # else they stand for the terminal's own size
        env=environment(**{"COLUMNS": "", "LINES": "", **more}),
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    shown = b""
    try:
        while chunk := os.read(primary, 4096):
            shown += chunk
    except OSError:  # the terminal's other side is closed
        pass
    os.close(primary)
    assert process.wait(PATIENCE) == 0, shown
    return shown.decode()


def finish(process: subprocess.Popen[str], folder: Path, timeout: float = 300) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Ended(process.returncode, out, err, folder)


def lockstep(folder: Path, *command: str, **more: str) -> Ended:
    return finish(start(folder, *command, **more), folder)


def script(folder: Path, text: str) -> None:
    """Write `script.py`. Without an import of torch its ranks start in a tenth of a second."""
    helper = "import json, os, signal, sys, time\nRANK = int(os.environ['RANK'])\n"
    say = "def say(**what):\n    open(f'said-{RANK}.json', 'w').write(json.dumps(what))\n"
    (folder / "script.py").write_text(helper + say + text)


def says(process: subprocess.Popen[str], text: str) -> str:
    """What the process writes to stderr, to the end of this text; `finish` has what follows."""
    assert process.stderr is not None
    descriptor = process.stderr.fileno()
    said = b""
    while text.encode() not in said:
        ready, _, _ = select.select([descriptor], [], [], PATIENCE)
        byte = os.read(descriptor, 1) if ready else b""
        assert byte, f"it does not say {text!r}, but {said.decode()!r}"
        said += byte
    return said.decode()


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
