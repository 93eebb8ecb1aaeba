"""A run that was killed goes on from its newest checkpoint, and ends in the same bits."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import digest, restore
from lockstep.checkpoint.manifest import problems_of_files
from lockstep.errors import UsageError
from lockstep.run_directory import recovery_clock
from lockstep.run_directory.records import RunDirectory
from lockstep.trainer import Trainer, loss_check
from tests.forked import Forked, lockstep
from tests.ranks import run_ranks

CONFIG = {
    "model": {
        "name": "bdh",
        "args": {"n_layer": 2, "n_embd": 32, "n_head": 4, "mlp_multiplier": 4, "dropout": 0.1},
    },
    "data": {"name": "python-docs", "args": {"block_size": 64}},
    "training": {
        "max_steps": 24,
        "batch_size": 2,
        "global_batch_size": 8,
        "warmup_steps": 4,
        "eval_steps": None,
        "seed": 3,
        "optimizer": "adamw",
        "lr_schedule": "cosine",
        "gradient_clip": 1.0,
    },
    "precision": {"mode": "fp32"},
    "distributed": {"reproducible": True},
    "checkpoint": {"save_steps": 6, "save_total_limit": None},
    "monitor": {"log_steps": 1, "sinks": ["console", "jsonl"]},
}


def start(config: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    return Forked(
        [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            str(config),
            "--output-dir",
            str(output),
            *options,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def completed(config: Path, output: Path, *options: str, code: int = 0) -> str:
    """Run to the end, in a fork of a process that has imported torch."""
    words = ["train", str(config), "--output-dir", str(output), *options]
    ended = lockstep(words, Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


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
    completed(config, output)
    return output


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="single", marks=pytest.mark.full),
        pytest.param(("--nproc-per-node", "2", "--strategy", "ddp"), id="ddp:2"),
    ],
)
def test_killed_and_resumed_is_the_run_that_was_not(
    config: Path, undisturbed: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The undisturbed run is one process's: with `reproducible` any number of ranks ends in its
    bits.
    """
    broken = tmp_path / "broken"
    kill_after(start(config, broken, *options), broken / "checkpoints" / "step-00000012")
    output = completed(config, broken, *options, "--resume", "auto")
    assert "step-000000" in output, "it says where it goes on from"
    last = "checkpoints/step-00000024"
    assert digest(broken / last) == digest(undisturbed / last)
    rows = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 25)), (
        "each step is recorded once"
    )
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    expected = [
        json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses == {row["step"]: row["loss"] for row in expected if "loss" in row}


@pytest.mark.full
def test_trap_54_samples_and_random_numbers_go_on_where_they_were(
    config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A resume from step 18, under another strategy, sees the samples and draws the numbers of
    steps 19 to 24.
    """
    newest = str(undisturbed / "checkpoints/step-00000018")
    output = completed(
        config, tmp_path, "--resume", newest, "--strategy", "fsdp", "--nproc-per-node", "2"
    )
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
    output = completed(config, undisturbed)
    assert "nothing left to do: 24 steps are done, and the run has 24" in output
    assert digest(undisturbed / "checkpoints/step-00000024") == before


def test_a_resume_whose_model_differs_names_what_differs(
    config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    path = str(undisturbed / "checkpoints/step-00000024")
    assert "model.args.n_embd 32 → 48" in completed(
        config, tmp_path, "--resume", path, "model.args.n_embd=48", code=2
    )
    output = completed(
        config, tmp_path, "--resume", path, "model.args.n_embd=48", "--allow-changes", code=2
    )
    assert "of another shape" in output
    assert "Traceback" not in output
    output = completed(config, tmp_path, "--resume", str(tmp_path), code=2)
    assert "is not a checkpoint" in output


# ---- what changed since the checkpoint ----


def regression(samples: int = 48) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer(folder: Path, optimizer: str | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    given = {
        "batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.1,
        "weight_decay": 0.1,
        "log_steps": 1,
    }
    given |= {"output_dir": folder, "eval_steps": None, **settings}
    return Trainer(nn.Linear(4, 1), optimizer, nn.MSELoss(), **given)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of four steps, done."""
    trainer(tmp_path).train(regression())
    return tmp_path


def test_a_trainer_with_a_run_directory_resumes_as_the_command_does(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = trainer(saved)
    assert again.train(regression()) is None
    said = capsys.readouterr().out
    assert "resumes after step 4, from " in said
    assert "nothing left to do: 4 steps are done, and the run has 4" in said
    more = trainer(saved, max_steps=6)
    more.train(regression())
    assert [row["step"] for row in RunDirectory(saved).read_metrics()] == [1, 2, 3, 4, 5, 6]
    afresh = trainer(saved, resume="never")
    afresh.train(regression())
    assert [row["step"] for row in RunDirectory(saved).read_metrics()] == [1, 2, 3, 4]


def test_a_resumed_run_reads_its_checkpoint_for_checksums_once(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bool] = []

    def counting(*given: Any, thorough: bool, **more: Any) -> list[str]:
        compared.append(thorough)
        return problems_of_files(*given, thorough=thorough, **more)

    monkeypatch.setattr(restore, "problems_of_files", counting)
    assert trainer(saved).train(regression()) is None
    assert compared == [True]
    trainer(saved).load_checkpoint(saved)
    assert compared == [True] * 2
    (checkpoint,) = (saved / "checkpoints").glob("step-*")
    trainer(saved).load_checkpoint(checkpoint)
    assert compared == [True] * 3, "one that is named is not chosen by its checksums"


def test_the_survivors_of_a_death_do_not_check_the_loss_again(saved: Path) -> None:
    """It was checked in the run's first steps; ranks that are started again check it."""
    again = trainer(saved, max_steps=6)
    again.resume("auto")
    assert again.loss_check.left == loss_check.STEPS
    recovery_clock.begin(died=0.0, noticed=0.0)
    try:
        survivor = trainer(saved, max_steps=6)
        survivor.resume("auto")
    finally:
        recovery_clock.take()
    assert survivor.loss_check.left == 0


def test_a_trainer_goes_on_by_itself_only_from_its_start(saved: Path) -> None:
    """Not after a checkpoint was loaded, or steps were taken; nor does a loop of one's
    own resume.
    """
    loaded = trainer(saved, max_steps=6)
    loaded.load_checkpoint(saved)
    loaded.train(regression(), epochs=None)
    assert loaded.step.progress.step == 6
    own = trainer(saved / "own", max_steps=8)
    assert len(list(zip(range(2), own.steps(regression()), strict=False))) == 2
    own.train(regression())
    assert own.step.progress.step == 8


def test_a_changed_learning_rate_is_said_and_counts(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(saved, max_steps=6, learning_rate=0.05, weight_decay=0.3).train(regression())
    said = capsys.readouterr().out
    changed = (
        "training.learning_rate 0.1 → 0.05, training.max_steps 4 → 6, training.weight_decay 0.1"
        " → 0.3"
    )
    assert f"lockstep: changed since that step: {changed}\n" in said
    assert [row["lr"] for row in RunDirectory(saved).read_metrics()] == [0.1] * 4 + [0.05] * 2


def test_a_resumed_run_says_how_its_curve_moves_and_what_is_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a run that was killed at step 7, of which step 4 is saved, with more steps than
    before.
    """
    curve = {"lr_schedule": "cosine", "min_lr_ratio": 0.0, "save_steps": 4}
    trainer(tmp_path, max_steps=8, **curve).train(regression())
    rmtree(tmp_path / "checkpoints/step-00000008")
    capsys.readouterr()
    trainer(tmp_path, max_steps=16, **curve).train(regression())
    said = capsys.readouterr().out
    moved = (
        "(cosine over 16 steps; before: cosine over 8 steps): step 5 takes 0.0854 in place of 0.05"
    )
    assert f"lockstep: the learning rate follows another curve from here on {moved}\n" in said
    assert "lockstep: the run had come to step 8: what follows step 4 is trained again\n" in said
    rates = {row["step"]: row["lr"] for row in RunDirectory(tmp_path).read_metrics()}
    assert (rates[5], rates[4]) == (
        pytest.approx(0.0854, abs=1e-4),
        pytest.approx(0.0691, abs=1e-4),
    )
    trainer(tmp_path, max_steps=16, **curve).train(regression())
    again = capsys.readouterr().out
    assert "another curve" not in again
    assert "trained again" not in again


@pytest.mark.parametrize(
    ("settings", "samples", "words"),
    [
        ({"seed": 4}, 48, "training.seed 1337 → 4"),
        ({"batch_size": 8}, 48, "training.batch_size 4 → 8"),
        ({"global_batch_size": 8}, 48, "training.global_batch_size null → 8"),
        ({"shuffle": False}, 48, "data.shuffle true → false"),
        ({}, 60, "an epoch of the data had 12 steps, and has 15 now"),
    ],
)
def test_what_would_be_another_training_is_refused_unless_it_is_allowed(
    saved: Path,
    settings: dict[str, Any],
    samples: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"max_steps": 6, **settings}
    with pytest.raises(UsageError, match="the run would not go on as it began") as caught:
        trainer(saved, **settings).train(regression(samples))
    assert words in str(caught.value)
    assert "--allow-changes" in str(caught.value)
    assert "--resume never" in str(caught.value)
    if samples == 48:
        assert "step-00000004" in [path.name for path in (saved / "checkpoints").iterdir()], (
            "nothing was touched"
        )
    capsys.readouterr()
    trainer(saved, allow_changes=True, **settings).train(regression(samples))
    if samples == 48:
        assert words in capsys.readouterr().out
    assert RunDirectory(saved).read_metrics()[-1]["step"] == 6


def test_a_new_rate_of_a_users_optimizer_applies_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(max_steps: int, rate: float) -> Trainer:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return Trainer(
            model,
            optimizer,
            nn.MSELoss(),
            output_dir=tmp_path,
            max_steps=max_steps,
            log_steps=1,
            lr_schedule="constant",
            eval_steps=None,
        )

    run(2, 0.1).train(regression())
    run(4, 0.2).train(regression())
    assert [row["lr"] for row in RunDirectory(tmp_path).read_metrics()] == [0.1, 0.1, 0.2, 0.2]
    assert "the optimizer's lr 0.1 → 0.2" in capsys.readouterr().out


def test_other_ranks_are_said_and_do_not_stop_a_run(tmp_path: Path) -> None:
    """Without a `global_batch_size` a step grows with the ranks: nobody changed a key, a machine
    may just be gone.
    """
    trainer(tmp_path).train(regression())
    said, refused, idle = run_ranks(on_two_ranks, 2, str(tmp_path))[0]
    assert "the global batch (it follows the ranks: set global_batch_size) 4 → 8" in said
    assert "training.seed 1337 → 5" in refused
    assert (
        "warning: a step has 1 micro-batch for 2 data-parallel ranks: 1 of them computes nothing"
        in idle
    )


def on_two_ranks(folder: str) -> list[str]:
    settings = {"strategy": "ddp", "device": "cpu"}
    texts = []
    for changes in ({"max_steps": 6}, {"max_steps": 8, "seed": 5}):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            try:
                trainer(Path(folder), **settings, **changes).train(regression())
                texts.append(text.getvalue())
            except UsageError as error:
                texts.append(str(error))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        trainer(Path(folder, "idle"), **settings, global_batch_size=4, max_steps=1).train(
            regression()
        )
    return [*texts, text.getvalue()]
