"""A process that has rehearsed a plan trains as one that has not: `strategy: auto` does both."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.checkpoint.convert import digest
from lockstep.config import Config, config_from
from lockstep.plan.rehearsal import rehearse
from lockstep.plan.workload import Workload
from lockstep.strategy import resolve
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model
from tests.ranks import run_ranks

STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor:2": {"distributed.strategy": "tensor", "distributed.tensor_size": 2},
    "fsdp:2": {"distributed.strategy": "fsdp"},
}


def _config(settings: dict[str, Any]) -> Config:
    return config_from({"training.batch_size": 2, "training.max_steps": 2, **settings})


def trained(folder: Path, strategies: list[str], rehearsed: bool) -> None:
    """Two steps of each strategy and a checkpoint, in ranks that have rehearsed it or have not."""
    if rehearsed:
        dist.destroy_process_group()
        for name in strategies:
            config = _config(STRATEGIES[name])
            work = Workload(
                lambda: language_model("transformer", n_layer=2, vocab_size=64), Tokens()[0]
            )
            rehearse(work, config, resolve(config.distributed, 2), device_type="cpu")
        dist.init_process_group("gloo")
    for name in strategies:
        output = folder / name
        model = language_model("transformer", n_layer=2, vocab_size=64)
        Trainer(model, config=_config(STRATEGIES[name]), output_dir=output).train(Tokens())


@pytest.mark.parametrize(
    "strategies",
    [["tensor:2"], pytest.param(["tensor:2", "fsdp:2"], marks=pytest.mark.full)],
    ids="*".join,
)
def test_what_is_saved_is_what_was_trained(tmp_path: Path, strategies: list[str]) -> None:
    for rehearsed in (False, True):
        run_ranks(trained, 2, tmp_path / str(rehearsed), strategies, rehearsed)
    for name in strategies:
        plain, after = (
            digest(tmp_path / str(rehearsed) / name / "checkpoints/step-00000002")
            for rehearsed in (False, True)
        )
        assert after == plain, name
