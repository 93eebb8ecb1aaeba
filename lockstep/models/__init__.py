"""Builds models: those that ship, by name, and the user's own; families are imported on demand.

    what a model offers   protocol.py reads it; chain.py runs its segments, traced.py finds them
    from batch to loss    objective.py, of forward_arguments.py, batch_parts.py and
                          loss_reductions.py; observed.py sees what a loss was divided by
    families that ship    transformer.py, bdh.py, mixture.py, free_transformer.py, vae.py, of the
                          parts in language.py, attention.py and sums.py
    Hugging Face          hf.py builds, by hf_hub.py, hf_auto.py and hf_stored.py; hf_causal.py and
                          hf_decoder.py adapt it to the protocol, hf_layers.py to the axes tensor
                          and context; hf_folder.py writes it
    weights in files      stored.py, safetensors_files.py: read as far as a rank needs them

Tests: tests/models/test_builders.py, tests/models/test_every_family.py
"""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from lockstep.config.argument_types import require_types
from lockstep.config.names import foreign_key
from lockstep.errors import UsageError, did_you_mean
from lockstep.registry import MODELS

if TYPE_CHECKING:
    from torch import nn

    from lockstep.config.schema_training import ModelConfig
    from lockstep.models.hf import DescribedModel


def get_model(name: str) -> Callable[..., "nn.Module"]:
    """Return a builder for the model `name`.

    The builder is a function of a `Config`, of keyword arguments (these win), or of both.

    Raises UsageError: no model has this name.
    """
    constructor = _constructor(name)

    def build(config: Any = None, **keywords: Any) -> "nn.Module":
        args = {} if config is None else dict(config.model.args)
        return _construct(name, constructor, {**args, **keywords}, facts={})

    return build


def build_model(model_config: "ModelConfig", facts: Mapping[str, Any] | None = None) -> "nn.Module":
    """Return the model that a config describes, on the active default device.

    The device may be `meta`. A config that does not fit the model is a UsageError.

    `facts` from the data (vocab_size, block_size, image_size, channels …) fill the constructor's
    arguments that `model.args` leaves unset; those that it does not take are ignored.
    """
    if model_config.name is None:
        raise UsageError("no model is named", where="model.name", fix=f"write {MODELS.names()}")
    name = model_config.name
    constructor = _constructor(name)
    if name.startswith("hf:"):
        constructor = partial(
            constructor,
            auto=model_config.auto,
            lora=model_config.lora,
            adapter=model_config.adapter,
        )
        if "image_size" in model_config.args:
            # A type without pictures ignores the size that the data have, and must not ignore the
            # one that the config asks for: this refuses it.
            _described(model_config)
    model = _construct(name, constructor, dict(model_config.args), facts or {})
    _require_vocabulary(name, model, facts or {})
    return model


def _require_vocabulary(name: str, model: "nn.Module", facts: Mapping[str, Any]) -> None:
    """Refuse data whose tokens the model's embedding may not have."""
    embedding = getattr(model, "get_input_embeddings", None)
    size = facts.get("vocab_size")
    if embedding is None or size is None:
        return
    rows = embedding().weight.shape[0]
    if size > rows:
        what = (
            f"the tokenizer of the data has {size:,} tokens, and the embedding of {name} {rows:,}"
        )
        fix = "use the tokenizer that is in the folder of the model"
        folder = name.removeprefix("hf:")
        if Path(folder).is_dir():
            from lockstep.models.hf_auto import auto_of_folder

            auto = auto_of_folder(model.config)
            code = (
                f"import transformers; m = transformers.{auto}"
                f".from_pretrained({json.dumps(folder)});"
                f' m.resize_token_embeddings({size}); m.save_pretrained("larger")'
            )
            fix += f"; or make a larger one, and train hf:larger: python -c {quote(code)}"
        raise UsageError(what, where="data.args.tokenizer", fix=fix)


def _constructor(name: str) -> Callable[..., "nn.Module"]:
    if name.startswith("hf:"):
        from lockstep.models import hf

        source, has_files = _located(name.removeprefix("hf:"))
        return partial(hf.from_files if has_files else hf.from_type, source)
    return MODELS.load_callable(name)


def _located(source: str) -> tuple[str, bool]:
    """Return (path or type, whether it is a path) of a model of Hugging Face."""
    from lockstep.models import hf_hub

    if hf_hub.is_name(source):
        return str(hf_hub.local_copy(source)), True
    return source, Path(source).exists()


def _construct(
    name: str,
    constructor: Callable[..., "nn.Module"],
    args: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> "nn.Module":
    """Call a model's constructor with its arguments, and with the facts that it accepts."""
    from torch import nn

    accepted = _require_accepted(name, constructor, args)
    if name in MODELS.shipped:
        require_types(constructor, args, "model.args")
    parameters = inspect.signature(constructor).parameters
    filled = {**{key: value for key, value in facts.items() if key in accepted}, **args}
    missing = [
        key
        for key in accepted
        if parameters[key].default is inspect.Parameter.empty and key not in filled
    ]
    if missing:
        what = f"the model {name} needs {', '.join(missing)}"
        raise UsageError(what, where="model.args", fix="set them under model.args")
    model = constructor(**filled)
    if not isinstance(model, nn.Module):
        what = f"{name} made a {type(model).__name__}, not an nn.Module"
        raise UsageError(what, where="model.name", fix="let it return a torch.nn.Module")
    return model


def check_model(model_config: "ModelConfig") -> None:
    """Check that a config's model exists and takes its arguments, without making it.

    The data may fill in others.
    """
    if model_config.name is not None:
        constructor = _constructor(model_config.name)
        _require_accepted(model_config.name, constructor, model_config.args)
        if model_config.name in MODELS.shipped:
            require_types(constructor, model_config.args, "model.args")
        if model_config.name.startswith("hf:"):
            _check_hugging_face(model_config)


def _check_hugging_face(model_config: "ModelConfig") -> None:
    """Check that the library has this model under its Auto class, and that its adapters fit it.

    Nothing gets values.
    """
    from lockstep.models import hf

    hf.check_adapters(_described(model_config), model_config.lora, model_config.adapter)


def _described(model_config: "ModelConfig") -> "DescribedModel":
    """Return what the library says of a model; a UsageError if it lacks an argument."""
    from lockstep.models import hf

    assert model_config.name is not None
    source, has_files = _located(model_config.name.removeprefix("hf:"))
    describe = hf.described_by_files if has_files else hf.described_by_type
    return describe(source, auto=model_config.auto, **model_config.args)


def _require_accepted(
    name: str, constructor: Callable[..., "nn.Module"], args: Mapping[str, Any]
) -> list[str]:
    """Return the names of a constructor's arguments.

    Raises UsageError: an argument that is given is unknown.
    """
    parameters = inspect.signature(constructor).parameters
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [key for key, parameter in parameters.items() if parameter.kind in by_keyword]
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    unknown = [key for key in args if key not in accepted]
    if unknown and not takes_any:
        ours = {key: (foreign_key(key) or "").removeprefix("model.args.") for key in unknown}
        known = {key: its for key, its in ours.items() if its in accepted}
        near = "" if known else did_you_mean(unknown[0], accepted)
        what = f"the model {name} takes no argument {' and no '.join(map(repr, unknown))}{near}"
        fix = f"it takes {', '.join(accepted) or 'none'}"
        if len(unknown) == len(known) == 1:
            fix = f"write {known[unknown[0]]}"
        elif known:
            written = "; ".join(f"{its} for {key}" for key, its in known.items())
            fix = f"write {written}" + ("" if len(known) == len(unknown) else f"; {fix}")
        raise UsageError(what, where=", ".join(f"model.args.{key}" for key in unknown), fix=fix)
    return accepted
