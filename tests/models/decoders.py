"""Tiny decoders of the Hugging Face library, by their own classes."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.models.hf_layers import PLANS_ARE_WHOLE_SINCE
from tests.parity.toy import VOCAB

transformers = pytest.importorskip("transformers")

# Families whose layers the library's own plan does not name whole in the version that is installed.
NOT_PLANNED: tuple[str, ...] = (
    ("qwen3", "qwen3_moe", "mixtral")
    if int(transformers.__version__.partition(".")[0]) < PLANS_ARE_WHOLE_SINCE
    else ()
)

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GPT2: dict[str, Any] = {
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_HEADS: dict[str, Any] = {"head_dim": 8}
_MORE: dict[str, dict[str, Any]] = {
    "gemma": _HEADS,
    "gemma2": {**_HEADS, "sliding_window": 4},
    "glm4": _HEADS,
    "qwen3": _HEADS,
    "gemma3_text": {
        **_HEADS,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {**_HEADS, "num_local_experts": 4, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_HEADS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
}


def sizes(family: str, **args: Any) -> dict[str, Any]:
    """The config of a tiny model, of three layers unless `args` say otherwise."""
    if family == "gpt2":
        return {**_GPT2, **args}
    found = {**_SIZES, **_MORE.get(family, {}), **args}
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][: found["num_hidden_layers"]]
    if family == "gpt_neox":
        del found["num_key_value_heads"]
    return found


def decoder(family: str, **args: Any) -> nn.Module:
    """A model of the library with random values, always the same."""
    torch.manual_seed(3)
    config: Any = transformers.AutoConfig.for_model(family, **sizes(family, **args))
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    return made
