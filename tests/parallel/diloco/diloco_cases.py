"""Runs of workers that train by themselves; functions here run on every rank of a test."""

import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint import digest_tensors
from lockstep.config import config_from
from lockstep.data import SampleOrder
from lockstep.trainer import Trainer
from tests.hosts import INTERFACE, sent_bytes
from tests.parity.toy import RECIPE, Tokens, language_model

Run = tuple[str, list[tuple[str, str]], str]
"""Digest of the common model, (loss, gradient norm) of each step, and loss on the data at the end.

Loss and gradient norm are exact text.
"""


class Normalised(nn.Module):
    """Batch normalisation, whose statistics are each worker's own between exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Points(torch.utils.data.Dataset[Any]):
    deterministic = True

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 3


def trainer_for(settings: dict[str, Any], model: str = "transformer", **args: Any) -> Trainer:
    common = {
        "training.batch_size": 2,
        "training.global_batch_size": 16,
        "training.learning_rate": 3e-3,
        **RECIPE,
        "training.warmup_steps": 3,
        "training.max_steps": 14,
        "precision.mode": "fp32",
        "distributed.strategy": "diloco",
        "distributed.divergence_check_steps": 1,
        "distributed.diloco.inner_steps": 4,
        "distributed.diloco.workers": 2,
    }
    config = config_from({**common, **settings})
    if model == "normalised":
        torch.manual_seed(7)
        return Trainer(Normalised(), loss_fn=nn.functional.cross_entropy, config=config)
    return Trainer(language_model(model, **args), config=config)


def data_for(model: str) -> Any:
    return Points() if model == "normalised" else Tokens()


def finished(trainer: Trainer, records: list[Any], model: str) -> Run:
    numbers = [(float(r.loss).hex(), float(r.grad_norm).hex()) for r in records]
    return (
        digest_tensors(trainer.placed.kept().items()),
        numbers,
        trainer.evaluate(data_for(model)).hex(),
    )


def run(settings: dict[str, Any], model: str = "transformer") -> Run:
    """From scratch to the end."""
    trainer = trainer_for(settings, model)
    return finished(trainer, list(trainer.steps(data_for(model))), model)


def interrupted(folder: str, at: int, settings: dict[str, Any], model: str = "transformer") -> Run:
    """A run that saves after `at` steps, evaluates, and goes on; then another that goes on from
    there.
    """
    first = trainer_for(settings, model)
    before = list(islice(first.steps(data_for(model)), at))
    first.save_checkpoint(folder)
    first.evaluate(data_for(model))
    return resumed(folder, before, settings, model)


def resumed(
    folder: str, before: list[Any], settings: dict[str, Any], model: str = "transformer"
) -> Run:
    second = trainer_for(settings, model)
    second.load_checkpoint(folder)
    return finished(second, [*before, *second.steps(data_for(model))], model)


def bytes_a_step(cases: dict[str, tuple[dict[str, Any], int]]) -> dict[str, float]:
    """Bytes that this host puts on its link per step, over as many steps as lie between two
    exchanges, and the model's size.

    An empty dictionary where this process is on no host with a link of its own.
    """
    if not Path(f"/sys/class/net/{INTERFACE}").exists() or dist.get_world_size() < 2:
        return {}
    found: dict[str, float] = {}
    few = {"training.global_batch_size": 2, "training.batch_size": 1, "training.warmup_steps": 0}
    for name, (settings, steps) in cases.items():
        trainer = trainer_for(
            {**few, "training.max_steps": 2 * steps + 1, **settings}, n_embd=256, n_layer=2
        )
        found["parameters"] = trainer.placed.num_parameters
        loop = iter(trainer.steps(Tokens()))
        for _ in range(3):  # DDP cuts its buckets anew
            next(loop)
        before = _settled()
        for _ in range(steps):
            next(loop)
        found[name] = (_settled() - before) / steps
    return found


def _settled() -> int:
    dist.barrier()
    time.sleep(0.2)
    return sent_bytes()


def step_by_step(steps: int) -> tuple[str, str]:
    """A run of whole steps, and the same one through `training_step`, a micro-batch at a time:
    digests.
    """
    settings = {"training.global_batch_size": None, "training.gradient_accumulation_steps": 4}
    settings |= {
        "training.warmup_steps": 0,
        "training.lr_schedule": "constant",
        "training.max_steps": steps,
    }
    whole = trainer_for(settings)
    for _ in whole.steps(Tokens()):
        pass
    trainer = trainer_for(settings)
    data = Tokens()
    order = SampleOrder(len(data), 2, 16, seed=trainer.config.training.seed)
    for step in range(steps):
        for index, _ in trainer.placed.assign(8):
            rows = [data[i] for i in order.samples_of(step).micro_batches[index]]
            trainer.training_step({key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    both = [digest_tensors(one.placed.kept().items()) for one in (whole, trainer)]
    return both[0], both[1]


def all_of(
    cases: dict[str, tuple[Any, ...]],
    folder: str,
    saved: tuple[Any, ...],
    sent: dict[str, tuple[dict[str, Any], int]],
) -> dict[str, Any]:
    """All that is looked at on these ranks, in one launch."""
    return {
        "runs": {name: run(*case) for name, case in cases.items()},
        "interrupted": interrupted(folder, *saved),
        "steps": step_by_step(4) if dist.get_world_size() == 2 else None,
        "bytes": bytes_a_step(sent),
    }


def on_ranks(cases: dict[str, tuple[Any, ...]]) -> dict[str, Run]:
    """Each case."""
    return {name: run(*case) for name, case in cases.items()}
