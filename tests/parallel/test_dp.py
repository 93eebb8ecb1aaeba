"""DataParallel: what is said and refused where one process has several GPUs."""

import pytest
import torch
from torch import nn

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.parallel import data_parallel
from lockstep.randomness import Cursor


def wrapped(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[nn.Module, list[str]]:
    """As on a machine with two GPUs; the model stays on the CPU."""
    monkeypatch.setattr(data_parallel, "num_gpus", lambda _device: 2)
    notices: list[str] = []
    config = config_from({"distributed.strategy": "dp", **settings})
    return data_parallel.apply_dp(nn.Linear(2, 2), config, Cursor(1, torch.device("cpu")), notices), notices


def test_it_says_that_ddp_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, [line] = wrapped(monkeypatch)
    assert isinstance(model, nn.DataParallel)
    assert "2 GPUs share out each micro-batch" in line
    assert "ddp is faster" in line


@pytest.mark.parametrize("setting", [{"training.compile": True}, {"training.gradient_checkpointing": "full"}])
def test_what_its_copies_would_share_is_refused(monkeypatch: pytest.MonkeyPatch, setting: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="dp can't be had with") as error:
        wrapped(monkeypatch, **setting)
    assert "strategy: ddp" in str(error.value)
