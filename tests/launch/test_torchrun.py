"""`lockstep launch` as torchrun: each of its options works, or is refused with why."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from lockstep.cli import main
from lockstep.errors import UsageError
from lockstep.launch import train
from lockstep.launch.options import LaunchOptions, process_count
from lockstep.run_directory.rank_output import ConsoleOutput
from tests.launch.conftest import Launch
from tests.launch.shared import finish, script, start, wait_for
from tests.ranks import free_port

# Option of torchrun → arguments that work, or a text of the refusal.
TABLE: dict[str, list[str] | str] = {
    "--nnodes": ["--nnodes", "1"],
    "--nproc-per-node": ["--nproc-per-node", "2"],
    "--rdzv-backend": ["--rdzv-backend", "c10d"],
    "--rdzv-endpoint": ["--rdzv-endpoint", "localhost:29400"],
    "--rdzv-id": ["--rdzv-id", "job"],
    "--rdzv-conf": ["--rdzv-conf", "timeout=60"],
    "--standalone": ["--standalone"],
    "--max-restarts": ["--max-restarts", "3"],
    "--monitor-interval": ["--monitor-interval", "0.5"],
    "--start-method": "a script always runs in a fresh process",
    "--event-log-handler": "calls no handlers",
    "--role": ["--role", "trainer"],
    "--module": ["--module"],
    "--no-python": ["--no-python"],
    "--run-path": ["--run-path"],
    "--log-dir": ["--log-dir", "logs"],
    "--redirects": ["-r", "3"],
    "--tee": ["-t", "0:1,1:2"],
    "--local-ranks-filter": ["--local-ranks-filter", "0,1"],
    "--duplicate-stdout-filters": "grep WORD",
    "--duplicate-stderr-filters": "grep WORD",
    "--log-line-prefix-template": "rank-N.log",
    "--print-completion": "lockstep completion bash",
    "--node-rank": ["--node-rank", "0"],
    "--master-addr": ["--master-addr", "127.0.0.1"],
    "--master-port": ["--master-port", "0"],
    "--local-addr": ["--local-addr", "127.0.0.1"],
    "--logs-specs": "--log-dir, --tee and --redirects",
    "--numa-binding": "bound to its share of the cores",
    "--signals-to-handle": "are always forwarded to the ranks",
    "--shutdown-timeout": ["--shutdown-timeout", "5"],
    "--virtual-local-rank": "LOCAL_RANK would be 0 on every rank",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `lockstep launch` would start."""
    found: dict[str, Any] = {}

    def instead(script: str, arguments: list[str], options: LaunchOptions, **more: Any) -> int:
        found.update(script=script, arguments=arguments, options=options, **more)
        return 0

    monkeypatch.setattr(train, "launch_script", instead)
    return found


def long_options() -> list[str]:
    """torchrun's options, as the installed torch has them."""
    actions = [
        action
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    ]
    return [
        max(action.option_strings, key=lambda name: (len(name), "-" in name[2:]))
        for action in actions
    ]


def test_the_table_is_that_of_the_installed_torch() -> None:
    assert {name.replace("_", "-") for name in long_options()} <= TABLE.keys()


@pytest.mark.parametrize("option", TABLE)
def test_each_option_of_torchrun_works_or_says_why_not(
    option: str, launched: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    entry = TABLE[option]
    if isinstance(entry, list):
        for spelling in (entry, [entry[0].replace("-", "_").replace("__", "--", 1), *entry[1:]]):
            launched.clear()
            assert (
                main(
                    [
                        "launch",
                        *(spelling if spelling[0][1] in "-_" else entry),
                        "script.py",
                        "--tee",
                    ]
                )
                == 0
            )
            assert launched["arguments"] == ["--tee"], "what follows the script is its own"
        return
    value = [] if option == "--virtual-local-rank" else ["value"]
    assert main(["launch", option, *value, "script.py"]) == 2
    said = capsys.readouterr().err
    assert f"lockstep: there is no argument {option}" in said
    assert entry in said


def test_variables_stand_for_options(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PET_* is how job operators speak to torchrun; the command line is stronger."""
    for name, value in {
        "NPROC_PER_NODE": "3",
        "MAX_RESTARTS": "2",
        "NO_PYTHON": "1",
        "TEE": "3",
    }.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert main(["launch", "--max-restarts", "5", "./program"]) == 0
    assert launched["options"].nproc_per_node == "3"
    assert launched["options"].max_restarts == 5
    assert launched["kind"] == "program"
    assert launched["output"] == ConsoleOutput(tee="3")


def test_one_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_count(LaunchOptions(nproc_per_node="cpu"))[0] == len(os.sched_getaffinity(0))
    with pytest.raises(UsageError, match="all is not a number"):
        LaunchOptions(nproc_per_node="all").check()
    with pytest.raises(UsageError, match="the others would not know it"):
        LaunchOptions(nnodes="2", master_addr="h", node_rank=0, master_port=0).check()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (ConsoleOutput(), [(True, True), (False, False)]),
        (ConsoleOutput(tee="3"), [(True, True), (True, True)]),
        (ConsoleOutput(tee="1:1"), [(True, True), (True, False)]),
        (ConsoleOutput(redirects="3"), [(False, False), (False, False)]),
        (ConsoleOutput(tee="3", redirects="0:1"), [(False, True), (True, True)]),
        (ConsoleOutput(only="1"), [(False, False), (True, True)]),
    ],
)
def test_which_output_the_console_shows(
    shown: ConsoleOutput, expected: list[tuple[bool, bool]]
) -> None:
    assert [shown.streams(rank, is_main=rank == 0) for rank in (0, 1)] == expected


@pytest.mark.parametrize(
    "wrong", [ConsoleOutput(tee="5"), ConsoleOutput(redirects="0:x"), ConsoleOutput(only="a")]
)
def test_what_can_not_be_read_is_refused(wrong: ConsoleOutput) -> None:
    with pytest.raises(UsageError):
        wrong.check()


def test_options_reach_the_ranks(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(
        tmp_path,
        """
names = ("ROLE_NAME", "ROLE_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
say(file=__file__, **{name: os.environ[name] for name in names})
os.chdir("/")
import subprocess
print("out", RANK)
print("err", RANK, file=sys.stderr, flush=True)
subprocess.run(f"echo child {RANK}; echo child err {RANK} >&2", shell=True)
assert os.path.exists(__file__)
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("recorded") if RANK else SystemExit(0)
main()
""",
    )
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    options = (
        "--role",
        "trainer",
        "--log-dir",
        "lg",
        "--tee",
        "1:1",
        "--redirects",
        "0:2",
        "--master-port",
        "0",
    )
    ended = launch(*options, "script.py")
    assert ended.code == 1
    assert "rank 1 of 2 failed: ValueError: recorded" in ended.err
    said = [ended.said(rank) for rank in (0, 1)]
    assert [(s["ROLE_NAME"], s["ROLE_RANK"], s["file"]) for s in said] == [
        ("trainer", str(rank), str(tmp_path / "script.py")) for rank in (0, 1)
    ]
    assert len(str(said[0]["TORCHELASTIC_RUN_ID"])) == 32
    assert said[0]["TORCHELASTIC_RUN_ID"] == said[1]["TORCHELASTIC_RUN_ID"]
    wait_for(lambda: "child err 1" in (tmp_path / "lg/rank-1.log").read_text())
    for line in ("out 0", "child 0", "out 1", "child 1"):
        assert line in ended.out, ended.out
    assert "err 0" not in ended.err
    assert "err 1" not in ended.err
    for rank in (0, 1):
        log = (tmp_path / f"lg/rank-{rank}.log").read_text()
        assert all(f"{what} {rank}" in log for what in ("out", "err", "child", "child err"))
    error = json.loads((tmp_path / "lg/rank-1.error.json").read_text())
    assert "recorded" in str(error["message"])


def test_a_program_of_any_kind(tmp_path: Path, launch: Launch) -> None:
    program = tmp_path / "program"
    program.write_text(
        '#!/bin/sh\necho "program $RANK of $WORLD_SIZE: $1"\ntouch said-$RANK\n'
        # rank 1's failure ends rank 0, which may start late
        "until [ -e said-0 ]; do sleep 0.1; done\nexit $RANK\n"
    )
    assert launch("--nproc-per-node", "2", "--no-python", "./program", "--word").code == 2, (
        "not executable"
    )
    program.chmod(0o755)
    ended = launch("--nproc-per-node", "2", "--no-python", "./program", "--word")
    assert "program 0 of 2: --word" in ended.out
    assert "program 1 of 2: --word" in (tmp_path / "runs/program/logs/rank-1.log").read_text()
    assert ended.code == 1
    assert "rank 1 of 2 failed: the program left with code 1" in ended.err


@pytest.mark.parametrize("ranks", ["2", None])
def test_a_script_that_handles_the_signal_and_ends_with_0_is_not_done(
    tmp_path: Path, ranks: str | None
) -> None:
    """Its scheduler would take the job for finished."""
    script(
        tmp_path,
        """
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
say(ready=True)
while not stop:
    time.sleep(0.01)
""",
    )
    process = start(
        tmp_path, "launch", *(("--nproc-per-node", ranks) if ranks else ()), "script.py"
    )
    wait_for(
        lambda: all((tmp_path / f"said-{rank}.json").exists() for rank in range(int(ranks or 1)))
    )
    process.send_signal(signal.SIGTERM)
    ended = finish(process, tmp_path)
    assert ended.code == 75, ended.err


@pytest.mark.full
def test_one_machine_of_one_to_two_is_enough(tmp_path: Path, launch: Launch) -> None:
    """The time for the last call was longer than that for the meeting, which then failed with
    enough machines.
    """
    script(tmp_path, "say(world=os.environ['WORLD_SIZE'])\n")
    endpoint = f"127.0.0.1:{free_port()}"

    def meets(nnodes: str, seconds: int) -> bool:  # fewer than the 30 of torch's last call
        conf = ("--rdzv-endpoint", endpoint, "--rdzv-conf", f"timeout={seconds}")
        return launch("--nnodes", nnodes, "--nproc-per-node", "1", *conf, "script.py").code == 0

    assert meets("1:2", 25)  # a busy machine takes some of them
    assert not meets("2:3", 6)
