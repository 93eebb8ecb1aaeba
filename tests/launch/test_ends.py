"""Processes of ranks end well after a run that is done."""

import subprocess
import sys

import pytest

from tests.launch.shared import environment
from tests.ranks import REPOSITORY


@pytest.mark.full
@pytest.mark.fault(
    "process: a thread of gloo's is still at work when a rank's process ends",
    "on a busy machine it gets a core only when the interpreter is ending, and takes the process"
    " down with it",
    "the end waits for such threads: a run that is done ends with exit code 0",
)
@pytest.mark.parametrize("runs", [1, 6])
def test_trap_72_threads_of_gloo_that_are_late_do_not_abort_the_end(runs: int) -> None:
    """Without the wait one rank in five or so is killed by SIGSEGV or SIGABRT: six runs of two
    hardly miss it, one shows that a run waits and ends.
    """
    command = [sys.executable, "-m", "benchmarks.ends", "--late", "--runs", str(runs), "fsdp"]
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"| fsdp | 2 | {runs} | none |" in ended.stdout
