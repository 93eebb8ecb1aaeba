"""Runs on several ranks whose figures are looked at; functions here run on every rank of a test."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import config_from
from lockstep.monitor import figures
from lockstep.run_directory.records import RunDirectory
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model

_LEAST_SLOW_SECONDS = 0.15


class SlowTokens(Tokens):
    """Rank 1 takes long to read.

    Args:
        seconds: how long for a step, of which it reads 4 samples.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if dist.get_rank() == 1:
            time.sleep(self.seconds / 4)
        return super().__getitem__(index)


def run_with(
    folder: str, strategy: str, slow: str | None, steps: int, seconds: float = 0.0, **settings: Any
) -> dict[str, Any]:
    """Train.

    Args:
        slow: what rank 1 is slow in, `data` or `forward_backward`.
        seconds: how long it takes for that in each step.

    Returns:
        rows and events of the run, and the wall seconds of rank 0.
    """
    figures.SECONDS_BETWEEN = 0.0
    config = config_from(
        {
            "training.batch_size": 2,
            "training.global_batch_size": 8,
            "training.max_steps": steps,
            "precision.mode": "fp32",
            "training.eval_steps": None,
            "distributed.strategy": strategy,
            "checkpoint.save_strategy": "none",
            "monitor.sinks": ["jsonl"],
            "monitor.log_steps": 1,
            "training.warmup_steps": 1,
            **settings,
        }
    )
    trainer = Trainer(language_model("transformer"), config=config, output_dir=folder)
    if slow == "forward_backward" and dist.get_rank() == 1:
        trainer.placed.parts[0].register_forward_pre_hook(lambda *_: time.sleep(seconds / 2))
    trainer.train(SlowTokens(seconds) if slow == "data" else Tokens())
    dist.barrier()
    run = RunDirectory(Path(folder))
    return {"rows": run.read_metrics(), "events": run.read_events()}


def all_cases(folder: str, strategies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Every case in one launch; a rank computes slowly under each of the strategies."""
    cases: dict[str, dict[str, Any]] = {"ddp None": run_with(f"{folder}/ddp-None", "ddp", None, 8)}
    # A slow rank is far slower than the other one, which may be slow itself on a busy machine.
    usual = [row["step_seconds"] for row in cases["ddp None"]["rows"][1:]]
    seconds = max(_LEAST_SLOW_SECONDS, 3 * median(usual))
    slow_cases = [(strategy, "forward_backward") for strategy in strategies]
    for strategy, slow in (*slow_cases, ("ddp", "data")):
        case = run_with(f"{folder}/{strategy}-{slow}", strategy, slow, 8, seconds)
        cases[f"{strategy} {slow}"] = case | {"slow seconds": seconds}
    settings = {"monitor.gradient_norms": True, "monitor.profile": {"ranks": []}}
    cases["profiled"] = run_with(f"{folder}/profiled", "fsdp", None, 10, **settings)
    cases["profiled"]["files"] = sorted(p.name for p in Path(folder, "profiled/profile").iterdir())
    return cases
