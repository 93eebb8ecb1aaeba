"""A run that was killed goes on from its newest checkpoint, and ends in the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lockstep.checkpoint import digest

CONFIG = {
    "model": {"name": "bdh", "args": {"n_layer": 2, "n_embd": 32, "n_head": 4, "mlp_multiplier": 4, "dropout": 0.1}},
    "data": {"name": "python-docs", "args": {"block_size": 64}},
    "training": {
        "max_steps": 24, "batch_size": 2, "global_batch_size": 8, "warmup_steps": 4, "eval_steps": None, "seed": 3,
        "optimizer": "adamw", "lr_schedule": "cosine", "gradient_clip": 1.0,
    },
    "precision": {"mode": "fp32"},
    "checkpoint": {"save_steps": 6, "save_total_limit": None},
    "monitor": {"log_steps": 1, "sinks": ["console", "jsonl"]},
}  # fmt: skip


def start(config: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", str(config), "--output-dir", str(output), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def kill_after(process: subprocess.Popen[str], checkpoint: Path) -> None:
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    finish(start(config, output))
    return output


@pytest.mark.parametrize("options", [(), ("--nproc-per-node", "2", "--strategy", "ddp")], ids=["single", "ddp:2"])
def test_killed_and_resumed_is_the_run_that_was_not(
    config: Path, undisturbed: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    whole = undisturbed
    if options:
        whole = tmp_path / "whole"
        finish(start(config, whole, *options))
    broken = tmp_path / "broken"
    kill_after(start(config, broken, *options), broken / "checkpoints" / "step-00000012")
    output = finish(start(config, broken, *options, "--resume", "auto"))
    assert "step-000000" in output, "it says where it goes on from"
    last = "checkpoints/step-00000024"
    assert digest(broken / last) == digest(whole / last)
    rows = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 25)), "each step is recorded once"
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    expected = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert losses == {row["step"]: row["loss"] for row in expected if "loss" in row}


def test_trap_54_samples_and_random_numbers_go_on_where_they_were(
    config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A resume from step 18, under another strategy, sees the samples and draws the numbers of steps 19 to 24."""
    output = finish(
        start(config, tmp_path, "--resume", str(undisturbed / "checkpoints/step-00000018"), "--strategy", "fsdp",
              "--nproc-per-node", "2")
    )  # fmt: skip
    assert "fsdp:2" in output
    mine = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    theirs = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    expected = {row["step"]: row for row in theirs if "loss" in row}
    resumed = [row for row in mine if "loss" in row]
    assert [row["step"] for row in resumed] == list(range(19, 25))
    for row in resumed:
        assert row["loss"] == pytest.approx(expected[row["step"]]["loss"], rel=1e-5)
        assert row["lr"] == expected[row["step"]]["lr"]


def test_a_run_that_is_done_has_nothing_left_to_do(config: Path, undisturbed: Path) -> None:
    before = digest(undisturbed / "checkpoints/step-00000024")
    finish(start(config, undisturbed))
    assert digest(undisturbed / "checkpoints/step-00000024") == before


def test_a_resume_whose_model_differs_names_what_differs(config: Path, undisturbed: Path, tmp_path: Path) -> None:
    path = str(undisturbed / "checkpoints/step-00000024")
    process = start(config, tmp_path, "--resume", path, "model.args.n_embd=48")
    output = finish(process, code=2)
    assert "of another shape" in output
    assert "Traceback" not in output
    output = finish(start(config, tmp_path, "--resume", str(tmp_path)), code=2)
    assert "is no checkpoint" in output
