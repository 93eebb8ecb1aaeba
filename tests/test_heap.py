"""Memory that is freed and asked for again: counted in page faults, each in a process
of its own.
"""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from lockstep.process_group.cluster import keep_freed_memory
from tests.ranks import REPOSITORY

# Blocks of 40 MiB, larger than any that glibc keeps of itself, are written and freed as gradients
# are.
PROGRAM = """
import resource, sys
import torch
from lockstep.process_group.cluster import keep_freed_memory

if sys.argv[1] == "keep":
    print(keep_freed_memory())
faults = []
for _ in range(16):
    blocks = [torch.ones(10 << 20) for _ in range(4)]
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    del blocks
print(faults[-1] - faults[3])
"""

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="NOT TESTED: the C library is not glibc"
)


def run(what: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        env=kept,
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


@pytest.mark.full
def test_freed_memory_is_there_again_without_page_faults() -> None:
    kept, faults = run("keep")
    assert kept == "True"
    assert int(faults) < 100_000, (
        "160 MiB are 40,960 pages; where blocks come to lie is chance, and may cost them twice"
    )
    assert int(run("leave")[0]) > 400_000, (
        "the system took them back each time, as it does by default"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_settings_of_ones_own_are_left_alone(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("the C library was told"))
    assert not keep_freed_memory()


@pytest.mark.full
def test_a_run_on_a_cpu_keeps_it() -> None:
    program = """
import resource
import statistics
import torch
from torch import nn
from lockstep import Trainer
from lockstep.config import config_from

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
config = config_from({"training.batch_size": 4, "training.max_steps": 12, "distributed.device": "cpu"})
trainer = Trainer(model, loss_fn=nn.MSELoss(), config=config)
data = torch.utils.data.TensorDataset(torch.randn(64, 1024), torch.randn(64, 1024))
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt for _ in trainer.steps(data)]
print(statistics.median(after - before for before, after in zip(faults[3:], faults[4:])))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
    )
    assert float(done.stdout) < 1000, "its gradients are 8192 pages"
