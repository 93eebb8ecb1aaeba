"""`lockstep/torch_compat/memory_history.py`: torch has the functions, and they take these
arguments.
"""

import inspect
from pathlib import Path

import pytest
import torch

from lockstep.torch_compat import memory_history


def test_torch_takes_these_arguments() -> None:
    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "max_entries", "stacks"} <= parameters.keys()
    assert inspect.signature(torch.cuda.memory._dump_snapshot).parameters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_is_written(tmp_path: Path) -> None:
    memory_history.record(max_entries=100)
    torch.ones(1000, device="cuda")
    memory_history.write(str(tmp_path / "snapshot.pickle"))
    memory_history.stop()
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
