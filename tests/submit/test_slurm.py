"""The batch script, as text and as bash understands it."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from lockstep.cli import main

_CONFIG = """
model: {name: transformer}
data: {name: python-docs}
distributed: {strategy: ddp, env: {NCCL_DEBUG: WARN, GREETING: "it's me; rm -rf $HOME"}}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(_CONFIG)
    return "small.yaml"


def rendered(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["submit", "slurm", *argv, "--dry-run"]) == 0
    text = capsys.readouterr().out
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return text


def executed(
    text: str, folder: Path, *, code: int = 0, state: str = "RUNNING"
) -> tuple[int, list[str], str]:
    """Run the script with an `srun` and a `scontrol` that write down what they were given, and a
    `squeue` that says the job's state.
    """
    tools = {
        "srun": (
            f'echo "srun|$NCCL_DEBUG|$GREETING" >> said; printf "%s\\n" "$@" >> words; exit {code}'
        ),
        "squeue": f"echo {state}",
        "scontrol": 'echo "scontrol $@" >> said; [ "$1" = show ] && printf "n0\\nn1\\n"; exit 0',
    }
    for name, body in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(stat.S_IRWXU)
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[0-1]",
    }
    environment |= {"SLURM_JOB_ID": "4711"}
    done = subprocess.run(["bash"], input=text, text=True, cwd=folder, env=environment, check=False)
    return (
        done.returncode,
        (folder / "words").read_text().splitlines(),
        (folder / "said").read_text(),
    )


def test_two_nodes(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = rendered(
        capsys,
        config,
        "training.max_steps=10",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "4",
        "--time",
        "01:00:00",
        "--partition",
        "gpu",
        "--cpus-per-task",
        "16",
        "--sbatch=--exclusive",
        "--setup",
        "export FROM_SETUP=1",
        "--signal-seconds",
        "300",
    )
    lines = text.splitlines()
    for line in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--time=01:00:00",
        "--partition=gpu",
        "--cpus-per-task=16",
        "--signal=USR1@300",
        "--requeue",
        "--exclusive",
        "--output=runs/small/slurm-%j.out",
    ):
        assert f"#SBATCH {line}" in lines
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:]), (
        "sbatch would not read it there"
    )
    code, words, said = executed(text, tmp_path)
    assert code == 0
    assert words[words.index("train") :] == [
        "train",
        "small.yaml",
        "training.max_steps=10",
        "--output-dir",
        "runs/small",
        "--nproc-per-node",
        "4",
        "--resume",
        "auto",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        "n0:24711",
        "--rdzv-id",
        "4711",
    ]
    assert "srun|WARN|it's me; rm -rf $HOME" in said, (
        "variables reach the ranks as they were written"
    )
    assert "requeue" not in said


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (75, "RUNNING", True),
        (75, "COMPLETING", False),
        (1, "RUNNING", False),
        (0, "RUNNING", False),
    ],
)
def test_preempted_and_saved_goes_back_into_the_queue_unless_it_was_cancelled(
    config: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    code: int,
    state: str,
    requeued: bool,
) -> None:
    script = rendered(capsys, config, "--nproc-per-node", "2")
    ended, _, said = executed(script, tmp_path, code=code, state=state)
    assert ended == code
    assert ("scontrol requeue 4711" in said) == requeued


def test_one_node_needs_no_meeting(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(capsys, config, "--gpus-per-node", "8")
    assert "--nproc-per-node 8" in text
    assert "rdzv" not in text
    assert "scontrol show" not in text
    assert "--gpus-per-node" not in rendered(
        capsys, config, "--nproc-per-node", "2", "distributed.device=cpu"
    )


def test_containers(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = (capsys, config, "--nproc-per-node", "1")
    pyxis = rendered(
        *one, "--container", "nvcr.io#nvidia/pytorch:25.01-py3", "--mount", "/data:/data"
    )
    assert "'--container-image=nvcr.io#nvidia/pytorch:25.01-py3'" in pyxis
    assert f"--container-mounts={Path.cwd()}:{Path.cwd()},/data:/data" in pyxis
    apptainer = rendered(*one, "--container", "torch.sif", "--mount", "/data")
    assert (
        "apptainer exec --nv --bind /data torch.sif python -m lockstep train small.yaml"
        in apptainer
    )


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("--nnodes", "2"), "the number of ranks per machine is missing"),
        (("--nnodes", "1:2", "--nproc-per-node", "1"), "a fixed number of machines"),
        (("training.max_step=3", "--nproc-per-node", "1"), "write training.max_steps"),
        (("--nproc-per-node", "1", "--partition", "a\nb"), "one line"),
    ],
)
def test_mistakes_are_found_before_the_queue(
    config: str, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], word: str
) -> None:
    assert main(["submit", "slurm", config, *argv, "--dry-run"]) == 2
    assert word in capsys.readouterr().err


def test_no_sbatch_here(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "slurm", config, "--nproc-per-node", "1"]) == 2
    assert "sbatch is not on this machine" in capsys.readouterr().err
    assert main(["submit", "bus", config]) == 2
    assert "slurm|kubernetes" in capsys.readouterr().err


def test_a_run_in_a_bucket(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm's own log is in the folder where the run writes its records here."""
    text = rendered(capsys, config, "--nproc-per-node", "1", "--output-dir", "s3://team/runs/first")
    assert "#SBATCH --output=runs/s3/team/runs/first/slurm-%j.out" in text.splitlines()
    assert "--output-dir s3://team/runs/first" in text
    assert "#SBATCH --job-name=first" in text.splitlines()
