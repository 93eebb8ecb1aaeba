"""Small data and models on which strategies are compared; functions here run on every rank of a
test.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from lockstep.config import config_from
from lockstep.models import get_model
from lockstep.trainer import Trainer

VOCAB = 61
LENGTH = 16
SAMPLES = 83

# What the configs that ship train with, so that comparisons cover schedules, decay and clipping.
RECIPE = {
    "training.lr_schedule": "cosine",
    "training.weight_decay": 0.1,
    "training.gradient_clip": 1.0,
}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """83 samples whose first 0 to 6 targets do not count, so that micro-batches hold unequal
    numbers of them.
    """

    deterministic = True

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (self.length + 1,), generator=generator)
        targets = ids[1:].clone()
        targets[: index % 7] = -100
        return {"input_ids": ids[:-1], "targets": targets}


class Packed(Tokens):
    """The same, with two or three documents in each sample."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begins = torch.zeros(self.length, dtype=torch.int64)
        begins[[2 + index % 5, 9 + index % 4]] = 1
        return {**super().__getitem__(index), "document_ids": begins.cumsum(0) * 3 % 7}


def language_model(name: str, **args: Any) -> nn.Module:
    """A tiny model of the family, on meta; of the Hugging Face library by `hf:llama`."""
    if name.startswith("hf:"):
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        grouped = {"num_key_value_heads": 2, "block_size": LENGTH, "vocab_size": VOCAB}
        if name == "hf:gpt2":  # has other names, and no grouped heads
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
            grouped = {
                "block_size": LENGTH,
                "vocab_size": VOCAB,
            }
        torch.manual_seed(0)  # some families have no values on meta
        with torch.device("meta"):
            return get_model(name)(**{**sizes, **grouped, **args})
    common = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "dropout": 0.1}
    family = {
        "bdh": {"mlp_multiplier": 4},
        "transformer": {"n_kv_head": 2},
        "free_transformer": {"latent_bits": 4},
        "mixture": {
            "n_kv_head": 2,
            "n_expert": 4,
            "expert_hidden": 24,
            "n_shared": 1,
            "bias_rate": 1e-3,
        },
    }
    with torch.device("meta"):
        return get_model(name)(**{**common, **family[name], **args})


def unchecked(trainer: Trainer) -> Trainer:
    """Leave out the check of the loss in the first steps: it takes a tenth of a short run, and has
    tests of its own.
    """
    trainer.loss_check.skip()
    return trainer


def losses(
    settings: dict[str, Any], model: str = "transformer", steps: int = 20, **args: Any
) -> list[tuple[float, ...]]:
    """(loss, gradient norm, learning rate, tokens) of each step under `settings`, dotted keys of
    the config.
    """
    common = {
        "training.batch_size": 2,
        "training.global_batch_size": 24,
        "training.learning_rate": 1e-3,
        **RECIPE,
        "training.warmup_steps": 3,
        "training.max_steps": steps,
        "precision.mode": "fp32",
    }
    trainer = unchecked(
        Trainer(language_model(model, **args), config=config_from({**common, **settings}))
    )
    records = trainer.steps(Tokens())
    return [(float(r.loss), float(r.grad_norm), r.lr, float(r.tokens)) for r in records]


def many(cases: list[tuple[Any, ...]]) -> list[list[tuple[float, ...]]]:
    """`losses` of each case, one after the other in one process."""
    return [losses(*case[:2], **(case[2] if len(case) > 2 else {})) for case in cases]


def worst(one: list[tuple[float, ...]], other: list[tuple[float, ...]]) -> float:
    """The largest relative difference between two runs."""
    assert len(one) == len(other)
    return max(
        abs(a - b) / max(abs(b), 1e-12)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
