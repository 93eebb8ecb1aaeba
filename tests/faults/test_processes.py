"""Processes that die, stop, leave early or are told to go, with real ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.failures.failure import Failure
from lockstep.launch.agent import CrashLoop
from lockstep.run_directory.records import RunDirectory
from tests.faults.tiny import YAML, events, steps
from tests.forked import Forked
from tests.launch.conftest import Launch, launch  # noqa: F401
from tests.launch.shared import Ended, alive, environment, finish, says, script, start, wait_for

TWO = ("train", "tiny.yaml", "--nproc-per-node", "2", "--output-dir", "run")
LONG = "training.max_steps=100000"  # so that no run ends before the test has done what it does
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def begin(
    folder: Path, *options: str, checkpoint: int = 5
) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """Start a run of two ranks in `folder`, wait for a checkpoint, and say which process is which
    rank.
    """
    (folder / "tiny.yaml").write_text(YAML)
    process = start(folder, *TWO, LONG, *options, **ONE_THREAD)
    wait_for(
        lambda: (
            process.poll() is not None
            or (folder / f"run/checkpoints/step-{checkpoint:08}").exists()
        )
    )
    assert process.poll() is None, process.communicate()
    return process, ranks_of(folder)


def ranks_of(folder: Path) -> dict[int, int]:
    """Rank → process, of the newest start."""
    return {rank["rank"]: rank["process"] for rank in events(folder / "run", "start")[-1]["ranks"]}


@pytest.fixture(scope="module")
def stopped_rank(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Rank 1 is stopped in the middle of a step; later, of the new ranks, rank 0 is killed; then
    both are preempted.
    """
    folder = tmp_path_factory.mktemp("hang")
    process, ranks = begin(folder, "--max-restarts", "2")
    os.kill(ranks[1], signal.SIGSTOP)
    wait_for(lambda: len(events(folder / "run", "start")) == 2)
    wait_for(lambda: len(events(folder / "run", "save")) > 3)
    os.kill(ranks_of(folder)[0], signal.SIGKILL)
    wait_for(lambda: len(events(folder / "run", "start")) == 3)
    before = len(events(folder / "run", "save"))
    wait_for(lambda: len(events(folder / "run", "save")) > before or process.poll() is not None)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    return finish(process, folder)


@pytest.mark.fault(
    "hang: a rank is stopped (SIGSTOP)",
    "no step ends; the others wait for it in a collective",
    "after `hang.factor` × the usual step, at least `hang.seconds`, every rank's stacks and last"
    " collectives go to logs/; the launcher says which rank is behind, in which step, at which"
    " line, and starts the ranks again",
)
def test_a_stopped_rank_is_named_and_restarted(stopped_rank: Ended) -> None:
    """Either watch may be first on a busy machine: that of steps, or that of stopped processes."""
    said = stopped_rank.err
    found = (
        r"rank 1 of 2 failed: it hangs in step \d+: (no step for \d+ s|a signal stopped it \d+ s"
        r" ago)"
    )
    assert re.search(found, said), said
    assert "it was stopped by a signal (SIGSTOP)" in said
    assert re.search(r"where: host \S+, \S+\.py:\d+ in \S+", said)
    logs = stopped_rank.folder / "run/logs"
    for rank in (0, 1):
        assert "most recent call first" in (logs / f"rank-{rank}.stacks.txt").read_text()
        assert "gloo:all_reduce" in (logs / f"rank-{rank}.flight.json").read_text()


@pytest.mark.fault(
    "process: a rank is killed (SIGKILL)",
    "as the system does when memory runs out; its peers lose their connections",
    "the launcher names the rank, starts all ranks again (`--max-restarts`), and they go on from"
    " the newest good checkpoint; metrics.jsonl holds each step once",
)
def test_a_killed_rank(stopped_rank: Ended) -> None:
    assert "rank 0 of 2 failed: killed by SIGKILL" in stopped_rank.err
    assert len(events(stopped_rank.folder / "run", "restart")) == 2
    assert len(events(stopped_rank.folder / "run", "resume")) == 2
    recorded = steps(stopped_rank.folder / "run")
    assert recorded == sorted(set(recorded)), "each step once"


@pytest.mark.fault(
    "process: preempted (SIGTERM, or SIGUSR1 ahead of it)",
    "a scheduler warns the launcher, or ends the job",
    "the ranks agree on a step, save there once, and end; the exit code is 75",
)
@pytest.mark.fault(
    "process: a second signal",
    "SIGTERM and SIGUSR1 come while the ranks save",
    "nothing more happens: one save, exit code 75",
)
def test_trap_55_a_signal_saves_once_at_a_step_that_all_agree_on(stopped_rank: Ended) -> None:
    """Saving inside of the handler meets ranks in different steps. It sets a flag; the step's
    traffic carries it.
    """
    assert stopped_rank.code == 75, stopped_rank.err
    run = RunDirectory(stopped_rank.folder / "run")
    *_, last = run.read_events()
    assert (last["kind"], last["reason"]) == ("stop", "preempted")
    assert (run.checkpoints / f"step-{last['step']:08}").is_dir()
    saves = [event["step"] for event in events(run.path, "save")]
    assert saves.count(last["step"]) == 1


@pytest.mark.fault(
    "process: Ctrl-C",
    "SIGINT, to the launcher or, from a terminal, to a run without one and to its data workers",
    "the ranks save once, at one step, and end; the exit code is 75. A second Ctrl-C ends them at"
    " once, without saving: exit code 1",
)
def test_ctrl_c_saves_once_and_a_second_ends_at_once(tmp_path: Path) -> None:
    process, ranks = begin(tmp_path)
    process.send_signal(signal.SIGINT)
    ended = finish(process, tmp_path)
    assert ended.code == 75, ended.err
    assert "interrupted" in ended.err
    assert "Traceback" not in ended.err + ended.out
    assert not any(alive(pid) for pid in ranks.values())
    *_, last = RunDirectory(tmp_path / "run").read_events()
    assert (last["kind"], last["reason"]) == ("stop", "preempted")
    assert [event["step"] for event in events(tmp_path / "run", "save")].count(last["step"]) == 1
    for times, code in ((1, 75), (2, 1)):
        alone = Forked(
            [
                sys.executable,
                "-m",
                "lockstep",
                "train",
                "tiny.yaml",
                "data.num_workers=1",
                "data.args.seconds=0.3",
                "training.max_steps=4000",
                "--output-dir",
                f"alone-{times}",
            ],
            cwd=tmp_path,
            env=environment(**ONE_THREAD),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wait_for(lambda folder=f"alone-{times}": len(steps(tmp_path / folder)) > 1)  # type: ignore[misc]
        workers = _children(alone.pid)
        assert workers
        # as a terminal does: to all processes of the command
        os.killpg(alone.pid, signal.SIGINT)
        said = says(alone, "a second Ctrl-C ends it at once")
        if times == 2:
            os.killpg(alone.pid, signal.SIGINT)
        ended = finish(alone, tmp_path)
        assert ended.code == code, ended.err
        assert "a second Ctrl-C" not in ended.err, said + ended.err
        saved = events(tmp_path / f"alone-{times}", "save")
        assert [event["step"] for event in saved] == [steps(tmp_path / f"alone-{times}")[-1]] * (
            times == 1
        )
        wait_for(lambda left=workers: not any(alive(pid) for pid in left))  # type: ignore[misc]


_LOADING = """
import os, time
from tests.faults.tiny import Points

if "RANK" in os.environ:  # the launcher looks at the names of a config, too
    open(f"loads-{os.environ['RANK']}", "w").close()
    time.sleep(600)
"""


@pytest.mark.fault(
    "process: preempted before the first step",
    "SIGTERM comes while the ranks load their libraries or wait for one another",
    "they leave at once; the exit code is 75: nothing was begun, nothing is lost",
)
@pytest.mark.fault(
    "process: the launcher is killed (SIGKILL)",
    "nobody is left to end the ranks",
    "the kernel ends them with it; their data workers, which look for them every 5 s, end then",
)
def test_a_killed_launcher_and_an_early_signal(tmp_path: Path) -> None:
    """Two runs in one test, for the time that a start takes."""
    process, ranks = begin(tmp_path, "data.num_workers=1")
    workers = [int(p) for pid in ranks.values() for p in _children(pid)]
    assert len(workers) >= 2
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)  # they can't look for it: the kernel alone ends them
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in [*ranks.values(), *workers]))
    (tmp_path / "loading.py").write_text(_LOADING)
    early = start(tmp_path, *TWO, "--resume", "auto", "data.name=loading:Points", **ONE_THREAD)
    wait_for(lambda: all((tmp_path / f"loads-{rank}").exists() for rank in (0, 1)))
    early.send_signal(signal.SIGTERM)
    ended = finish(early, tmp_path)
    assert ended.code == 75, ended.err + ended.out
    assert ended.err.count("lockstep: stopped by SIGTERM before the training began\n") == 1, (
        ended.err
    )


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.mark.fault(
    "process: a rank ends with code 0 too early",
    "`os._exit(0)` in a library; its peers wait, or go on without it",
    "the job fails with exit code 1 and names the rank: code 0 counts only from a rank whose work"
    " is done",
)
def test_leaving_early_with_0_is_a_failure(tmp_path: Path, launch: Launch) -> None:  # noqa: F811
    script(tmp_path, "if RANK == 1:\n    os._exit(0)\ntime.sleep(3 if RANK == 0 else 0)\n")
    ended = launch("--nproc-per-node", "2", "script.py")
    assert ended.code == 1
    assert "rank 1 of 2 failed: the program ended with code 0 before its work was done" in ended.err


def test_a_script_may_end_itself_with_0(tmp_path: Path, launch: Launch) -> None:  # noqa: F811
    script(tmp_path, "sys.exit(0) if RANK else sys.exit()\n")
    assert launch("--nproc-per-node", "2", "script.py").code == 0


@pytest.mark.fault(
    "process: two ranks are killed at once",
    "the launcher ends the third, and its data workers die of that (SIGTERM)",
    "the message is about a rank that was killed, not about what the launcher did afterwards",
)
def test_the_first_cause_is_told_and_not_what_followed(tmp_path: Path, launch: Launch) -> None:  # noqa: F811
    script(
        tmp_path,
        "def ended(*_):\n"
        "    raise RuntimeError('DataLoader worker (pid 123) is killed by signal: Terminated. ')\n"
        "signal.signal(signal.SIGTERM, ended)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if RANK < 2 else time.sleep(60)\n",
    )
    ended = launch("--nproc-per-node", "3", "script.py")
    assert ended.code == 1
    assert re.search(r"rank [01] of 3 failed: killed by SIGKILL", ended.err), ended.err
    assert "Terminated" not in ended.err


@pytest.mark.fault(
    "process: the same failure again and again",
    "each start fails alike, and no checkpoint is made in between",
    "after the third time the launcher stops, whatever `--max-restarts` allows, and says what"
    " it saw",
)
def test_a_crash_loop_ends_early(tmp_path: Path, launch: Launch) -> None:  # noqa: F811
    script(
        tmp_path,
        "open('attempts', 'a').write('x')\nraise ValueError(f'no file data-{time.time()}')\n",
    )
    ended = launch("--nproc-per-node", "1", "--max-restarts", "20", "script.py")
    assert ended.code == 1
    assert len((tmp_path / "attempts").read_text()) == 3
    assert "3 times in order, with no checkpoint after step 0 in between" in ended.err
    assert "ValueError: no file data-" in ended.err


def test_progress_is_no_crash_loop(tmp_path: Path) -> None:
    loop = CrashLoop(tmp_path)
    failure = Failure(0, 1, "signal", "killed by SIGKILL")
    for step in range(6):
        (tmp_path / f"step-{step:08}").mkdir()
        loop.check(failure)


def test_progress_in_another_storage_is_no_crash_loop(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    loop = CrashLoop(run.checkpoints)
    failure = Failure(0, 1, "signal", "killed by SIGKILL")
    for step in range(6):
        run.append_event("save", step=step)
        loop.check(failure)


@pytest.mark.fault(
    "process: a rank raises",
    "an exception in the user's code",
    "one message with rank, host, file and line, the traceback in the rank's log; the ranks are"
    " started again",
)
def test_a_rank_that_raises_once(tmp_path: Path, launch: Launch) -> None:  # noqa: F811
    script(
        tmp_path,
        "if RANK == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise"
        " KeyError('vocab')\n",
    )
    ended = launch("--nproc-per-node", "2", "--max-restarts", "1", "script.py")
    assert ended.code == 0
    assert "rank 1 of 2 failed: KeyError: 'vocab'" in ended.err
    assert "script.py:" in ended.err
    assert json.loads((tmp_path / "runs/script/events.jsonl").read_text())["kind"] == "restart"
