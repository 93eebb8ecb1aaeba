"""Commands as people type them are given the number of ranks to verify."""

import shutil
import sys
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.verify.launchers import plain_script, with_ranks

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
        ("torchrun --nproc-per-node 2 train.py --lr 1", "train.py --lr 1"),
        ("torchrun --standalone --nproc_per_node=8 train.py", "train.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("python train.py -m", "train.py -m"),
        ("torchrun --nproc-per-node 2 --max-restarts 3 train.py", None),
        ("torchrun --nproc-per-node 2 -m package.train", None),
        ("torchrun --nproc-per-node 2 nowhere.py", None),
        ("torchrun --nproc-per-node {n} train.py", None),
        ("python -O train.py", None),
        ("python -m package.train", None),
        ("accelerate launch train.py", None),
        ("OMP_NUM_THREADS=1 torchrun train.py", None),
        ("/usr/bin/python train.py", None),
        ("", None),
    ],
)
def test_a_script_that_torch_alone_starts_needs_no_launcher(
    typed: str, script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    here = Path(sys.executable).parent
    monkeypatch.setattr(shutil, "which", lambda name: str(here / name))
    assert plain_script(typed.split()) == (None if script is None else script.split())
