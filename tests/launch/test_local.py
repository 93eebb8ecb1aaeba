"""The launcher on one machine, with real processes."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from lockstep.launch import options
from lockstep.launch.options import LaunchOptions, process_count
from tests.launch.conftest import Launch
from tests.launch.shared import (
    Ended,
    alive,
    finish,
    lockstep,
    on_a_terminal,
    says,
    script,
    start,
    wait_for,
)
from tests.ranks import free_port


@pytest.fixture(scope="module")
def went_well(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two ranks that end well, having said what they found around them."""
    folder = tmp_path_factory.mktemp("well")
    script(
        folder,
        """
print("out of rank", RANK)
print("err of rank", RANK, file=sys.stderr)
os.system("echo a subprocess of rank $RANK")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "OMP_NUM_THREADS")
import psutil
ports = [c.laddr.ip for c in psutil.Process(os.getppid()).net_connections("tcp") if c.status == "LISTEN"]
say(arguments=sys.argv[1:], main=__name__, listening=ports, **{name: os.environ.get(name) for name in names})
""",
    )
    return lockstep(
        folder, "launch", "--nproc_per_node", "2", "script.py", "--nproc-per-node=9", "x_y", "--a_b"
    )


def test_ranks_know_their_place(went_well: Ended) -> None:
    assert went_well.code == 0, went_well.err
    for rank in (0, 1):
        said = went_well.said(rank)
        assert said["RANK"] == said["LOCAL_RANK"] == str(rank)
        assert said["WORLD_SIZE"] == said["LOCAL_WORLD_SIZE"] == "2"
        assert said["main"] == "__main__"


def test_variables_of_the_user_reach_the_ranks_as_they_are(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU or NCCL makes of them no CPU shows; the launcher changes and drops none."""
    users = {
        "CUDA_VISIBLE_DEVICES": "3,1",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_LEVEL": "NVL",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    script(tmp_path, f"say(**{{name: os.environ.get(name) for name in {list(users)}}})\n")
    ended = launch("--nproc-per-node", "2", "script.py")
    assert ended.code == 0, ended.err
    assert ended.said(0) == ended.said(1) == users


def test_arguments_after_the_script_are_its_own(went_well: Ended) -> None:
    assert went_well.said(1)["arguments"] == ["--nproc-per-node=9", "x_y", "--a_b"]


def test_trap_32_one_port_for_all_ranks_chosen_by_the_launcher(went_well: Ended) -> None:
    """Rank 0 picks a free port that the others can't know. The launcher picks it, and all ranks are
    told the same.
    """
    assert went_well.said(0)["MASTER_PORT"] == went_well.said(1)["MASTER_PORT"] != "29500"


def test_trap_57_on_one_machine_the_launcher_answers_nobody_from_outside(went_well: Ended) -> None:
    """Whoever reaches the store where ranks meet can run code in them; torchrun's listens on all
    interfaces.
    """
    listening = went_well.said(0)["listening"]
    assert isinstance(listening, list)
    assert set(listening) == {"127.0.0.1"}


def test_every_rank_writes_its_log_and_rank_0_the_console(went_well: Ended) -> None:
    assert "out of rank 0" in went_well.out
    assert "err of rank 0" in went_well.err
    assert "rank 1" not in went_well.out + went_well.err
    for rank in (0, 1):
        for line in (f"out of rank {rank}", f"err of rank {rank}", f"a subprocess of rank {rank}"):
            assert line in went_well.log(rank)


def test_cores_are_shared_out(went_well: Ended) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert went_well.said(0)["OMP_NUM_THREADS"] == str(share)


def test_trap_33_the_number_of_processes_is_said_and_is_never_the_number_of_cores(
    went_well: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--nproc-per-node=auto` without a GPU means the number of cores to torchrun. Here it is one,
    and it is said.
    """
    assert went_well.out.startswith("lockstep: script.py: 2 processes (as asked)\n")
    monkeypatch.setattr(options, "count_gpus", lambda: 0)
    for asked in (None, "auto"):
        number, why = process_count(LaunchOptions(nproc_per_node=asked))
        assert number == 1
        assert "no GPU" in why
    monkeypatch.setattr(options, "count_gpus", lambda: 8)
    assert process_count(LaunchOptions())[0] == 8
    assert process_count(LaunchOptions(), use_gpus=False)[0] == 1
    assert process_count(LaunchOptions(), single_reason="strategy single is one process") == (
        1,
        "strategy single is one process",
    )
    assert (
        process_count(
            LaunchOptions(nproc_per_node="4"), single_reason="strategy single is one process"
        )[0]
        == 4
    )


@pytest.mark.fault(
    "process: one failure, many consequences",
    "a rank raises, and its peers lose their connections",
    "one message, about the first cause",
)
def test_the_first_cause_is_told_once(tmp_path: Path, launch: Launch) -> None:
    """Rank 0's connection to rank 1 is gone, and it says so first: that is not a cause."""
    script(
        tmp_path,
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def inner():
    raise ValueError("the loss is not a number")
if RANK == 1:
    open("gone", "w").close()
    time.sleep(0.05)
    inner()
while not os.path.exists("gone"):
    time.sleep(0.001)
raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:64706")
""",
    )
    ended = launch("--nproc-per-node", "2", "script.py")
    assert ended.code == 1
    assert ended.err.startswith(
        "lockstep: rank 1 of 2 failed: ValueError: the loss is not a number\n"
    ), ended.err
    assert ended.err.count("lockstep:") == 1
    assert re.search(r"where: host .*, script.py:8", ended.err)
    assert "script.py:8 in inner" in ended.err
    assert "Traceback" not in ended.err
    assert "runs/script/logs/rank-1.log" in ended.err
    assert "Traceback" in ended.log(1)
    assert "ChildFailedError" not in ended.err


@pytest.mark.fault(
    "configuration: a mistake that only ranks can see",
    "the mesh does not fit the ranks",
    "one message, exit code 2, no restart",
)
def test_a_users_error_is_one_message_and_2_and_never_restarted(
    tmp_path: Path, launch: Launch
) -> None:
    script(
        tmp_path,
        """
from lockstep.errors import UsageError
open("attempts", "a").write("x")
raise UsageError("the mesh is 3 × 2, but there are 2 ranks", where="distributed", fix="set shard_size: 2")
""",
    )
    ended = launch("--nproc-per-node", "2", "--max-restarts", "3", "script.py")
    assert ended.code == 2
    lines = (tmp_path / "script.py").read_text().splitlines()
    raised_at = next(
        number for number, line in enumerate(lines, 1) if line.startswith("raise UsageError")
    )
    assert (
        ended.err
        == f"lockstep: the mesh is 3 × 2, but there are 2 ranks\n  where: script.py:{raised_at},"
        " distributed\n  do: set shard_size: 2\n"
    )
    assert len((tmp_path / "attempts").read_text()) <= 2


def test_a_killed_rank_is_named_and_ranks_are_started_again(tmp_path: Path, launch: Launch) -> None:
    script(
        tmp_path,
        """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
port = os.environ["MASTER_PORT"]
open(f"port-{attempt}", "w").write(port)
if attempt == 0 and RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    time.sleep(60)
if attempt == 1 and RANK == 0:
    os._exit(7)
if attempt == 1:
    time.sleep(60)
""",
    )
    ended = launch("--nproc-per-node", "2", "--max-restarts", "2", "script.py")
    assert ended.code == 0, ended.err
    assert "rank 1 of 2 failed: killed by SIGKILL" in ended.err
    assert "rank 0 of 2 failed: the program left with code 7" in ended.err
    assert ended.err.count("starting the ranks again") == 2
    ports = [(tmp_path / f"port-{attempt}").read_text() for attempt in range(3)]
    assert len(set(ports)) == 3, (
        "ranks started anew must not read what dead ranks left in the store"
    )
    events = (tmp_path / "runs/script/events.jsonl").read_text()
    assert events.count('"kind": "restart"') == 2


def test_trap_56_preempted_ranks_may_take_their_time_and_the_code_is_75(tmp_path: Path) -> None:
    """torchrun exits 1 though every worker has saved. And rank 1 has saved and left long before
    rank 0 has: rank 0 must not be stopped for that, nor anything restarted.
    """
    script(
        tmp_path,
        """
def stop(*_):
    time.sleep(0.1 if RANK == 1 else 1.5)
    say(saved=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open(f"ready-{RANK}", "w").close()
time.sleep(60)
""",
    )
    process = start(tmp_path, "launch", "--nproc-per-node", "2", "--max-restarts", "3", "script.py")
    wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGTERM)
    ended = finish(process, tmp_path)
    assert ended.code == 75, ended.err
    assert ended.said(0) == ended.said(1) == {"saved": True}
    assert ended.err == ""


def test_ranks_that_ignore_the_signal_end_with_the_second(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
signal.signal(signal.SIGINT, signal.SIG_IGN)
say(pid=os.getpid())
time.sleep(600)
""",
    )
    process = start(tmp_path, "launch", "--nproc-per-node", "2", "script.py")
    wait_for(lambda: all((tmp_path / f"said-{rank}.json").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGINT)
    said = says(process, "\n")
    assert "a second Ctrl-C ends them at once" in said
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    ended = finish(process, tmp_path)
    assert ended.code == 1
    assert ended.err.startswith("lockstep: stopped by SIGINT"), ended.err
    assert not any(alive(int(str(ended.said(rank)["pid"]))) for rank in (0, 1))


def test_trap_56_no_worker_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """torchrun's workers live on when its agent is killed, and hold the GPUs."""
    script(tmp_path, "say(pid=os.getpid())\ntime.sleep(600)\n")
    process = start(tmp_path, "launch", "--nproc-per-node", "2", "script.py")
    said = [tmp_path / f"said-{rank}.json" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() and path.read_text() for path in said))
    workers = [int(json.loads(path.read_text())["pid"]) for path in said]
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in workers))
    finish(process, tmp_path)


@pytest.mark.fault(
    "network: the port is taken",
    "another run is there",
    "one message, exit code 2",
)
def test_a_port_in_use_is_one_message(tmp_path: Path, launch: Launch) -> None:
    script(tmp_path, "")
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        ended = launch("--nproc-per-node", "2", "--master-port", str(port), "script.py")
    assert ended.code == 2
    assert ended.err.startswith(f"lockstep: port {port} is in use on this machine"), ended.err
    assert "Traceback" not in ended.err


def test_one_process_runs_here(tmp_path: Path) -> None:
    """Without a launcher's process in between; its error is told as any other."""
    script(
        tmp_path,
        "say(parent=os.getppid(), world=os.environ['WORLD_SIZE'])\nprint('hello')\nraise"
        " KeyError('x')\n",
    )
    process = start(tmp_path, "launch", "script.py")
    ended = finish(process, tmp_path)
    assert ended.said(0) == {"parent": os.getpid(), "world": "1"}
    assert ended.code == 1
    assert (
        ended.out == "lockstep: script.py: 1 process (no GPU is visible; --nproc-per-node N starts"
        " more)\nhello\n"
    )
    assert ended.err.startswith("lockstep: KeyError: 'x'\n"), ended.err
    assert "hello" in ended.log(0)


def test_rank_0_has_the_terminal(tmp_path: Path) -> None:
    """A live display needs one, and must not fill the log."""
    script(tmp_path, "print('terminal', sys.stdout.isatty(), flush=True)\n")
    shown = on_a_terminal(
        tmp_path, "-m", "lockstep", "launch", "--nproc-per-node", "2", "script.py"
    )
    assert "terminal True" in shown
    assert shown.count("terminal") == 1
    assert "terminal False" in (tmp_path / "runs/script/logs/rank-1.log").read_text()
