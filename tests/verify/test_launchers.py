"""Commands as people type them are given the number of ranks to verify."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.verify.accelerate_variables import accelerate_variables
from lockstep.verify.launchers import PlainScript, plain_script, with_ranks

TRAIN = PlainScript("train.py")
RUN = "-m torch.distributed.run --standalone --nproc-per-node '{n}'"


@pytest.mark.parametrize(
    ("typed", "command", "ranks"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun --nproc-per-node '{n}' train.py", 2),
        (
            "torchrun --standalone --nproc_per_node=8 train.py --lr 3e-4",
            "torchrun --standalone '--nproc_per_node={n}' train.py --lr 3e-4",
            8,
        ),
        (
            "torchrun --nproc-per-node=gpu train.py",
            "torchrun '--nproc-per-node={n}' train.py",
            None,
        ),
        ("torchrun train.py", "torchrun --nproc-per-node '{n}' train.py", None),
        (
            "/usr/bin/python3.11 -m torch.distributed.run --nproc-per-node 4 -m package.train",
            "/usr/bin/python3.11 -m torch.distributed.run --nproc-per-node '{n}' -m package.train",
            4,
        ),
        (
            "accelerate launch train.py --num_processes 3",
            "accelerate launch --num_processes '{n}' train.py --num_processes 3",
            None,
        ),
        (
            "accelerate launch --num_processes 2 --mixed_precision bf16 train.py",
            "accelerate launch --num_processes '{n}' --mixed_precision bf16 train.py",
            2,
        ),
        ("python train.py --lr 1", f"python {RUN} train.py --lr 1", None),
        ("python -m package.train", f"python {RUN} -m package.train", None),
        (
            "CUDA_VISIBLE_DEVICES= python train.py",
            f"env CUDA_VISIBLE_DEVICES= python {RUN} train.py",
            None,
        ),
        ("mpirun -np 4 python train.py", "mpirun -np '{n}' python train.py", 4),
        ("./train.sh {n}", "./train.sh '{n}'", None),
        (
            "torchrun --nnodes 1 --nproc-per-node 2 train.py",
            "torchrun --nnodes 1 --nproc-per-node '{n}' train.py",
            2,
        ),
    ],
)
def test_the_number_of_ranks_is_replaced(typed: str, command: str, ranks: int | None) -> None:
    assert with_ranks(typed.split()) == (command, ranks)


def test_what_can_not_be_replaced_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing tells how many ranks"):
        with_ranks(["./train.sh", "2"])
    says = "--nnodes 2 is for several hosts, and verify runs the command on this one"
    with pytest.raises(UsageError, match=says):
        with_ranks(["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "train.py"])


@pytest.mark.parametrize(
    ("typed", "script"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", PlainScript("train.py", ("--lr", "1"))),
        ("torchrun --standalone --nproc_per_node=8 train.py", TRAIN),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", TRAIN),
        ("python train.py -m", PlainScript("train.py", ("-m",))),
        ("python -m train", PlainScript("train.py", module="train")),
        ("torchrun -m package.fit -m", PlainScript("package/fit.py", ("-m",), "package.fit")),
        ("python -m package", PlainScript("package/__main__.py", module="package")),
        ("accelerate launch train.py", PlainScript("train.py", accelerate=())),
        (
            "accelerate launch --multi_gpu --num_processes=2 --mixed_precision bf16 -m train 1",
            PlainScript("train.py", ("1",), "train", ("--mixed_precision", "bf16")),
        ),
        ("accelerate launch --use_deepspeed train.py", None),
        ("accelerate launch --config_file fsdp.yaml train.py", None),
        ("torchrun --nproc-per-node 2 --max-restarts 3 train.py", None),
        ("torchrun --nproc-per-node 2 nowhere.py", None),
        ("torchrun --nproc-per-node {n} train.py", None),
        ("torchrun --nproc-per-node 2", None),
        ("python -m package.nowhere", None),
        ("python -m lockstep launch train.py", None),
        ("python -O train.py", None),
        ("OMP_NUM_THREADS=1 torchrun train.py", None),
        ("/usr/bin/python train.py", None),
        ("", None),
    ],
)
def test_a_script_that_needs_no_launcher(
    typed: str, script: PlainScript | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    Path("train.py").touch()
    Path("package").mkdir()
    for name in ("fit.py", "__main__.py"):
        Path("package", name).touch()
    here = Path(sys.executable).parent
    monkeypatch.setattr(shutil, "which", lambda name: str(here / name))
    assert plain_script(typed.split()) == script
    config = Path("home", "accelerate", "default_config.yaml")
    config.parent.mkdir(parents=True)
    config.touch()  # which may name DeepSpeed: its own launcher reads it
    if script is not None and script.accelerate is not None:
        assert plain_script(typed.split()) is None


def test_variables_are_those_of_accelerate() -> None:
    options = ("--mixed_precision", "bf16")
    made = accelerate_variables(options, 2)
    assert made["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert made["ACCELERATE_USE_CPU"] == str(not torch.accelerator.is_available())
    assert accelerate_variables(("--cpu",), 1)["ACCELERATE_USE_CPU"] == "True"
    assert not {"MASTER_PORT", "OMP_NUM_THREADS"} & made.keys()
