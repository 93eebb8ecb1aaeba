"""Configs of the Hugging Face library with every field away from its default, generated from the
fields themselves.
"""

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.decoders import decoder, sizes, transformers
from tests.parity.toy import VOCAB

LENGTH = 12
# What changes nothing of a forward pass without a cache, or is not the chain's: caches, initial
# values, other heads.
_OTHERS = (
    "use_cache",
    "initializer_range",
    "is_decoder",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
# With these a pipeline refuses a model.
_REFUSED = ("output_router_logits", "add_cross_attention")
_ROPES: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 3.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
]


def fields(family: str) -> dict[str, Any]:
    """The fields of a family's config that a tiny model leaves at their defaults."""
    config: Any = transformers.AutoConfig.for_model(family, **sizes(family))
    general = transformers.PretrainedConfig().to_dict()
    return {
        key: value
        for key, value in config.to_dict().items()
        if (key not in general or key == "tie_word_embeddings")
        and key not in _OTHERS
        and key not in _REFUSED
        and not key.startswith("summary_")
        and (key not in sizes(family) or key == "layer_types")
    }


def candidates(key: str, value: Any) -> list[Any]:
    """Other values of a field, the most telling first."""
    if key in ("rope_parameters", "rope_scaling"):
        return _other_ropes(value)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [0.3 * value + 0.05]
    if isinstance(value, int):
        return [3, 2, value + 1]
    if value is None:
        return [4, 2.0, True]
    if isinstance(value, str):
        return ["relu"]
    if key == "layer_types":
        return [["full_attention", "sliding_attention", "full_attention"]]
    if isinstance(value, list):
        return [[0, 1, 0], [1]]
    return []


def _other_ropes(value: dict[str, Any] | None) -> list[Any]:
    if value is None:  # of versions before 5
        return _ROPES
    if "rope_type" not in value:  # one for each kind of layer
        first = {
            kind: {**rope, "rope_theta": 300.0} for kind, rope in zip(value, _ROPES, strict=False)
        }
        return [first]
    kept = {key: value[key] for key in ("partial_rotary_factor",) if key in value}
    return [{**kept, **rope, "rope_theta": 300.0} for rope in _ROPES]


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def built(family: str, **args: Any) -> nn.Module:
    """A tiny model, no value of which is the same as another: no bias is zero, no norm one."""
    model = decoder(family, initializer_range=0.2, **args)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def outputs(family: str, args: dict[str, Any]) -> Tensor | None:
    """Logits in evaluation mode; None where the library can't build or run such a model."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits: Tensor = built(family, **args).eval()(input_ids=ids()).logits
    except Exception:  # whatever the library raises for values that do not fit together
        return None
    return logits if logits.isfinite().all() else None


def single_changes(family: str) -> Iterator[tuple[str, Any]]:
    """Each field with each other value."""
    for key, value in fields(family).items():
        yield from ((key, other) for other in candidates(key, value))


@functools.cache
def all_changes(family: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields with other values, all at once, and the names of those that change the outputs.

    Each field takes the first value with which the outputs differ; if there is none, one that the
    library takes.
    """
    args: dict[str, Any] = {}
    telling: list[str] = []
    before = outputs(family, args)
    assert before is not None, f"a tiny {family} can't be built"
    for key, value in fields(family).items():
        taken = None
        for other in candidates(key, value):
            made = outputs(family, {**args, key: other})
            if made is None:
                continue
            taken = other if taken is None else taken
            if not torch.equal(made, before):
                args[key] = other
                before = made
                telling.append(key)
                break
        else:
            if taken is not None:
                args[key] = taken
    return args, tuple(telling)
