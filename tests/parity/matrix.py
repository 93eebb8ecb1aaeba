"""Models and data-parallel strategies that are compared with one process, and what runs a case of
it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import config_from
from lockstep.models import get_model
from lockstep.trainer import Trainer
from tests.parity.toy import RECIPE, SAMPLES, VOCAB, Tokens, language_model, unchecked
from tests.ranks import results_or_errors

STEPS = 5

# From torch 2.14 on, code that is compiled and recomputed draws by the eager generator, not by the
# compiler's own.
COMPILED_RECOMPUTATION_DRAWS_ANEW = torch.__version__ >= "2.14"

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"distributed.strategy": "ddp"},
    **{
        kind: {"distributed.strategy": "fsdp", "distributed.fsdp.sharding_strategy": kind}
        for kind in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")
    },
    "accelerate": {"distributed.strategy": "accelerate"},
}


class Images(Dataset[dict[str, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "image": torch.rand(1, 16, 16, generator=generator),
            "label": torch.tensor(index % 10),
        }


def tied() -> nn.Module:
    return language_model("transformer", tie_embeddings=True)


def vae() -> nn.Module:
    with torch.device("meta"):
        return get_model("vae")(image_size=16, channels=1, latent_dim=4)


def llama() -> nn.Module:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    with torch.device("meta"):
        return get_model("hf:llama")(
            vocab_size=VOCAB,
            block_size=16,
            attention_dropout=0.1,
            tie_word_embeddings=True,
            **sizes,
        )


MODELS: dict[str, tuple[Callable[[], nn.Module], type[Dataset[dict[str, Tensor]]]]] = {
    "bdh": (lambda: language_model("bdh"), Tokens),
    "transformer": (lambda: language_model("transformer"), Tokens),
    "tied": (tied, Tokens),
    "free_transformer": (lambda: language_model("free_transformer"), Tokens),
    "mixture": (lambda: language_model("mixture"), Tokens),
    "vae": (vae, Images),
    "hf": (llama, Tokens),
}


class Case(NamedTuple):
    model: str
    strategy: str
    accumulation: int
    checkpointing: str
    more: tuple[tuple[str, Any], ...] = ()  # further keys of the config
    steps: int = STEPS

    def micro_batches(self, ranks: int) -> int:
        return self.accumulation * ranks


class Result(NamedTuple):
    steps: list[tuple[float, float, float]]  # loss, gradient norm, valid targets
    layout: str
    num_parameters: int
    log_lines: list[str]


def run(case: Case, micro_batches: int) -> Result:
    """A few steps of `case`, on this rank, with `micro_batches` in a step over all ranks."""
    make, data = MODELS[case.model]
    settings = {
        "training.batch_size": 2,
        "training.global_batch_size": 2 * micro_batches,
        "training.learning_rate": 3e-3,
        **RECIPE,
        "training.max_steps": case.steps,
        "training.gradient_checkpointing": case.checkpointing,
        "precision.mode": "fp32",
        # Where a gradient is zero but for rounding, Adam divides noise by noise. In the VAE that
        # moves weights enough for a ReLU to open in one run and not in the other: its loss is the
        # same to 1e-8, its gradient is not.
        "training.optimizer_args": {"eps": 1e-5} if case.model == "vae" else {},
        **STRATEGIES.get(case.strategy, {"distributed.strategy": case.strategy}),
        **dict(case.more),
    }
    trainer = unchecked(Trainer(make(), config=config_from(settings)))
    steps = [(float(r.loss), float(r.grad_norm), float(r.tokens)) for r in trainer.steps(data())]
    return Result(
        steps, str(trainer.layout), trainer.placed.num_parameters, trainer.placed.log_lines
    )


def run_all(cases: list[Case]) -> list[Result | str]:
    """On every rank: all cases, one after the other; an error is that case's result."""
    ranks = torch.distributed.get_world_size()
    return results_or_errors(run, ((case, case.micro_batches(ranks)) for case in cases))


def reference(case: Case, micro_batches: int) -> Result:
    """What one process makes of it, without checkpointing, or with it where that changes what is
    drawn.
    """
    compiled = ("training.compile", True) in case.more
    checkpointing = case.checkpointing if compiled and COMPILED_RECOMPUTATION_DRAWS_ANEW else "none"
    return _alone(
        Case(case.model, "single", 1, checkpointing, case.more, case.steps), micro_batches
    )


@cache
def _alone(case: Case, micro_batches: int) -> Result:
    return run(case, micro_batches)


def difference(one: Result, other: Result) -> float:
    """The largest relative difference of a loss, a norm or a count."""
    pairs = [
        (a, b)
        for x, y in zip(one.steps, other.steps, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)
