"""Any class of transformers in a tiny size, and a batch that it takes with its labels. Nothing is fetched.

A config is shrunk by the names of its sizes; a batch is made by the names of the arguments of the forward pass. What
can be built neither way is reported with what the library says.
"""

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SAMPLES, LENGTH, CLASSES, VOCABULARY = 4, 10, 3, 96
_IMAGE, _PATCH = 32, 8

_SIZES: list[tuple[tuple[str, ...], int]] = [  # the first whose piece is in a name decides
    (("max_position", "n_positions", "n_ctx", "max_source_positions", "max_target_positions", "max_seq_len",
      "max_sequence_length", "context_length_max"), 64),
    (("num_key_value_heads", "num_kv_heads", "multi_query_group"), 4),
    (("experts_per_tok", "num_selected_experts", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    (("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    (("rotary_dim",), 4),
    (("head_dim", "d_kv", "attention_head_size", "dim_head", "head_size", "kv_channels"), 8),
    (("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads", "heads"), 4),
    (("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "n_layers", "num_blocks"), 2),
    (("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden", "mlp_dim", "ffn_size", "hidden_expansion"), 48),
    (("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "embedding_size", "projection_dim", "emb_dim",
      "decoder_hidden_size", "encoder_hidden_size"), 32),
    (("vocab_size",), VOCABULARY),
    (("image_size", "img_size"), _IMAGE),
    (("patch_size",), _PATCH),
]  # fmt: skip
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_types", "no_rope_layers")


def tiny_config(kind: type[Any], changed: dict[str, Any] | None = None) -> Any:
    """A config of the class in a tiny size; configs inside it are shrunk, too.

    Args:
        changed: sizes by which it differs from the rules; None for a name that keeps its default.
    """
    default = kind()
    changed = changed or {}
    values: dict[str, Any] = {}
    inside = getattr(kind, "sub_configs", None) or {}
    for name, value in default.to_dict().items():
        if (
            name in inside
            and isinstance(getattr(default, name, None), object)
            and hasattr(getattr(default, name, None), "to_dict")
        ):
            values[name] = tiny_config(type(getattr(default, name)), changed).to_dict()
        elif isinstance(value, bool) or name.startswith("_") or name in ("transformers_version", "model_type"):
            continue
        else:
            shrunk = changed[name] if name in changed else _shrunk(name, value)
            if shrunk is not None:
                values[name] = shrunk
    values |= {"use_cache": False}
    made = kind(**values)
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(made, name, None) is None:
            setattr(made, name, 0)
    return made


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, int):
        if name.endswith(("token_id", "token_index", "_id")):
            return min(value, VOCABULARY - 1) if value > 0 else None
        for pieces, size in _SIZES:
            if any(piece in name for piece in pieces):
                return min(value, size)
    if isinstance(value, list) and name in _PER_LAYER:
        distinct = list(dict.fromkeys(map(str, value)))
        return value[:2] if len(distinct) == 1 else [value[0], next(v for v in value if str(v) == distinct[-1])]
    if isinstance(value, list) and name in ("depths", "layers", "num_layers", "num_blocks"):
        return [1] * len(value)
    return None


class UnknownError(Exception):
    """A forward pass wants something that no rule makes."""


def batch_for(model: nn.Module, task: str) -> dict[str, Tensor]:
    """A batch of `SAMPLES` samples for the forward pass, with labels for the task, some of which are left out."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    parameters = inspect.signature(model.forward).parameters
    made: dict[str, Tensor] = {}
    vocabulary = _of(config, "vocab_size", VOCABULARY)
    ids = torch.randint(4, max(5, min(vocabulary, VOCABULARY) - 8), (SAMPLES, LENGTH), generator=generator)
    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in parameters and main not in ("pixel_values", "input_values", "input_features"):
        made["input_ids"] = ids
    side, channels = _of(config, "image_size", _IMAGE), _of(config, "num_channels", 3)
    side = side[0] if isinstance(side, list | tuple) else side
    shapes: dict[str, tuple[int, ...]] = {
        "pixel_values": (SAMPLES, channels, side, side),
        "pixel_values_videos": (SAMPLES, _of(config, "num_frames", 2), channels, side, side),
        "input_values": (SAMPLES, 1600),
        "input_features": (SAMPLES, _of(config, "num_mel_bins", 80), 2 * _of(config, "max_source_positions", 32)),
        "past_values": (SAMPLES, _of(config, "context_length", 16), _of(config, "num_input_channels", 1)),
        "future_values": (SAMPLES, _of(config, "prediction_length", 4), _of(config, "num_input_channels", 1)),
    }
    wanted = {main} if main != "input_ids" else set()
    wanted |= {"pixel_values"} if task in _BOTH else set()
    for name in sorted(wanted & shapes.keys() & parameters.keys()):
        made[name] = torch.randn(shapes[name], generator=generator)
    if task in _BOTH and "input_ids" in parameters:
        made["input_ids"] = ids
    if task == "MULTIPLE_CHOICE":
        made["input_ids"] = torch.stack([ids.roll(by, 1) for by in range(CLASSES)], dim=1)
    made |= _labels(task, parameters, ids, vocabulary, generator, side)
    return made


_BOTH = ("ZERO_SHOT_IMAGE_CLASSIFICATION", "VISUAL_QUESTION_ANSWERING", "MULTIPLE_CHOICE_IMAGE")


def _of(config: Any, name: str, default: Any) -> Any:
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", None) or {})):
        if part is not None and getattr(part, name, None) is not None:
            return getattr(part, name)
    return default


def _labels(
    task: str, parameters: Any, ids: Tensor, vocabulary: int, generator: torch.Generator, side: int
) -> dict[str, Tensor]:
    classes = torch.arange(SAMPLES) % CLASSES
    per_token = ids.clone()
    for row in range(SAMPLES):
        per_token[row, LENGTH - 2 * row :] = -100
    if task in (
        "CAUSAL_LM",
        "MASKED_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "SPEECH_SEQ_2_SEQ",
        "TEXT_TO_WAVEFORM",
        "MULTIMODAL_LM",
        "TEXT_RECOGNITION",
        "CTC",
    ):
        return {"labels": per_token}
    if task == "PRETRAINING":
        more = {"next_sentence_label": classes % 2, "sentence_order_label": classes % 2}
        return {"labels": per_token} | {k: v for k, v in more.items() if k in parameters}
    if task in ("TOKEN_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION"):
        return {"labels": torch.where(per_token < 0, per_token, per_token % CLASSES)}
    if "start_positions" in parameters:
        return {"start_positions": classes + 1, "end_positions": classes + 2}
    if task == "SEMANTIC_SEGMENTATION":
        labels = torch.randint(CLASSES, (SAMPLES, side, side), generator=generator)
        labels[1, : side // 2] = 255
        return {"labels": labels}
    if "labels" in parameters:
        return {"labels": classes % 2 if task == "NEXT_SENTENCE_PREDICTION" else classes}
    if "return_loss" in parameters:
        return {"return_loss": torch.tensor(True)}
    raise UnknownError("no rule makes labels for it")


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 4, "num_layers": 4, "num_key_value_heads": 2},
    {"hidden_size": None, "intermediate_size": None, "num_attention_heads": None, "head_dim": None, "num_heads": None,
     "num_key_value_heads": None, "embed_dim": None},
]  # fmt: skip
"""Sizes that are tried one after the other."""

LARGEST = 40_000_000  # parameters


def tiny(name: str, model_type: str, task: str = "") -> Any:
    """A model of the library's class with random values, in evaluation mode.

    Raises:
        UnknownError: it is large in all variants of its size, or the library does not have the class.
    """
    kind, config_kind = getattr(transformers, name, None), transformers.CONFIG_MAPPING[model_type]
    if kind is None:
        raise UnknownError("transformers does not export it")
    problem: Exception | None = None
    for variant in VARIANTS:
        try:
            config = tiny_config(config_kind, variant)
            config.num_labels = (
                2 if task.endswith("QUESTION_ANSWERING") or task == "NEXT_SENTENCE_PREDICTION" else CLASSES
            )
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(config).parameters()) if variant else 0
            if size > LARGEST:
                raise UnknownError(f"{size:,} parameters where its sizes are not shrunk")
            torch.manual_seed(0)
            return kind(config).float().eval()
        except Exception as error:  # whatever a config or a constructor of the library raises
            problem = problem or error
    assert problem is not None
    raise problem
