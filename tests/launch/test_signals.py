"""Signals from the first instruction to the last: no traceback, no hang, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.machine import scratch
from tests.launch.shared import Ended, environment, finish, script, start, wait_for
from tests.ranks import REPOSITORY, free_port

_SOON = 60.0  # on a busy machine; what is waited for here would take many minutes


def listens(pid: int) -> bool:
    """Whether the process catches SIGTERM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def told(
    process: "subprocess.Popen[str]", folder: Path, number: signal.Signals
) -> tuple[Ended, float]:
    since = time.monotonic()
    process.send_signal(number)
    return finish(process, folder), time.monotonic() - since


@pytest.mark.fault(
    "process: a signal at any moment of a start",
    "SIGTERM or Ctrl-C comes while the launcher loads its libraries, a machine waits for the"
    " others, or a rank waits for its peers inside of the library",
    "all end within seconds with exit code 75 and one line; the next start finds no temporary"
    " files",
)
def test_signals_while_a_run_starts(tmp_path: Path) -> None:
    script(tmp_path, "time.sleep(600)\n")
    (tmp_path / "tiny.yaml").write_text(
        "model: {name: 'tests.faults.tiny:Net'}\ndata: {name: 'tests.faults.tiny:Points'}\n"
        "training: {max_steps: 5, batch_size: 4}\ndistributed: {device: cpu}\n"
    )
    (tmp_path / "tmp").mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    port = str(free_port())
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    # rank 1 never comes
    rank = start(tmp_path, "train", "tiny.yaml", **own, **alone, MASTER_PORT=port)
    waiting = start(
        tmp_path,
        "launch",
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "script.py",
        **own,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        early = start(tmp_path, "launch", "--nproc-per-node", "2", "script.py", fresh=True, **own)
        wait_for(lambda pid=early.pid: listens(pid))  # type: ignore[misc]
        ended, seconds = told(early, tmp_path, number)
        assert ended.code == 75
        assert ended.err == f"lockstep: stopped by {number.name} before anything was started\n"
        assert seconds < _SOON
    os.set_blocking(waiting.stderr.fileno(), True)  # type: ignore[union-attr]
    line = waiting.stderr.readline()  # type: ignore[union-attr]
    while "waiting for machine 1" not in line:
        line = waiting.stderr.readline()  # type: ignore[union-attr]
    ended, seconds = told(waiting, tmp_path, signal.SIGTERM)
    assert (ended.code, seconds < _SOON) == (75, True), ended.err
    assert "lockstep: stopped by SIGTERM before ranks were started\n" in ended.err
    wait_for(lambda: f":{int(port):04X} " in Path("/proc/net/tcp").read_text())
    time.sleep(0.5)
    ended, seconds = told(rank, tmp_path, signal.SIGINT)
    assert (ended.code, seconds < _SOON) == (75, True), ended.err
    assert "lockstep: stopped by SIGINT before the training began\n" in ended.err
    assert "Traceback" not in ended.err
    assert list((tmp_path / "tmp").glob("lockstep-*")) == []


_LEAVES = """
import os, signal, sys, time
from lockstep.machine import signals
sys.setswitchinterval(100)  # the thread that reads signals gets its turn when the main thread waits
signals.listen(lambda number: os._exit(7))
os.kill(os.getpid(), signal.SIGTERM)
signals.leave_to_script()
time.sleep(1)
"""


@pytest.mark.fault(
    "process: a rank fails while another one starts",
    "the other is asked to end (SIGTERM) just before its script begins",
    "it ends at once, and not after the 30 s that ranks have to save",
)
def test_a_signal_just_before_the_script_begins_is_not_lost() -> None:
    """A rank that was asked to end as it started ran its script instead, for the 30 s that it had
    to end.
    """
    assert subprocess.run([sys.executable, "-c", _LEAVES], timeout=60).returncode == 7


@pytest.mark.fault(
    "process: the terminal of a run under nohup is closed",
    "SIGHUP comes to the launcher and to its ranks, which nohup started with it ignored",
    "nothing: the run goes on; without nohup it is saved and stops with exit code 75",
)
def test_a_run_under_nohup_does_not_hear_that_its_terminal_is_closed(tmp_path: Path) -> None:
    script(tmp_path, "open('ready', 'w')\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n")
    command = [
        "nohup",
        sys.executable,
        "-m",
        "lockstep",
        "launch",
        "--nproc-per-node",
        "1",
        "script.py",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for((tmp_path / "ready").exists)
    for member in [
        process.pid,
        *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
    ]:
        os.kill(member, signal.SIGHUP)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    ended = finish(process, tmp_path)
    assert ended.code == 0, ended.err


def test_what_a_killed_process_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    program = (
        "from lockstep.machine import scratch\n"
        "print(scratch.scratch_folder('launch'), flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=environment(TMPDIR=str(tmp_path)),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    own = scratch.scratch_folder("launch")
    assert theirs.is_dir(), "its owner is alive"
    process.kill()
    process.communicate()
    os.utime(f"{theirs}.owner", (0, 0))
    mark = tmp_path / f"lockstep-failed-{os.getuid()}-{process.pid}-17-0"
    mark.touch()
    scratch.sweep()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [own.name, f"{own.name}.owner"]
    scratch.remove(own)
    assert list(tmp_path.iterdir()) == []
