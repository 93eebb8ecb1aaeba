"""Describes a model of Hugging Face in a checkpoint, and writes it as a folder of its library.

A checkpoint has tensors by name. With the description (the library's class, its config, the folder
it came from, peft's config of adapters) the model is built again without values, on meta. The
library says which tensors a folder has: names on disk that differ from names in memory, tied
weights once, which file holds which. Then they are read, made and written one by one:

    in memory     layers.0.mlp.experts.gate_up_proj [2, 8, 4]      is read, and written as
    on disk       layers.0.mlp.experts.0.gate_proj.weight [4, 4]   and three more

Adapters are merged by peft, layer by layer.

Tests: tests/models/test_hf_folder.py
"""

import copy
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.models.adapters import peft_package
from lockstep.models.safetensors_files import write_tensors

_SHARD = "5GB"  # the most that a file of weights holds
_OF_PEFT = "base_model.model."  # before names, where peft has wrapped a model

# Files of a folder that say how its inputs are made; they are copied as they are.
_INPUTS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json"),
)


@dataclass(frozen=True)
class UnreadWeights:
    """The tensors of a model that lie in a checkpoint."""

    forms: Mapping[str, Tensor]  # by name, on meta
    read: Callable[[str], Tensor]  # returns the values of one of them

    def without_prefix(self, prefix: str) -> "UnreadWeights":
        """Return the same tensors, by names without what all of them begin with."""
        if not prefix:
            return self
        forms = {name.removeprefix(prefix): form for name, form in self.forms.items()}
        return UnreadWeights(forms, lambda name: self.read(prefix + name))

    def all(self) -> dict[str, Tensor]:
        """Return all of them; names of one tensor share memory."""
        read: dict[int, Tensor] = {}
        for name, form in self.forms.items():
            if id(form) not in read:
                read[id(form)] = self.read(name)
        return {name: read[id(form)] for name, form in self.forms.items()}


def description_of(model: nn.Module) -> dict[str, Any] | None:
    """Return what `write_folder` needs beside the tensors, as JSON.

    None: it is not a model of the library, or of a class that the library does not ship.
    """
    library = sys.modules.get("transformers")
    adapters = getattr(model, "peft_config", None) or {}
    prefix = ""
    if (
        hasattr(model, "get_base_model") and adapters
    ):  # an object of peft, which holds the library's
        if len(adapters) > 1 or any(each.is_prompt_learning for each in adapters.values()):
            return None
        of_peft: Any = model
        model = of_peft.get_base_model()
        prefix = _OF_PEFT
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    # `fully_shard` and the protocol put subclasses of their own in place of the library's class.
    ours = ("lockstep.", "torch.")
    model_class = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith(ours))
    if getattr(library, model_class.__name__, None) is not model_class:
        return None
    generation = getattr(model, "generation_config", None)
    return {
        "class": model_class.__name__,
        "config": _plain(model.config.to_dict()),
        "generation": None if generation is None else _plain(generation.to_diff_dict()),
        "source": model.name_or_path or None,
        "adapters": {name: _plain(each.to_dict()) for name, each in adapters.items()},
        "prefix": prefix,
    }


def _plain(value: Any) -> Any:
    """Return a value of a config with JSON's types alone."""

    def in_json(item: Any) -> Any:
        return sorted(item) if isinstance(item, set) else str(item)

    return json.loads(json.dumps(value, default=in_json))


def write_folder(
    description: Mapping[str, Any],
    weights: UnreadWeights,
    folder: Path,
    *,
    adapter: bool = False,
) -> list[str]:
    """Write a model as a folder that its library loads; return lines about what was left out.

    Args:
        description: as `description_of` returned it.
        weights: all tensors of the model.
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
    weights = weights.without_prefix(description.get("prefix", ""))
    model = _filled(description, weights.forms)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        if adapter:
            _read_adapters(model, weights)
            model.save_pretrained(draft, save_embedding_layers=False)
        else:
            _write_model(description, model, weights, draft)
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


def _can_write_pieces() -> bool:
    """Return whether the library can name weights on disk one by one."""
    # before transformers 5 names on disk were made by other rules
    return find_spec("transformers.core_model_loading") is not None


def _write_model(
    description: Mapping[str, Any], model: Any, weights: UnreadWeights, folder: Path
) -> None:
    """Write the config and the weights of a model, with its adapters merged."""
    adapted = bool(description["adapters"])
    if not _can_write_pieces() or (adapted and not _merges_layer_by_layer(model)):
        model = _filled(description, weights.all())
        if adapted:
            model = model.merge_and_unload(safe_merge=True)
        model.save_pretrained(folder, max_shard_size=_SHARD)
        return
    values = weights.read
    if adapted:
        values = _Merged(model, weights).read
        # On meta, where merging computes nothing: it takes the adapters off.
        model = _filled(description, weights.forms).merge_and_unload()
    model.save_pretrained(folder, state_dict={})
    for empty in folder.glob("*.safetensors*"):
        empty.unlink()
    _write_weights(model, values, folder)


def _write_weights(model: Any, values: Callable[[str], Tensor], folder: Path) -> None:
    """Write the weights of a model on meta into files, and their index if there are several.

    Args:
        model: of the library.
        values: returns the tensor of a name in memory.
        folder: where to write.
    """
    # here, and not above: they take longer to import than all else of a start
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = attrgetter("_keys_to_ignore_on_save")(model) or ()  # of transformers, not torch's
    state = {name: each for name, each in model.state_dict().items() if name not in ignored}
    state = remove_tied_weights_from_state_dict(state, model)
    on_disk = revert_weight_conversion(model, dict(state))
    groups = _groups(model, state, on_disk)
    group_of = {name: group for group in groups for name in group.on_disk}
    split = split_torch_state_dict_into_shards(
        on_disk, filename_pattern="model{suffix}.safetensors", max_shard_size=_SHARD
    )
    converted: dict[str, Tensor] = {}  # of the latest group, what is not written yet

    def read(name: str) -> Tensor:
        """Return a tensor on disk, made of those in memory."""
        if name not in converted:
            converted.clear()
            in_memory = {each: values(each) for each in group_of[name].in_memory}
            converted.update(revert_weight_conversion(model, in_memory))
        return converted.pop(name)

    for file, names in split.filename_to_tensors.items():
        with (folder / file).open("xb") as opened:
            forms = {name: on_disk[name] for name in names}
            write_tensors(opened, forms, read, {"format": "pt"})
        converted.clear()
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


class _Group(NamedTuple):
    """Weights that are converted together."""

    in_memory: list[str]  # their names in the model
    on_disk: list[str]  # the names of what is made of them


def _groups(model: Any, state: Mapping[str, Tensor], on_disk: Mapping[str, Tensor]) -> list[_Group]:
    """Return which tensors in memory make which on disk: one alone, those of a layer, or all.

    A group is right if the library makes of it alone what it makes of it among all. A norm is
    written as it is; the experts of a layer, stacked in memory, are a weight each on disk.
    """
    groups: list[_Group] = []
    remaining = list(state)
    shapes = {name: tensor.shape for name, tensor in on_disk.items()}
    for key_of in (str, _layer_of, lambda _name: ""):
        candidates: dict[str, list[str]] = {}
        for name in remaining:
            candidates.setdefault(key_of(name), []).append(name)
        remaining = []
        for names in candidates.values():
            converted = _convert_alone(model, {name: state[name] for name in names})
            if converted and all(shapes.get(name) == size for name, size in converted.items()):
                groups.append(_Group(names, list(converted)))
            else:
                remaining += names
    written = {name for group in groups for name in group.on_disk}
    assert written == set(on_disk), "a weight is left out"
    return groups


def _layer_of(name: str) -> str:
    """Return the beginning of a name that its layer has: `model.layers.3.`; else nothing."""
    beginning = re.match(r".*?\.\d+\.", name)
    return "" if beginning is None else beginning[0]


def _convert_alone(model: Any, tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of what the library makes of tensors on meta; empty: they are too few."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        converted = revert_weight_conversion(model, tensors)
    except Exception:  # whatever an operation says of a part of its tensors
        return {}
    return {name: tensor.shape for name, tensor in converted.items()}


def _merges_layer_by_layer(model: Any) -> bool:
    """Return whether peft changes the model in layers of `LoraLayer` alone.

    Complete copies of modules, trained tokens and adapters of parameters are merged by peft with
    the model in memory.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper | ParamWrapper):
            return False
        if isinstance(module, BaseTunerLayer) and not isinstance(module, LoraLayer):
            return False
    return True


class _Merged:
    """Reads the weights of a model with its adapters merged into them."""

    def __init__(self, wrapped: Any, weights: UnreadWeights) -> None:
        from peft.tuners.lora import LoraLayer

        self._weights = weights
        base = wrapped.get_base_model()
        self._layers = {
            name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)
        }
        self._latest = ""
        self._merged: dict[str, Tensor] = {}  # of the latest layer

    def read(self, name: str) -> Tensor:
        """Return a weight by its name in the model without adapters."""
        layer, _, inner_name = name.rpartition(".")
        if layer not in self._layers:
            return self._weights.read(name)
        if layer != self._latest:
            self._merged = {}
            self._latest = layer
            self._merged = self._merge(layer)
        return self._merged[inner_name]

    def _merge(self, name: str) -> dict[str, Tensor]:
        layer: Any = copy.deepcopy(self._layers[name])
        named = {key: self._weights.read(f"{name}.{key}") for key in layer.state_dict()}
        layer.load_state_dict(named, assign=True)
        layer.merge(safe_merge=True)
        return dict(layer.get_base_layer().state_dict())


def _read_adapters(model: Any, weights: UnreadWeights) -> None:
    """Give a model on meta the values of its adapters, and of what is trained beside them."""
    tuned = (model.base_model.prefix, "modules_to_save", "trainable_tokens")
    biases = any(each.bias != "none" for each in model.peft_config.values())
    wanted = [
        name
        for name in weights.forms
        if any(part.startswith(tuned) for part in name.split("."))
        or (biases and name.endswith("bias"))
    ]
    values = {_OF_PEFT + name: weights.read(name) for name in wanted}
    model.load_state_dict(values, strict=False, assign=True)


def _filled(description: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """Return the library's own object, with these tensors, in peft's own if it has adapters."""
    import transformers

    kind: Any = getattr(transformers, description["class"])
    settings: Any = transformers.CONFIG_MAPPING[description["config"]["model_type"]]
    config = settings.from_dict(dict(description["config"]))
    with torch.device("meta"):
        model = kind(config)
    prefix = ""
    if description["adapters"]:
        model = _wrapped(model, description)
        prefix = _OF_PEFT
        if _unties(model.get_base_model()):
            for each in (config, config.get_text_config()):
                each.tie_word_embeddings = False
            with torch.device("meta"):
                model = _wrapped(kind(config), description)
    (model.get_base_model() if prefix else model).name_or_path = description["source"] or ""
    named = {prefix + name: tensor for name, tensor in weights.items()}
    loaded = model.load_state_dict(named, strict=False, assign=True)
    wrong = [*loaded.missing_keys, *loaded.unexpected_keys]
    if wrong:
        raise UsageError(
            f"the tensors are not those of a {description['class']}: {listed(wrong)}",
            where="the checkpoint",
            fix="export it by the versions of transformers and peft that trained it",
        )
    # Names of one parameter share memory; the library writes such a parameter once.
    (model.get_base_model() if prefix else model).tie_weights()
    return model


def _unties(base: Any) -> bool:
    """Return whether adapters make embeddings differ that are tied without them.

    They do where one of the two is adapted or trained in full: the other keeps its values. A folder
    that says that they are tied would have one tensor for both.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        return False
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    return any(isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper) for each in ends)


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
    files = []
    if given is not None and given.is_dir():
        files = [path for pattern in _INPUTS for path in given.glob(pattern) if path.is_file()]
    for path in files:
        shutil.copyfile(path, folder / path.name)
    if files:
        return []
    return [f"no tokenizer: there is none in {source or 'a folder of its own'}"]
