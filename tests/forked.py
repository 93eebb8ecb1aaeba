"""Runs `lockstep COMMAND` as a fork of a server that has imported torch and Lockstep, for tests that need its process.

Starting Python and importing torch take three seconds of a core. Tests of how a process starts, ends or answers
signals start a fresh one (`tests/launch/shared.py`).
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def lockstep(words: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with these variables and no others.

    Raises:
        AssertionError: it takes more than five minutes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        process = context.Process(target=_run, args=(words, str(folder), dict(environment), str(out), str(err)))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"lockstep {' '.join(words)} still runs after 300 s")
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def _run(words: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    os.environ.clear()  # the server's are those of its start
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = ["lockstep", *words]
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    from lockstep.__main__ import run

    sys.exit(run())
