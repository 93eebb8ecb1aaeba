"""Describes a model of Hugging Face in a checkpoint, and writes it as a folder of its library.

A checkpoint has tensors by name. With the description (the library's class, its config, the folder
it came from, peft's config of adapters) the model is built again without values, on meta, and is
given the checkpoint's tensors; then the libraries write themselves: files, their index, names on
disk that differ from names in memory, tied weights once. Adapters are merged by peft.

Tests: tests/models/test_hf_folder.py
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.models.adapters import peft_package

_SHARD = "5GB"  # the most that a file of weights holds
_OF_PEFT = "base_model.model."  # before names, where peft has wrapped a model

# Files of a folder that say how its inputs are made; they are copied as they are.
_INPUTS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json"),
)


def description_of(model: nn.Module) -> dict[str, Any] | None:
    """Return what `write_folder` needs beside the tensors, as JSON.

    None: it is not a model of the library, or of a class that the library does not ship.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    # `fully_shard` and the protocol put subclasses of their own in place of the library's class.
    ours = ("lockstep.", "torch.")
    own = next(kind for kind in type(model).__mro__ if not kind.__module__.startswith(ours))
    if getattr(library, own.__name__, None) is not own:
        return None
    generation = getattr(model, "generation_config", None)
    adapters = getattr(model, "peft_config", None) or {}
    return {
        "class": own.__name__,
        "config": _plain(model.config.to_dict()),
        "generation": None if generation is None else _plain(generation.to_diff_dict()),
        "source": model.name_or_path or None,
        "adapters": {name: _plain(each.to_dict()) for name, each in adapters.items()},
    }


def _plain(value: Any) -> Any:
    """Return a value of a config with JSON's types alone."""

    def other(it: Any) -> Any:
        return sorted(it) if isinstance(it, set) else str(it)

    return json.loads(json.dumps(value, default=other))


def write_folder(
    description: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    adapter: bool = False,
) -> list[str]:
    """Write a model as a folder that its library loads; return lines about what was left out.

    Args:
        description: as `description_of` returned it.
        weights: all tensors of the model, by name.
        folder: where to write; it must not exist.
        adapter: whether to write the adapters alone, as peft does; else they are merged.

    Raises:
        UsageError: the folder exists, or there is no adapter to write, or the tensors are another
            model's.
    """
    if adapter and not description["adapters"]:
        raise UsageError(
            "the model has no adapters",
            where="--to adapter",
            fix="write --to huggingface, which writes the model",
        )
    if folder.exists():
        raise UsageError(f"{folder} exists already", fix="name another folder, or move it away")
    model = _filled(description, weights)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        if adapter:
            model.save_pretrained(draft, save_embedding_layers=False)
        else:
            if description["adapters"]:
                model = model.merge_and_unload(safe_merge=True)
            model.save_pretrained(draft, max_shard_size=_SHARD)
            # As they were: the library reads settings that it refuses to write, such as a `top_k`
            # without `do_sample`, which models on the hub have.
            if description["generation"] is not None:
                text = json.dumps(description["generation"], indent=2, sort_keys=True)
                (draft / "generation_config.json").write_text(text + "\n", encoding="utf-8")
        lines = _copy_inputs(description["source"], draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return lines


def _filled(description: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """Return the library's own object, with these tensors, in peft's own if it has adapters."""
    import transformers

    kind: Any = getattr(transformers, description["class"])
    settings: Any = transformers.CONFIG_MAPPING[description["config"]["model_type"]]
    config = settings.from_dict(dict(description["config"]))
    with torch.device("meta"):
        model = kind(config)
    model.name_or_path = description["source"] or ""
    prefix = ""
    if description["adapters"]:
        model = _wrapped(model, description)
        prefix = _OF_PEFT
    named = {prefix + name: tensor for name, tensor in weights.items()}
    found = model.load_state_dict(named, strict=False, assign=True)
    wrong = [*found.missing_keys, *found.unexpected_keys]
    if wrong:
        raise UsageError(
            f"the tensors are not those of a {description['class']}: {listed(wrong)}",
            where="the checkpoint",
            fix="export it by the versions of transformers and peft that trained it",
        )
    # Names of one parameter share memory; the library writes such a parameter once.
    (model.get_base_model() if prefix else model).tie_weights()
    return model


def _wrapped(model: nn.Module, description: Mapping[str, Any]) -> Any:
    """Return a model in peft's own class, with its adapters, without values."""
    peft = peft_package()
    ((name, settings),) = description["adapters"].items()
    config = peft.get_peft_config({**settings, "base_model_name_or_path": description["source"]})
    with torch.device("meta"):
        return peft.get_peft_model(model, config, adapter_name=name)


def _copy_inputs(source: str | None, folder: Path) -> list[str]:
    """Copy tokenizers and the like; return a line if there are none."""
    given = Path(source) if source else None
    found = []
    if given is not None and given.is_dir():
        found = [path for pattern in _INPUTS for path in given.glob(pattern) if path.is_file()]
    for path in found:
        shutil.copyfile(path, folder / path.name)
    if found:
        return []
    return [f"no tokenizer: there is none in {source or 'a folder of its own'}"]
