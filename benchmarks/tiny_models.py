"""Any class of transformers in a tiny size, and a batch that it takes with its labels. Nothing is
fetched.

A config is shrunk by the names of its sizes. A batch is made by the names of the arguments of the
forward pass, and of the tensors that the model returns without labels. Several sizes and batches
are tried in turn; what none of them builds is reported with what the library says.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SAMPLES = 4
LENGTH = 10
CLASSES = 3
VOCABULARY = 96
_LAYERS = 2
_IMAGE = 32
_PATCH = 8
# Of a wave, and of its features.
_SOUND = 8000
_FRAMES = 64

_SIZES: list[tuple[tuple[str, ...], int]] = [  # the first whose piece is in a name decides
    (
        (
            "max_position",
            "n_positions",
            "n_ctx",
            "max_source_positions",
            "max_target_positions",
            "max_seq_len",
            "max_sequence_length",
            "context_length_max",
        ),
        64,
    ),
    (("num_key_value_heads", "num_kv_heads", "multi_query_group"), 4),
    (("topk_group", "num_limited_groups"), 1),
    (("n_group", "num_expert_group"), 2),
    (
        (
            "experts_per_tok",
            "num_selected_experts",
            "moe_topk",
            "moe_k",
            "top_k_experts",
            "num_experts_per_token",
        ),
        2,
    ),
    (("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    (("rotary_dim",), 4),
    (("num_queries",), 5),
    (("context_size",), 16),
    (("qk_head_dim",), 16),
    (("head_dim", "d_kv", "attention_head_size", "dim_head", "head_size", "kv_channels"), 8),
    (
        (
            "num_attention_heads",
            "num_heads",
            "n_head",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "heads",
        ),
        4,
    ),
    (
        (
            "num_hidden_layers",
            "num_layers",
            "n_layer",
            "encoder_layers",
            "decoder_layers",
            "n_layers",
            "num_blocks",
        ),
        _LAYERS,
    ),
    (
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "n_inner",
            "ffn_hidden",
            "mlp_dim",
            "ffn_size",
            "hidden_expansion",
        ),
        48,
    ),
    (
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "hidden_dim",
            "embedding_size",
            "projection_dim",
            "emb_dim",
            "decoder_hidden_size",
            "encoder_hidden_size",
        ),
        32,
    ),
    (("vocab_size",), VOCABULARY),
    (("image_size", "img_size"), _IMAGE),
    (("patch_size", "encoder_stride"), _PATCH),
]
_PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "block_types",
    "attention_types",
    "no_rope_layers",
)
# lists of widths, which are as wide as one likes
_WIDTHS = ("conv_dim", "tdnn_dim", "decoder_in_channels")
_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 32,
    "hidden_sizes": [32, 48, 64, 96],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
"""It stands for backbones of the package timm."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "align_vision_model": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "donut-swin": {"embed_dim": 24, "window_size": 2, "patch_size": 4},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": VOCABULARY - 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "intermediate_size": [48, 48],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    **dict.fromkeys(
        (
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen2_5_omni_text",
            "glm4v_text",
            "glm_ocr_text",
            "paddleocr_vl_text",
        ),
        _SECTIONS,
    ),
    "glm4v_moe_text": {
        "rope_parameters": _ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5": {"encoder_config": {"context_size": 16}},
    "hiera": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 4},
    "instructblip": {"image_token_index": 90},
    "instructblipvideo": {"video_token_index": 90},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kosmos-2": {"latent_query_num": 4},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": _IMAGE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "lw_detr_vit": {"num_windows": 4},
    "mamba2": {"num_heads": 8, "state_size": 16, "chunk_size": 16},
    "mimi": {"upsample_groups": 32},
    "mistral4": {"head_dim": 16},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "maskformer-swin": {"embed_dim": 24, "window_size": 2, "patch_size": 4},
    "patchtst": {"num_targets": CLASSES},
    "perceiver": {
        "num_cross_attention_heads": 1,
        "num_latents": 8,
        "d_latents": 32,
        "num_blocks": 1,
    },
    "pix2struct_vision_model": {"patch_embed_hidden_size": 768},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 5,
        "lsh_attn_chunk_length": 5,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16, 16],
            "upsample_kernel_sizes": [4, 4],
            "conv_out_channels": [16],
            "conv_kernel_sizes": [1],
        }
    },
    "swin": {"embed_dim": 24, "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 24, "window_size": 2, "patch_size": 4},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "kv_channels": 8,
        "num_query_groups": 4,
        "mamba_d_state": 8,
        "adapter_rank": 8,
    },
}
"""By model type: sizes that no rule finds."""
TRAINING = ("reformer",)  # whose authors let them train in training mode alone


def tiny_config(kind: type[Any], changed: dict[str, Any] | None = None, default: Any = None) -> Any:
    """A config of the class in a tiny size; configs inside it are shrunk, too.

    Args:
        default: the config that is shrunk; None for the class's own.
        changed: sizes by which it differs from the rules; None for a name that keeps its default.
    """
    changed = changed or {}
    own_values = default is not None  # by which the config around it sets it
    default = default or _default(kind)
    inside = getattr(kind, "sub_configs", None) or {}
    described = default.to_dict()
    depth = _depth(described)
    values: dict[str, Any] = {}
    for name, value in described.items():
        own = getattr(default, name, None) if name in inside else None
        if name in changed:
            shrunk = changed[name]
        elif name in inside and hasattr(own, "to_dict"):
            timm = getattr(own, "model_type", "").startswith("timm")
            shrunk = dict(_BACKBONE) if timm else tiny_config(type(own), changed, own).to_dict()
        elif isinstance(value, bool) and own_values and not name.startswith("_"):
            shrunk = value
        elif (
            isinstance(value, bool)
            or name.startswith("_")
            or name in ("transformers_version", "model_type")
        ):
            continue
        else:
            shrunk = _shrunk(name, value, depth, changed)
        if shrunk is not None:
            values[name] = shrunk
    stages = getattr(default, "out_features", None) or ()
    if len(stages) > 1:  # a backbone's
        layers = isinstance(described.get("num_hidden_layers"), int)
        values |= {"num_hidden_layers": len(stages)} if layers else {}
        values["out_features"] = (
            [f"stage{at + 1}" for at in range(len(stages))] if layers else list(stages)
        )
        values.pop("out_indices", None)
    if described.get("head_dim", 0) is None and "head_dim" not in changed:
        values["head_dim"] = 8
    values |= {"use_cache": False} | EXCEPTIONS.get(kind.model_type, {})
    made = kind(**values)
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(made, name, None) is None:
            setattr(made, name, 0)
    return made


def _default(kind: type[Any]) -> Any:
    try:
        default = kind()
    except ImportError:  # its backbone is a package's
        return kind(use_timm_backbone=False, backbone_config=dict(_BACKBONE))
    return default


def _depth(described: dict[str, Any]) -> int:
    """The number of layers of a config, as long as which some of its lists are."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        if isinstance(described.get(name), int):
            return int(described[name])
    return 0


def _shrunk(name: str, value: Any, depth: int, changed: dict[str, Any]) -> Any:
    if isinstance(value, float) and ("drop" in name and "layerdrop" not in name):
        return 0.0
    if isinstance(value, int):
        if name.endswith(("token_id", "token_index", "_id")):
            return min(value, VOCABULARY - 1) if value > 0 else None
        for pieces, size in _SIZES:
            if any(piece in name for piece in pieces):
                return min(value, size)
    if isinstance(value, dict):
        return _shrunk_rope(value, changed)
    if not isinstance(value, list) or not value:
        return None
    if name in _WIDTHS:
        return [32] * len(value)
    if name in _PER_LAYER or (len(value) == depth and depth > 4):
        return _some(value, changed.get("num_hidden_layers", _LAYERS) or len(value))
    if name in ("depths", "layers", "num_layers", "num_blocks"):
        return [1] * len(value)
    return None


def _shrunk_rope(value: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any] | None:
    """Parameters of rotary embeddings: the sections of a head's dims shrink with it."""
    sections = value.get("mrope_section")
    if sections is None or changed.get("head_dim", 8) is None:
        return None
    return value | {
        "mrope_section": [2] + [1] * (len(sections) - 2) + [1] if len(sections) < 4 else [1] * 4
    }


def _some(value: list[Any], layers: int) -> list[Any]:
    """One for each layer, each kind at least once where there is room."""
    kinds = list({str(v): v for v in value}.values())
    return (kinds + value)[:layers] if len(kinds) > 1 else value[:layers]


class UnknownError(Exception):
    """A forward pass wants something that no rule makes."""


def batch_for(model: nn.Module, task: str) -> dict[str, Any]:
    """The first of `batches`."""
    return next(batches(model, task))


def batches(model: nn.Module, task: str) -> Iterator[dict[str, Any]]:
    """Batches of `SAMPLES` samples for the forward pass, with labels for the task, some of which
    are left out.

    They hold what the forward pass needs at least, then all that a rule makes for it, in each of
    the shapes that arguments of the name have.
    """
    parameters = inspect.signature(model.forward).parameters
    making = _Making(model, task, parameters)
    needed = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }
    named = getattr(model, "main_input_name", "input_ids")
    mains = {named} if isinstance(named, str) else set(named)
    main = next(iter(sorted(mains & parameters.keys())), next(iter(parameters)))
    least = {main} | (mains & parameters.keys()) | needed | (_OFTEN & parameters.keys())
    if task in ("TEXT_TO_SPECTROGRAM", "CTC", "RNNT", "TDT"):
        least |= {"attention_mask"} & {name for name in parameters if making.can(name)}
    if task in _BOTH:
        least |= {"pixel_values", "input_ids"} & parameters.keys()
    if "text_config" in making.inside and "input_ids" in parameters:
        least |= {"input_ids"}
    elif main == "input_ids" and task not in _BOTH:
        least -= {"pixel_values"} - needed
    tried: list[set[str]] = []
    for names in (
        least,
        least | {"input_ids"},
        least | {"pixel_values"},
        least | {"decoder_input_ids"},
        least | {"input_values"},
        {*parameters},
    ):
        names = {name for name in names & parameters.keys() if making.can(name)}
        if names in tried:
            continue
        tried.append(names)
        yield from making.batches(names)


_OFTEN = {
    "bbox",
    "visual_feats",
    "visual_pos",
    "visual_embeds",
    "flattened_patches",
    "mask_time_indices",
    "sampled_negative_indices",
    "qformer_input_ids",
    "past_values",
    "bool_masked_pos",
    "spatial_shapes",
    "pixel_attention_mask",
    "image_embeds_position_mask",
}
_BOTH = (
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "VISUAL_QUESTION_ANSWERING",
    "MULTIPLE_CHOICE_IMAGE",
    "ZERO_SHOT_OBJECT_DETECTION",
)
_PER_TOKEN = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SPEECH_SEQ_2_SEQ",
    "TEXT_TO_WAVEFORM",
    "MULTIMODAL_LM",
    "TEXT_RECOGNITION",
    "CTC",
    "RNNT",
    "TDT",
    "CAUSAL_IMAGE_MODELING",
    "PRETRAINING",
)
_OBJECTS = (1, 2, 3, 1)  # in each sample


class _Making:
    """Makes the arguments of one model's forward pass.

    Attributes:
        inside: names of the configs inside the model's.
    """

    def __init__(self, model: nn.Module, task: str, parameters: Any) -> None:
        self._model = model
        self._task = task
        self._parameters = parameters
        self._config: Any = model.config
        self.inside = set(getattr(self._config, "sub_configs", None) or {})
        self._random = torch.Generator().manual_seed(0)
        side = self.of("image_size", _IMAGE)
        self._side = int(side[0] if isinstance(side, list | tuple) else side)
        vocabulary = int(self.of("vocab_size", VOCABULARY))
        self._ids = torch.randint(
            4, max(5, min(vocabulary, VOCABULARY) - 8), (SAMPLES, LENGTH), generator=self._random
        )
        self._made: dict[str, list[Any]] = {}

    def of(self, name: str, default: Any) -> Any:
        """A value of the config, or of one inside it."""
        return _of(self._config, name, default)

    def can(self, name: str) -> bool:
        """Whether a rule makes the argument."""
        return bool(self._options(name))

    def batches(self, names: set[str]) -> Iterator[dict[str, Any]]:
        """Batches with these arguments: the first option of each, then the second …; with each
        option of labels.
        """
        options = {name: self._options(name) for name in sorted(names)}
        for number in range(max(map(len, options.values()), default=0)):
            inputs = {name: made[min(number, len(made) - 1)] for name, made in options.items()}
            if "pixel_values" in inputs and "input_ids" in inputs:
                inputs = self._with_image_tokens(inputs)
            for labels in self._labels(inputs):
                yield inputs | labels

    def _options(self, name: str) -> list[Any]:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(SAMPLES, *shape, generator=self._random)

    def _make(self, name: str) -> list[Any]:
        of = self.of
        channels = int(of("num_channels", 3))
        side = self._side
        if name in ("pixel_values", "pixel_values_videos"):
            if "spatial_shapes" in self._parameters:  # images in patches
                return [self._floats(16, channels * int(of("patch_size", _PATCH)) ** 2)]
            image = (channels, side, side)
            video = (int(of("num_frames", of("frames_per_clip", 1))), channels, side, side)
            return [
                self._floats(*shape)
                for shape in ((video, image) if "video" in name else (image, video))
            ]
        if name == "spatial_shapes":
            return [torch.full((SAMPLES, 2), 4)]
        if (
            name in ("pixel_attention_mask", "spatial_shapes")
            and "spatial_shapes" in self._parameters
        ):
            return [torch.ones(SAMPLES, 16, dtype=torch.long)]
        if name == "input_values":
            mels = (of("num_mel_bins", 0), of("max_length", 0))
            return [self._floats(mels[1], mels[0])] * all(mels) + [
                self._floats(_SOUND),
                self._floats(1, _SOUND),
            ]
        if name == "input_features":
            return [self._floats(*shape) for shape in self._sounds()]
        if name == "input_ids":
            return self._texts()
        if name in ("decoder_input_ids", "qformer_input_ids"):
            return [self._ids]
        if name == "flattened_patches":
            return [self._floats(LENGTH, channels * int(of("patch_size", 16)) ** 2 + 2).abs()]
        if name in ("mask_time_indices", "sampled_negative_indices"):
            frames = int(self._model._get_feat_extract_output_lengths(torch.tensor(_SOUND)))
            if name == "sampled_negative_indices":
                return [
                    torch.randint(
                        frames,
                        (SAMPLES, frames, int(of("num_negatives", 2))),
                        generator=self._random,
                    )
                ]
            masked = torch.arange(frames) < torch.arange(2, 2 + SAMPLES)[:, None]
            return [masked]
        if name == "task_inputs":
            return [self._ids.new_ones(SAMPLES, int(of("task_seq_len", LENGTH)))]
        if name == "attention_mask" and self._task == "TEXT_TO_SPECTROGRAM":
            return [torch.ones_like(self._ids)]
        if (
            name == "attention_mask"
            and self._task in ("CTC", "RNNT", "TDT")
            and "input_features" in self._parameters
        ):
            return [torch.ones(SAMPLES, _FRAMES, dtype=torch.long)]
        if name == "image_embeds_position_mask":
            return [
                (torch.arange(LENGTH) < int(of("latent_query_num", 4))).long().expand(SAMPLES, -1)
            ]
        if name == "bbox":
            corners = torch.arange(LENGTH * SAMPLES).view(SAMPLES, LENGTH, 1)
            return [torch.cat([corners, corners, corners + 3, corners + 5], dim=-1)]
        if name == "visual_feats":
            return [self._floats(5, int(of("visual_feat_dim", 32)))]
        if name == "visual_pos":
            return [self._floats(5, int(of("visual_pos_dim", 4)))]
        if name == "visual_embeds":
            return [self._floats(5, int(of("visual_embedding_dim", 32)))]
        if name == "bool_masked_pos":
            patches = (side // int(_first(of("patch_size", _PATCH)))) ** 2
            patches *= max(1, int(of("num_frames", 1)) // max(1, int(of("tubelet_size", 1))))
            several = torch.zeros(SAMPLES, patches, dtype=torch.bool)
            for row in range(SAMPLES):
                several[row, : 1 + row * patches // (2 * SAMPLES)] = True
            alike = torch.zeros(SAMPLES, patches, dtype=torch.bool)
            alike[:, : patches // 2] = True
            return [several, alike]
        if name in self._series():
            return self._series()[name]
        return []

    def _sounds(self) -> Iterator[tuple[int, int]]:
        """Shapes of features of sound: the feature first, as Whisper has it, or last."""
        names = (
            "feature_projection_input_dim",
            "num_mel_bins",
            "input_feat_per_channel",
            "input_dim",
            "feature_size",
        )
        sizes = dict.fromkeys(int(size) for name in names for size in [self.of(name, 0)] if size)
        for size in sizes or (80,):
            yield size, 2 * int(self.of("max_source_positions", 32))
            yield _FRAMES, size

    def _texts(self) -> list[Tensor]:
        ids = self._ids
        if self._task == "MULTIPLE_CHOICE":
            return [
                torch.stack([marked.roll(by, 1) for by in range(CLASSES)], dim=1)
                for marked in (ids, self._marked())
            ]
        codebooks = int(self.of("num_codebooks", 0))
        sounds = [torch.stack([ids] * codebooks, dim=-1)] if codebooks else []
        return [ids, self._marked(), *sounds]

    def _marked(self) -> Tensor:
        """Texts in three sentences, each with its end; after the mark of a question."""
        ids = self._ids.clone()
        end = self.of("sep_token_id", None) or _first(self.of("eos_token_id", 2))
        ids[:, [3, 6, -1]] = end
        if (question := self.of("question_token_id", None)) is not None:
            ids[:, 1] = question
        return ids

    def _series(self) -> dict[str, list[Any]]:
        of = self.of
        context = int(of("context_length", 16))
        horizon = int(_first(of("prediction_length", of("horizon_length", 4))))
        past = context + max(map(int, of("lags_sequence", [0])))
        several = int(of("num_input_channels", of("input_size", 1)))
        times = int(of("num_time_features", 0))
        one = several == 1 and "past_time_features" in self._parameters
        width = () if one else (several,)
        seen = torch.ones(SAMPLES, past, *width)
        seen[1, : past // 2] = 0
        made = {
            "past_values": [self._floats(past, *width), self._floats(past)],
            "past_time_features": [self._floats(past, times)],
            "past_observed_mask": [seen],
            "future_time_features": [self._floats(horizon, times)],
            "static_categorical_features": [
                torch.zeros(
                    SAMPLES, int(of("num_static_categorical_features", 0)), dtype=torch.long
                )
            ],
            "static_real_features": [self._floats(int(of("num_static_real_features", 0)))],
        }
        return {
            name: options for name, options in made.items() if "past_values" in self._parameters
        }

    def _with_image_tokens(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs with as many tokens before each text as stand for its image."""
        names = ("image_token_id", "image_token_index", "video_token_index")
        token = next((t for name in names if (t := self.of(name, None)) is not None), None)
        find = getattr(self._model, "get_image_features", None)
        if token is None or find is None or inputs["input_ids"].ndim != 2:
            return inputs
        try:
            with torch.no_grad():
                found = find(pixel_values=inputs["pixel_values"])
            found = getattr(found, "pooler_output", found)
            size = sum(
                f.shape[:-1].numel()
                for f in (found if isinstance(found, list | tuple) else [found])
            )
        except Exception:  # whatever else it wants; the forward pass may do without
            size = SAMPLES * int(self.of("num_query_tokens", 0))
        images = torch.full((SAMPLES, size // SAMPLES), int(token))
        return inputs | {"input_ids": torch.cat([images, inputs["input_ids"]], dim=1)}

    def _labels(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Labels for these inputs: those of the task, then those that fit what the model returns
        without any.
        """
        parameters = self._parameters
        of = self.of
        classes = torch.arange(SAMPLES) % CLASSES
        yield from self._labels_of_task(inputs, classes)
        if "return_loss" in parameters:
            yield {"return_loss": torch.tensor(True)}
        if {"mask_labels", "class_labels"} <= parameters.keys():
            objects = self._objects()
            yield {
                "mask_labels": [o["masks"] for o in objects],
                "class_labels": [o["class_labels"] for o in objects],
            }
        if "future_values" in parameters:
            horizon = int(_first(of("prediction_length", of("horizon_length", 4))))
            several = int(of("num_input_channels", of("input_size", 0)))
            one = several < 2 and "past_time_features" in parameters
            yield {
                "future_values": self._floats(horizon, *(() if one or not several else (several,)))
            }
            yield {"future_values": self._floats(horizon)}
        if "target_values" in parameters:
            targets = self._floats(int(of("num_targets", 1)))
            yield {"target_values": classes if self._task.endswith("CLASSIFICATION") else targets}
        if "spectrogram_labels" in parameters:
            yield {
                "spectrogram_labels": self._floats(LENGTH, int(of("num_mel_bins", 80))),
                "duration_labels": torch.ones(SAMPLES, LENGTH, dtype=torch.long),
                "pitch_labels": self._floats(LENGTH, 1),
                "energy_labels": self._floats(LENGTH, 1),
            }
        if "labels" in parameters:
            yield from ({"labels": labels} for labels in self._labels_like_outputs(inputs, classes))
        yield {}

    def _labels_of_task(self, inputs: dict[str, Any], classes: Tensor) -> Iterator[dict[str, Any]]:
        parameters = self._parameters
        task = self._task
        texts = inputs.get("input_ids", self._ids)
        per_token = (texts if texts.ndim > 1 else self._ids).clone()
        images = per_token.shape[1] - LENGTH
        per_token[:, : max(0, images)] = -100
        for row in range(SAMPLES):
            per_token[row, per_token.shape[1] - 2 * row :] = -100
        if task == "PRETRAINING" and "start_positions" in parameters:
            yield {
                "start_positions": (classes + 1)[:, None],
                "end_positions": (classes + 2)[:, None],
            }
        elif "visual_embeds" in inputs and "labels" in parameters and task in _PER_TOKEN:
            yield {"labels": torch.cat([per_token, torch.full_like(per_token[:, :5], -100)], dim=1)}
        elif task in _PER_TOKEN and "labels" in parameters:
            if codebooks := int(self.of("num_codebooks", 0)):
                yield {
                    "labels": (
                        per_token[..., None].expand(-1, -1, codebooks)
                        if per_token.ndim == 2
                        else per_token
                    )
                }
            also = {"next_sentence_label": classes % 2, "sentence_order_label": classes % 2}
            yield {"labels": per_token} | {k: v for k, v in also.items() if k in parameters}
        elif task == "TOKEN_CLASSIFICATION" and "labels" in parameters:
            yield {"labels": torch.where(per_token < 0, per_token, per_token % CLASSES)}
        elif task == "TEXT_TO_SPECTROGRAM" and "labels" in parameters:
            sounds = self._floats(LENGTH, int(self.of("num_mel_bins", 80)))
            for row in range(SAMPLES):
                sounds[row, LENGTH - 2 * row :] = -100
            yield {"labels": sounds}
        elif "start_positions" in parameters:
            yield {"start_positions": classes + 1, "end_positions": classes + 2}
        elif task in ("SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION") and "labels" in parameters:
            size = (SAMPLES, self._side, self._side)
            labels = torch.randint(CLASSES, size, generator=self._random)
            labels[1, : self._side // 2] = 255
            far = (
                torch.rand(size, generator=self._random)
                * torch.arange(1, SAMPLES + 1).view(-1, 1, 1)
                + 0.1
            )
            yield {"labels": labels if task == "SEMANTIC_SEGMENTATION" else far}
        elif "labels" in parameters and ("DETECTION" in task or "INSTANCE" in task):
            yield {"labels": self._objects()}
        elif "labels" in parameters:
            yield {"labels": classes % 2 if task == "NEXT_SENTENCE_PREDICTION" else classes}

    def _labels_like_outputs(self, inputs: dict[str, Any], classes: Tensor) -> Iterator[Any]:
        try:
            with torch.no_grad():
                outputs = self._model(**inputs)
        except Exception:  # whatever the library raises; some want labels even so
            yield self._ids
            return
        logits = getattr(outputs, "logits", None)
        if not isinstance(logits, Tensor):
            return
        yield classes
        if logits.ndim == 3:
            kinds = torch.randint(
                min(CLASSES, logits.shape[-1]), logits.shape[:2], generator=self._random
            )
            if self._task == "AUDIO_FRAME_CLASSIFICATION":
                yield torch.nn.functional.one_hot(kinds, logits.shape[-1])
            for row in range(SAMPLES):
                kinds[row, logits.shape[1] - 2 * row :] = -100
            yield kinds
        yield torch.rand(logits.shape, generator=self._random)

    def _objects(self) -> list[dict[str, Tensor]]:
        """Objects to detect: kinds, boxes by center and size, and masks."""
        made = []
        for number in _OBJECTS:
            sizes = torch.rand(number, 4, generator=self._random)
            masks = torch.zeros(number, self._side, self._side)
            for one in range(number):
                masks[one, one * 4 : one * 4 + 8, : self._side // 2] = 1
            boxes = torch.cat([0.4 + 0.2 * sizes[:, :2], 0.1 + 0.2 * sizes[:, 2:]], dim=-1)
            made.append(
                {"class_labels": torch.arange(number) % CLASSES, "boxes": boxes, "masks": masks}
            )
        return made


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _of(config: Any, name: str, default: Any) -> Any:
    for part in (
        config,
        *(getattr(config, key, None) for key in getattr(config, "sub_configs", None) or {}),
    ):
        if part is not None and getattr(part, name, None) is not None:
            return getattr(part, name)
    return default


_WIDE: dict[str, Any] = dict.fromkeys(
    (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "head_dim",
        "num_heads",
        "num_key_value_heads",
        "embed_dim",
        "d_model",
        "hidden_dim",
        "embedding_size",
        "projection_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    )
)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 4, "num_layers": 4, "num_key_value_heads": 2},
    {"image_size": 64, **dict.fromkeys(("embed_dim", "patch_size", "hidden_dim"))},
    _WIDE,
    _WIDE | dict.fromkeys(("image_size", "patch_size", "encoder_stride", "conv_dim")),
]
"""Sizes that are tried one after the other."""

# parameters of the first variant, and of the others
LARGEST = 100_000_000
LARGEST_VARIANT = 25_000_000


def config_class(name: str, model_type: str) -> type[Any]:
    """The class's own config: a part of its family's, where that has parts."""
    kind = getattr(transformers, name, None)
    if kind is None:
        raise UnknownError("transformers does not export it")
    own: type[Any] = getattr(kind, "config_class", None) or transformers.CONFIG_MAPPING[model_type]
    return own


def tiny(name: str, model_type: str, task: str = "") -> Any:
    """The first model of `models`.

    Raises:
        UnknownError: it is large in all variants of its size, or the library does not have the
            class.
    """
    problem: Exception | None = None
    for variant in VARIANTS:
        try:
            return build(name, model_type, task, variant)
        except Exception as error:  # whatever a config or a constructor of the library raises
            problem = problem or error
    assert problem is not None
    raise problem


def _size(kind: Any, config: Any) -> int:
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in kind(config).parameters())
    except Exception:
        # some read values while they are built: built for real, they say what is wrong
        return 0


def build(name: str, model_type: str, task: str, variant: dict[str, Any]) -> Any:
    """A model of the library's class with random values, in evaluation mode.

    Raises:
        UnknownError: it is large, or the library does not have the class.
    """
    config = tiny_config(config_class(name, model_type), variant)
    if name.endswith("LMHead") and hasattr(config, "is_decoder"):
        config.is_decoder = True
    kind = getattr(transformers, name)
    two = task.endswith("QUESTION_ANSWERING") or task in ("NEXT_SENTENCE_PREDICTION", "PRETRAINING")
    config.num_labels = 2 if two else CLASSES
    if (size := _size(kind, config)) > (LARGEST_VARIANT if variant else LARGEST):
        raise UnknownError(f"{size:,} parameters where its sizes are not shrunk")
    torch.manual_seed(0)
    return kind(config).float().train(config.model_type in TRAINING)
