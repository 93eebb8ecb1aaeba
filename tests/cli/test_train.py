"""`lockstep train` with real ranks: started by Lockstep, by torchrun, or not at all."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.run_directory.records import RunDirectory
from tests.faults.tiny import hold
from tests.forked import TORCHRUN, Forked
from tests.launch.shared import Ended, environment, finish, start, wait_for

_DATA = """
import os, time, torch
from pathlib import Path
from torch.utils.data import Dataset
from tests.faults.tiny import wait_while_held

class Tokens(Dataset):
    deterministic = True
    def __len__(self): return 64
    def __getitem__(self, index):
        if index == 5 and os.path.exists("broken"):
            raise ValueError("sample 5 can't be read")
        time.sleep(0.0 if os.path.exists("hurry") else 0.03)
        wait_while_held(Path("runs/small"))
        ids = torch.arange(index, index + 9) % 17
        return {"input_ids": ids[:-1], "targets": ids[1:]}
"""
_CONFIG = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 17, block_size: 8}}
data: {name: "mydata:Tokens"}
training: {max_steps: 40, batch_size: 2, global_batch_size: 8}
distributed: {strategy: auto, device: cpu}
checkpoint: {save_steps: 5}
monitor: {log_steps: 5, sinks: [console, jsonl]}
"""
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "mydata.py").write_text(_DATA)
    (folder / "small.yaml").write_text(_CONFIG)
    return folder


@pytest.fixture(scope="module")
def preempted(folder: Path) -> Ended:
    """Two ranks under FSDP, told to stop after their first checkpoint."""
    layout = ("--nproc-per-node", "2", "--strategy", "fsdp")
    # with the config's global batch: 2 × 2 × 2 ranks = 8
    agrees = ("--gradient-accumulation-steps", "2")
    hold(folder, 10)
    process = start(folder, "train", "small.yaml", *layout, *agrees, **_ONE_THREAD)
    checkpoints = folder / "runs/small/checkpoints"
    wait_for(lambda: process.poll() is not None or list(checkpoints.glob("step-????????")))
    process.send_signal(signal.SIGTERM)
    hold(folder, None)
    return finish(process, folder)


def test_preempted_is_75_and_saved(preempted: Ended) -> None:
    assert preempted.code == 75, preempted.out + preempted.err
    run = RunDirectory(preempted.folder / "runs/small")
    *_, last = run.read_events()
    assert (last["kind"], last["reason"]) == ("stop", "preempted")
    assert (run.checkpoints / f"step-{last['step']:08}").is_dir()


def test_trap_17_the_first_line_names_strategy_and_processes(preempted: Ended) -> None:
    """A strategy that silently isn't the one asked for; a number of processes that nobody chose."""
    first, second, *_ = preempted.out.splitlines()
    assert first == "lockstep: strategy fsdp, 2 processes (as asked)"
    assert "fsdp:2" in second


def test_every_rank_has_a_log(preempted: Ended) -> None:
    logs = preempted.folder / "runs/small/logs"
    assert "fsdp:2" in (logs / "rank-0.log").read_text()
    assert (logs / "rank-1.log").exists()


@pytest.fixture(scope="module")
def resumed(preempted: Ended) -> Ended:
    """The same run, taken up by two ranks of torchrun."""
    (preempted.folder / "hurry").touch()
    process = Forked(
        [
            sys.executable,
            "-m",
            TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "lockstep",
            "train",
            "--config",
            "small.yaml",
            "--strategy=fsdp",
            "--nproc_per_node",
            "7",
        ],
        cwd=preempted.folder,
        env=environment(**_ONE_THREAD),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return finish(process, preempted.folder)


@pytest.mark.full
def test_under_torchrun_it_is_a_worker_and_goes_on(resumed: Ended) -> None:
    assert resumed.code == 0, resumed.out + resumed.err
    run = RunDirectory(resumed.folder / "runs/small")
    steps = [row["step"] for row in run.read_metrics() if "loss" in row]
    assert steps == sorted(set(steps)), "every step once"
    assert steps[-1] == 40
    assert resumed.out.count("strategy fsdp:2") == 1, "said once, not once a rank"


def test_a_wrong_config_under_torchrun_is_one_message(folder: Path) -> None:
    """Every rank finds the same mistake; one says it."""
    process = Forked(
        [
            sys.executable,
            "-m",
            TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "lockstep",
            "train",
            "small.yaml",
            "training.max_step=3",
            "--output-dir",
            "runs/wrong",
        ],
        cwd=folder,
        env=environment(**_ONE_THREAD),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ended = finish(process, folder)
    assert ended.code == 1, "torchrun's own"
    assert ended.err.count("lockstep: ") == 1, ended.err
    assert "write training.max_steps" in ended.err


@pytest.mark.full  # checkpoint/test_ranks.py saves on ranks, and test_evaluate.py evaluates on them
def test_trap_16_every_rank_takes_part_in_evaluation_and_saving(resumed: Ended) -> None:
    """A state dict, an evaluation or a barrier inside `if rank == 0` hangs under FSDP. This run did
    both, and ended.
    """
    run = RunDirectory(resumed.folder / "runs/small")
    assert [row["step"] for row in run.read_metrics() if "eval_loss" in row or row["step"] == 40]
    assert len(list(run.checkpoints.glob("step-????????"))) >= 2


def test_one_process_without_a_launcher(folder: Path) -> None:
    """No --nproc-per-node on a machine without a GPU: said, and run in the command's
    own process.
    """
    (folder / "hurry").touch()
    command = ("train", "small.yaml", "--max-steps=6", "--output-dir", "runs/alone")
    ended = finish(start(folder, *command, **_ONE_THREAD), folder)
    assert ended.code == 0, ended.err
    assert ended.out.startswith(
        "lockstep: strategy auto, 1 process (on the CPU; --nproc-per-node N starts more)\n"
    )
    assert "lockstep: strategy auto: single, there is one rank\n" in ended.out
    assert "step 6/6" in ended.out
    assert "step 6/6" in (folder / "runs/alone/logs/rank-0.log").read_text()


def test_an_error_in_the_users_code_is_one_message(folder: Path) -> None:
    """Its file and line, not a wall."""
    (folder / "hurry").touch()
    (folder / "broken").touch()
    try:
        process = start(folder, "train", "small.yaml", "--output-dir", "runs/broken", **_ONE_THREAD)
        ended = finish(process, folder)
    finally:
        (folder / "broken").unlink()
    assert ended.code == 1
    assert ended.err.count("lockstep: ") == 1, ended.err
    assert "ValueError: sample 5 can't be read" in ended.err
    assert "mydata.py:12" in ended.err
    assert "Traceback" not in ended.err
