"""Peaks of live tensors of real steps on real ranks, and what the plan says they will be."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import Config, config_from
from lockstep.layout import Layout
from lockstep.models import get_model
from lockstep.plan.rehearsal import rehearse
from lockstep.plan.stages import rehearse_rank
from lockstep.plan.tracker import Tracker
from lockstep.plan.workload import Workload
from lockstep.strategy import parse_topology, resolve
from lockstep.trainer import Trainer

LENGTH = 64
VOCABULARY = 256
SAMPLES = 64
COMMON = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": VOCABULARY, "dropout": 0.1}


class Tokens(Dataset[dict[str, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.full((LENGTH,), index % VOCABULARY)
        return {"input_ids": ids, "targets": ids}


class Images(Dataset[dict[str, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "image": torch.full((1, 32, 32), index / SAMPLES),
            "label": torch.tensor(index % 10),
        }


MODELS: dict[str, tuple[Callable[[], nn.Module], Dataset[Any]]] = {
    "bdh": (lambda: get_model("bdh")(**{**COMMON, "n_embd": 64}, mlp_multiplier=16), Tokens()),
    "transformer": (lambda: get_model("transformer")(**COMMON), Tokens()),
    "free_transformer": (lambda: get_model("free_transformer")(**COMMON, latent_bits=8), Tokens()),
    "mixture": (
        lambda: get_model("mixture")(**COMMON, router="sigmoid", bias_rate=0.01, n_shared=1),
        Tokens(),
    ),
    "vae": (lambda: get_model("vae")(image_size=32, channels=1, latent_dim=32), Images()),
}
FSDP = ("full_shard", "shard_grad_op", "no_shard")
PIPELINES = ("GPipe", "1F1B")


class Case(NamedTuple):
    model: str
    strategy: str  # ddp, a sharding strategy, a schedule, or a topology
    checkpointing: str
    accumulation: int = 2
    more: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Config:
        settings: dict[str, Any] = {"distributed.strategy": "ddp"}
        if ":" in self.strategy:
            settings = {
                f"distributed.{key}": value
                for key, value in parse_topology(self.strategy)[0].items()
            }
        elif self.strategy in FSDP:
            settings = {
                "distributed.strategy": "fsdp",
                "distributed.fsdp.sharding_strategy": self.strategy,
            }
        elif self.strategy != "ddp":
            settings = {
                "distributed.strategy": "pipeline",
                "distributed.pipeline.schedule": self.strategy,
            }
        return config_from(
            {
                **settings,
                "training.batch_size": 2,
                "training.gradient_accumulation_steps": self.accumulation,
                "training.gradient_checkpointing": self.checkpointing,
                "training.max_steps": 3,
                "precision.mode": "fp32",
                **dict(self.more),
            }
        )


def measure(cases: list[Case]) -> list[int | str]:
    """On every rank: the peak of live bytes in a third step."""
    return [_measured(case) for case in cases]


def _measured(case: Case) -> int | str:
    make, data = MODELS[case.model]
    try:
        with torch.device("meta"):
            model = make()
        with Tracker() as tracker:
            trainer = Trainer(model, config=case.config())
            steps = trainer.steps(data)
            next(steps)
            next(steps)
            tracker.restart()
            next(steps)
            peak = tracker.peak
            steps.close()  # type: ignore[attr-defined]
        return peak
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def predict(case: Case, ranks: int) -> list[int]:
    """Of each rank."""
    make, data = MODELS[case.model]
    work = Workload(make, data[0])
    config = case.config()
    layout: Layout = resolve(config.distributed, ranks)
    if layout.strategy == "pipeline":
        return [
            rehearse_rank(
                work,
                config,
                layout,
                rank * layout.pipeline // ranks,
                micro_batches=case.accumulation,
                device_type="cpu",
            ).peak.total
            for rank in range(ranks)
        ]
    return [
        rehearse(
            work, config, layout, micro_batches=case.accumulation, device_type="cpu"
        ).peak.total
    ] * ranks


def errors_of(case: Case, predicted: list[int], measured: list[int]) -> list[float]:
    """Of each rank; where loads of experts differ, of the mean over ranks."""
    if "expert" in case.strategy:
        return [sum(predicted) / sum(measured) - 1]
    return [p / m - 1 for p, m in zip(predicted, measured, strict=True)]


# On four ranks: which models are cut how.
AXES = {
    "transformer": (
        "tensor:4",
        "ddp:2*tensor:2",
        "fsdp:2*tensor:2",
        "pipeline:2*tensor:2",
        "context:4",
        "ddp:2*context:2",
        "fsdp:2*context:2",
        "pipeline:2*context:2",
        "context:2*tensor:2",
    ),
    "mixture": (
        "ddp:4*expert:2",
        "ddp:4*expert:4",
        "fsdp:4*expert:2",
        "fsdp:4*expert:4",
        "hybrid:2x2*expert:2",
        "fsdp:2*tensor:2*expert:2",
        "pipeline:2*ddp:2*expert:2",
        "pipeline:2*fsdp:2*expert:2",
        "fsdp:2*tensor:2",
    ),
}


def grid(ranks: int) -> list[Case]:
    """Every model under every strategy; on four ranks, models cut along tensor, context
    and expert.
    """
    strategies = dict.fromkeys(MODELS, ("ddp", *FSDP, *PIPELINES)) if ranks == 2 else AXES
    return [
        Case(
            model,
            strategy,
            checkpointing,
            4 if strategy in PIPELINES or "pipeline" in strategy else 2,
        )
        for model, these in strategies.items()
        for strategy in these
        for checkpointing in ("none", "full")
    ]
