"""Calls that only some ranks make: an error at once, or as soon as the watch looks, with the lines of both."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.shared import environment, lockstep

_BEGIN = """
import os, torch, torch.distributed as dist
from torch import nn
from lockstep import Config, Trainer

config = Config.model_validate({
    "distributed": {"device": "cpu", "strategy": "ddp", "hang": {"factor": 5, "seconds": 2}},
    "training": {"max_steps": 4, "batch_size": 4},
})
model = nn.Linear(4, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), config=config)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, 1))
"""


def line_of(text: str, code: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if code in line)


@pytest.mark.fault(
    "hang: a checkpoint is saved under `if is_main_process:`",
    "rank 0 waits for the others' shards, and they go on to the next step",
    "whichever comes second raises at once: exit code 2, one message with the lines of both",
)
def test_trap_79_saving_on_rank_0_alone_is_an_error_at_once(tmp_path: Path) -> None:
    text = _BEGIN + (
        "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        trainer.save_checkpoint('saved')\n"
    )
    (tmp_path / "own.py").write_text(text)
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 2, ended.err
    assert "the ranks do not make the same calls: rank 0 calls save_checkpoint, rank 1 calls steps" in ended.err
    saving, stepping = line_of(text, "trainer.save_checkpoint"), line_of(text, "for record in")
    assert f"rank 0 at own.py:{saving}, rank 1 at own.py:{stepping}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.fault(
    "hang: a metric is reduced under `if is_main_process:`",
    "a collective of torch's own, in a script: rank 0 waits in it, and the others in the next step",
    "after `hang.seconds` the rank is named with its line and the line where the others wait; exit code 1",
)
def test_trap_79_a_collective_of_torch_on_rank_0_alone_is_found(tmp_path: Path) -> None:
    text = _BEGIN + (
        "alone = dist.new_group([0, 1])\n"
        "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        dist.all_reduce(torch.ones(1), group=alone)\n"
    )
    (tmp_path / "own.py").write_text(text)
    since = time.monotonic()
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 1, ended.err
    assert "rank 0 of 2 failed: it hangs: it waits in a collective which the others have not entered" in ended.err
    assert re.search(rf"own\.py:{line_of(text, 'dist.all_reduce')} in <module>", ended.err)
    assert f"the others wait in steps at own.py:{line_of(text, 'for record in')}" in ended.err
    assert time.monotonic() - since < 120


_OTHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "own.py"),
    "lockstep.spawn": ("-c", "import lockstep, own; lockstep.spawn(own.train, nprocs=2)"),
    "mp.spawn": ("-c", "import torch.multiprocessing as mp, own; mp.spawn(own.in_a_group, nprocs=2)"),
}


@pytest.mark.fault(
    "hang: a checkpoint is saved under `if is_main_process:`, without Lockstep's launcher",
    "under torchrun, `lockstep.spawn` or `mp.spawn`, where nobody watches the ranks",
    "the ranks of a machine compare their calls all the same: whichever comes second raises at once",
)
@pytest.mark.parametrize(
    "launcher", ["torchrun", *(pytest.param(name, marks=pytest.mark.full) for name in ("lockstep.spawn", "mp.spawn"))]
)
def test_trap_79_saving_on_rank_0_alone_under_other_launchers(tmp_path: Path, launcher: str) -> None:
    """The rank that waits hears of it as its peer leaves; it would wait for `timeout_seconds`."""
    begin, train = _BEGIN.split("config =")
    train = "config =" + train + (
        "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        trainer.save_checkpoint('saved')\n"
    )  # fmt: skip
    text = f"{begin}def train():\n    {train.replace(chr(10), chr(10) + '    ')}\n" + (
        "def in_a_group(rank):\n"
        "    dist.init_process_group('gloo', init_method=f'file://{os.getcwd()}/meet', rank=rank, world_size=2)\n"
        "    train()\n"
        "if __name__ == '__main__':\n    train()\n"
    )
    (tmp_path / "own.py").write_text(text)
    command = [sys.executable, *_OTHERS[launcher]]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode != 0
    assert "the ranks do not make the same calls: rank 0 calls save_checkpoint, rank 1 calls steps" in ended.stderr
    saving, stepping = line_of(text, "trainer.save_checkpoint"), line_of(text, "for record in")
    assert f"rank 0 at own.py:{saving}, rank 1 at own.py:{stepping}" in ended.stderr
