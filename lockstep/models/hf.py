"""Builds causal language models of Hugging Face (the extra `transformers`) without downloads.

    hf:FOLDER         a local folder with a config.json; its *.safetensors are loaded if it has any
    hf:CONFIG.json    that config, values drawn at random
    hf:TYPE           a model type of the library (llama, gpt2, …), its default config, values drawn
                      at random

`model.args` override the config by the library's own names. Parameters are always float32: autocast
does the rest.
"""

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, did_you_mean
from lockstep.paths import local_path
from lockstep.quiet_imports import without_warnings_of_imports

try:
    with without_warnings_of_imports():
        import transformers
        import transformers.modeling_utils
except ImportError as error:
    what = "Hugging Face models need the package transformers"
    raise UsageError(
        what, where="model.name", fix="install it: pip install transformers"
    ) from error

from lockstep.models.chain import run_segment
from lockstep.models.hf_causal import can_be_drawn, meet_protocol
from lockstep.models.hf_decoder import decoder_segments

OLDEST = (4, 57)  # version of transformers, as pyproject.toml has it
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
    oldest = ".".join(map(str, OLDEST))
    what = (
        f"transformers {transformers.__version__} is installed, and models that are built by name"
        f" need {oldest}"
    )
    raise UsageError(what, where="model.name", fix=f'pip install "transformers>={oldest}"')

# The types of the library's automatic classes are incomplete.
_AutoConfig: Any = transformers.AutoConfig
_AutoModel: Any = transformers.AutoModelForCausalLM


def from_files(path: str, **overrides: Any) -> nn.Module:
    """Return the model that a folder or a config file describes.

    A folder's weights are loaded if there are any; else the values are random.
    """
    source = local_path(path, "model.name")
    file = source / "config.json" if source.is_dir() else source
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        model_type = described.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        what = f"{file} is not the config of a Hugging Face model"
        raise UsageError(what, where="model.name", why=_in_short(error)) from error
    config = _config(model_type, described, overrides)
    if can_be_drawn(config):
        _require_equal_chain(config)
    if source.is_dir() and any(source.glob("*.safetensors")):
        return meet_protocol(_loaded(source, config))
    if source.is_dir() and any(source.glob("*.bin")):
        what = f"the weights in {path} are pickles, which can run code when they are read"
        raise UsageError(what, where="model.name", fix="convert them to safetensors")
    return meet_protocol(_drawn(config))


def from_type(
    model_type: str,
    *,
    vocab_size: int | None = None,
    block_size: int | None = None,
    **overrides: Any,
) -> nn.Module:
    """Return a model of the library's type `model_type`.

    Its config is the type's default config with `overrides`, for at least `block_size` positions.
    """
    if vocab_size is not None:
        overrides["vocab_size"] = vocab_size
    config = _config(model_type, {}, overrides)
    if block_size is not None and block_size > getattr(
        config, "max_position_embeddings", block_size
    ):
        config = _config(model_type, {}, {"max_position_embeddings": block_size, **overrides})
    if can_be_drawn(config):
        _require_equal_chain(config)
    return meet_protocol(_drawn(config))


def _config(model_type: str, described: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return a new config, so that derived values (the width of a head …) follow the overrides."""
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=1)
        what = (
            f"{model_type!r} is neither a folder, nor a config file, nor a model type of"
            " transformers"
        )
        what += f"; did you mean hf:{near[0]}?" if near else ""
        fix = "write hf:llama, hf:gpt2 …, or the path of a folder (nothing is downloaded)"
        raise UsageError(what, where="model.name", fix=fix)
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    renamed: dict[str, str] = getattr(kind, "attribute_map", {})
    accepted = sorted(k for k in {*kind().to_dict(), *renamed} if k[0] != "_")
    for key in overrides:
        if key not in accepted:
            what = f"the config of a {model_type} has no {key!r}{did_you_mean(key, accepted)}"
            raise UsageError(what, where=f"model.args.{key}", fix=f"it has {', '.join(accepted)}")
    with _errors_of(model_type):
        return _AutoConfig.for_model(
            model_type,
            **{renamed.get(k, k): v for part in (described, overrides) for k, v in part.items()},
        )


def _drawn(config: Any) -> Any:
    """Return a model with random values.

    It is on the active device if it can be filled there later, else on the CPU.
    """
    device = torch.get_default_device() if can_be_drawn(config) else torch.device("cpu")
    with _errors_of(config.model_type), device:
        return _AutoModel.from_config(config, **_attention(config)).float()


def _require_equal_chain(config: Any) -> None:
    """Refuse a version of the library that computes something else than a family's chain.

    A tiny model of the same config is compared: the model itself may have no values yet.
    """
    tiny = copy.deepcopy(config)
    tiny.vocab_size = 32
    tiny.pad_token_id = None
    if config.model_type == "gpt2":
        tiny.n_embd = 4 * config.n_head
        tiny.n_inner = config.n_inner and 16
        tiny.n_layer = 2
    else:
        tiny.hidden_size = 16
        tiny.head_dim = 8
        tiny.intermediate_size = 16
        tiny.num_hidden_layers = 2
    try:
        expected, logits = _both_ways(tiny)
        differ = not torch.allclose(
            logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
    except Exception:
        # sizes that do not fit together when they are tiny, tensors without values: nothing to
        # compare
        return
    if differ:
        what = (
            f"transformers {transformers.__version__} computes something else for a"
            f" {config.model_type} of this "
            "config than its chain of segments"
        )
        fix = "install another version, or hand transformers' own object to lockstep.Trainer"
        raise UsageError(what, where="model.name", why="another model would be trained", fix=fix)


def _both_ways(config: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of a model as the library computes them, and as its chain does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        model = _AutoModel.from_config(config, **_attention(config)).float().eval()
        ids = torch.randint(0, config.vocab_size, (2, min(8, config.max_position_embeddings)))
        inputs = ((), {"input_ids": ids})
        outputs: Any = ids
        for _, segment in decoder_segments(model) or ():
            outputs = run_segment(segment, (outputs,), {}, inputs)
        return model(input_ids=ids, use_cache=False).logits, outputs.logits


def _loaded(folder: Path, config: Any) -> Any:
    """Return the model of a folder, in float32 on the CPU; refuse weights that leave some out."""
    with _errors_of(config.model_type), _no_progress_bars(), torch.device("cpu"):
        model, found = _AutoModel.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **_attention(config),
        )
    missing = [
        str(key) for kind in ("missing_keys", "mismatched_keys") for key in sorted(found[kind])
    ]
    if missing:
        what = (
            f"the weights in {folder} do not fill {len(missing)} of the model's parameters, the"
            f" first {missing[0]}"
        )
        raise UsageError(what, where="model.name", why="they would be drawn at random")
    return model.float().train()


def _attention(config: Any) -> dict[str, str]:
    # The library would choose by what is installed, and runs would have other bits.
    return {"attn_implementation": "sdpa"} if can_be_drawn(config) else {}


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide progress bars: every rank would draw its own."""
    logging: Any = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextmanager
def _errors_of(model_type: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # configs and constructors of the library raise arbitrary errors
        what = f"transformers can't build a {model_type} from this config"
        raise UsageError(what, where="model.args", why=_in_short(error)) from error


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
