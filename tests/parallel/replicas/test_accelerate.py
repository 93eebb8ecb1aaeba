"""Hugging Face Accelerate as a strategy: under its own launcher, and what it is not used for."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import load_config
from lockstep.errors import UsageError
from lockstep.parallel.replicas.accelerate import refuse_other_engines
from lockstep.run_directory.records import RunDirectory
from lockstep.trainer import run
from tests.hosts import Host, hosts, require_root
from tests.launch.shared import environment
from tests.ranks import free_port

CONFIG = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2}}
data: {name: python-docs, args: {block_size: 16, validation_fraction: 0.001}}
training: {max_steps: 4, batch_size: 2, global_batch_size: 8, eval_steps: null}
precision: {mode: fp32}
distributed: {strategy: accelerate, device: cpu, accelerate: {cpu: true, mixed_precision: "no"}}
checkpoint: {save_strategy: none}
monitor: {log_steps: 1, sinks: [jsonl]}
"""


def figures(folder: Path) -> list[float]:
    """Losses and gradient norms."""
    rows = [row for row in RunDirectory(folder).read_metrics() if "loss" in row]
    return [row[key] for row in rows for key in ("loss", "grad_norm")]


@pytest.mark.full
def test_under_accelerate_launch_it_is_the_run_of_one_process(tmp_path: Path) -> None:
    """Its launcher may ask for bf16 and accumulation: what the config says holds."""
    config = tmp_path / "a.yaml"
    config.write_text(CONFIG)
    # With --cpu it starts one process, unless MPI is there; with --multi_gpu it is torchrun, which
    # asks for no GPU.
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "bf16",
        "--gradient_accumulation_steps",
        "3",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        str(free_port()),  # Accelerate 1.0 hands 0 to the ranks, which then wait for each other
        "-m",
        "lockstep",
        "train",
        str(config),
        "--output-dir",
        str(tmp_path / "two"),
    ]
    done = subprocess.run(
        command,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alone = load_config(config, ["distributed.strategy=single"])
    assert run(alone, output_dir=tmp_path / "one", resume="never") == 0
    found = figures(tmp_path / "two")
    assert found == pytest.approx(figures(tmp_path / "one"), rel=1e-5)
    assert len(found) == 8
    [start, *_] = RunDirectory(tmp_path / "two").read_events()
    assert start["layout"] == "accelerate:2"


@pytest.mark.full
@pytest.mark.root
def test_two_machines_train_one_model_or_are_refused(tmp_path: Path) -> None:
    """With --cpu its launcher starts one process on each, which knows of no other."""
    require_root()
    (tmp_path / "a.yaml").write_text(CONFIG)

    def start(kind: str, machine: int, machines: list[Host]) -> subprocess.Popen[str]:
        host = machines[machine]
        command = [
            *host.command,
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            kind,
            "--num_processes",
            "2",
            "--num_machines",
            "2",
            "--machine_rank",
            str(machine),
            "--main_process_ip",
            machines[0].address,
            "--main_process_port",
            "29500",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "-m",
            "lockstep",
            "train",
            "a.yaml",
            "--output-dir",
            "run",
        ]
        variables = environment(OMP_NUM_THREADS="1", **host.environment)
        output = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=tmp_path, env=variables, stdout=output, stderr=output, text=True
        )

    with hosts(2) as machines:
        said = {
            kind: [
                process.communicate(timeout=200)
                for process in [start(kind, i, machines) for i in (0, 1)]
            ]
            for kind in ("--cpu", "--multi_gpu")
        }
    for _, errors in said["--cpu"]:
        assert "of several machines, each would train a model of its own" in errors
        assert f"--master-addr {machines[0].address} on each machine" in errors
    assert len(figures(tmp_path / "run")) == 8, said["--multi_gpu"]
    [began, *_] = RunDirectory(tmp_path / "run").read_events()
    assert began["layout"] == "accelerate:2"


@pytest.mark.parametrize(
    ("name", "instead"), [("FSDP", "strategy: fsdp"), ("MEGATRON_LM", "strategy: pipeline")]
)
def test_other_engines_of_accelerate_launch_are_refused(
    name: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(UsageError, match=instead):
        refuse_other_engines()


def test_without_its_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from lockstep.config import config_from
    from lockstep.parallel.replicas.accelerate import prepare

    absent: dict[str, Any] = {"accelerate": None, "accelerate.utils": None}
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match="pip install"):
        prepare(nn.Linear(1, 1), config_from({}).step)
