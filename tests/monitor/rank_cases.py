"""Runs on several ranks whose figures are looked at; functions here run on every rank of a test."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import config_from
from lockstep.monitor import figures
from lockstep.records import RunDirectory
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model

SLOW_SECONDS = 0.15  # a step; far above what a busy machine adds to the others


class SlowTokens(Tokens):
    """Rank 1 takes long to read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if dist.get_rank() == 1:
            time.sleep(SLOW_SECONDS / 6)
        return super().__getitem__(index)


def run_with(folder: str, strategy: str, slow: str | None, steps: int, **settings: Any) -> dict[str, Any]:
    """Train; `slow`: what rank 1 is slow in, `data` or `forward_backward`.

    Returns:
        rows and events of the run, and the wall seconds of rank 0.
    """
    figures.SECONDS_BETWEEN = 0.0
    config = config_from({
        "training.batch_size": 2, "training.global_batch_size": 8, "training.max_steps": steps,
        "precision.mode": "fp32",
        "training.eval_steps": None, "distributed.strategy": strategy, "checkpoint.save_strategy": "none",
        "monitor.sinks": ["jsonl"], "monitor.log_steps": 1, "training.warmup_steps": 1, **settings,
    })  # fmt: skip
    trainer = Trainer(language_model("transformer"), config=config, output_dir=folder)
    if slow == "forward_backward" and dist.get_rank() == 1:
        trainer.placed.parts[0].register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS / 2))
    trainer.train(SlowTokens() if slow == "data" else Tokens())
    dist.barrier()
    run = RunDirectory(Path(folder))
    return {"rows": run.read_metrics(), "events": run.read_events()}


def all_cases(folder: str) -> dict[str, dict[str, Any]]:
    """Every case in one launch."""
    cases: dict[str, dict[str, Any]] = {
        f"{strategy} {slow}": run_with(f"{folder}/{strategy}-{slow}", strategy, slow, 8)
        for strategy, slow in (
            ("ddp", "forward_backward"),
            ("fsdp", "forward_backward"),
            ("ddp", "data"),
            ("ddp", None),
        )
    }
    request = Path(folder, "asked", "profile.request")
    if dist.get_rank() == 0:
        request.parent.mkdir()
        request.touch()
    dist.barrier()
    settings = {"monitor.gradient_norms": True}
    cases["asked"] = run_with(f"{folder}/asked", "fsdp", None, 10, **settings)
    cases["asked"]["files"] = sorted(p.name for p in Path(folder, "asked/profile").iterdir())
    cases["asked"]["request is there"] = request.exists()
    return cases
