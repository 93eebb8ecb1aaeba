"""Reproducible runs of models in which one activation is used by many blocks, or whose parameters
are not float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import config_from
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer
from tests.parity.same_bits import Bits, digest
from tests.ranks import run_ranks
from tests.sampled import sampled


class Attends(nn.Module):
    """Attends to a memory [B, M, 16], of which keys and values are made."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x) @ self.key(memory).transpose(-1, -2), -1)
        return torch.tanh(x + weights @ self.value(memory))


class Decoder(nn.Module):
    """x [B, T, 16] → [B, T, 16]; all blocks use one memory, and run `rounds` times."""

    def __init__(self, rounds: int = 1) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 16)
        self.rounds = rounds
        self.layers = nn.ModuleList(Attends() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(x))
        for layer in [*self.layers] * self.rounds:
            x = layer(x, memory=memory)
        return x


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(index)).to(self._dtype)
        return x, y


class Sequences(Dataset[dict[str, Tensor]]):
    deterministic = True

    def __init__(self, source: str) -> None:
        self._source = source

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        source = torch.randn(8, 40, generator=generator)
        if self._source == "input_ids":
            source = torch.randint(2, 60, (12,), generator=generator)
        return {self._source: source, "labels": torch.randint(2, 60, (8,), generator=generator)}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    layers = {"num_layers": 2, "num_decoder_layers": 3}
    return T5ForConditionalGeneration(
        T5Config(**sizes, **layers, decoder_start_token_id=0, pad_token_id=0)
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    half = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    halves = {
        f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in half.items()
    }
    sizes = {
        "vocab_size": 64,
        "num_mel_bins": 8,
        "d_model": 16,
        "max_source_positions": 20,
        "max_target_positions": 16,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return WhisperForConditionalGeneration(WhisperConfig(**halves, **sizes, **tokens, dropout=0.1))


MODELS: dict[str, tuple[Any, Any]] = {
    "T5": (t5, lambda: Sequences("input_ids")),
    "Whisper": (whisper, lambda: Sequences("input_features")),
    "decoder": (Decoder, lambda: Pairs(torch.float32)),
    "decoder, twice": (lambda: Decoder(2), lambda: Pairs(torch.float32)),
    "decoder in float64": (lambda: Decoder().double(), lambda: Pairs(torch.float64)),
    "decoder in bfloat16": (lambda: Decoder().bfloat16(), lambda: Pairs(torch.bfloat16)),
}


def bits(topology: str, model: str) -> Bits:
    make, data = MODELS[model]
    torch.manual_seed(0)
    values, _ = parse_topology(topology)
    settings = {
        "training.batch_size": 2,
        "training.global_batch_size": 12,
        "training.learning_rate": 3e-3,
        "training.max_steps": 3,
        "precision.mode": "fp32",
        "distributed.reproducible": True,
        **{f"distributed.{key}": value for key, value in values.items()},
    }
    loss_fn = None if model in ("T5", "Whisper") else nn.MSELoss()
    trainer = Trainer(make(), config=config_from(settings), loss_fn=loss_fn)
    records = [(float(r.loss).hex(), float(r.grad_norm).hex()) for r in trainer.steps(data())]
    return digest(trainer), records


def all_on(topology: str, models: list[str]) -> dict[str, Bits]:
    return {model: bits(topology, model) for model in models}


@sampled("models", list(MODELS), 6)
def test_trap_70_what_blocks_share_has_the_same_gradient_within_units_and_without(
    models: list[str],
) -> None:
    """FSDP2 adds up a block's uses of the memory before it adds what other blocks make of it."""
    alone = all_on("single", models)
    for found in run_ranks(all_on, 2, "fsdp:2", models):
        for model, expected in alone.items():
            assert found[model] == expected, model
