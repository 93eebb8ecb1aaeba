"""Continues adapters that were saved earlier: a folder of the package peft, in a model's layers.

    adapter_config.json         peft's config: r, target_modules, modules_to_save …
    adapter_model.safetensors   base_model.model.LAYER.lora_A.weight … and modules trained in full

peft puts empty adapters into the layers. Their names and shapes have to be those of the file before
they get its values, so that an adapter of another base is one error, and no half of it is loaded.

Tests: tests/models/test_saved_adapters.py, tests/parity/test_continued.py
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, first_line, listed
from lockstep.files.paths import local_path
from lockstep.models.adapters import ADAPTER, auto_of_task, inject, peft_package, task_of

WHERE = "model.adapter"
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_OF_PEFT = "base_model.model."  # before names in a file

# Other ways to begin change the base's own weights, so that the base is another one afterwards.
_STARTS = (True, False, "gaussian")


def saved_config(folder: str, auto: str) -> Any:
    """Return peft's config of a folder's adapters, to be trained further.

    Args:
        folder: as the config names it.
        auto: the name of the model's Auto class.

    Raises:
        UsageError: peft is missing; the folder is none of peft's, its adapters are of another kind
            than LoRA, or they were trained in a model of another Auto class.
    """
    peft = peft_package(WHERE)
    path = local_path(folder, WHERE)
    _require_files(path)
    try:
        config = peft.PeftConfig.from_pretrained(str(path))
    except Exception as error:  # JSON, types and values of many kinds
        raise UsageError(
            f"{path / _CONFIG} is not a config of an adapter",
            where=WHERE,
            why=first_line(error),
            fix="save the adapter anew: model.save_pretrained(FOLDER), of the package peft",
        ) from error
    if not isinstance(config, peft.LoraConfig):
        raise UsageError(
            f"the adapter in {path} is of the kind {config.peft_type}, and a config names LoRA",
            where=WHERE,
            fix=(
                "hand the model to the Trainer in Python:"
                f' peft.PeftModel.from_pretrained(base, "{path}", is_trainable=True)'
            ),
        )
    if config.init_lora_weights not in _STARTS:
        raise UsageError(
            f"the adapter in {path} began with init_lora_weights: {config.init_lora_weights}",
            where=WHERE,
            why="this changes the weights of the base, which the adapter does not hold",
            fix=(
                "convert it: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=…),"
                " of the package peft"
            ),
        )
    if config.task_type is not None and task_of(auto) != config.task_type:
        raise UsageError(
            f"the adapter in {path} is of the task {config.task_type}, and the model an {auto}",
            where=f"{WHERE}, model.auto",
            fix=f"write auto: {auto_of_task(config.task_type) or 'the class that was adapted'}",
        )
    config.inference_mode = False
    return config


def _require_files(path: Path) -> None:
    """Refuse a folder that lacks one of peft's two files."""
    absent = [name for name in (_CONFIG, _WEIGHTS) if not (path / name).is_file()]
    if not absent:
        return
    what = f"{path} is not a folder of an adapter: it has no {' and no '.join(absent)}"
    fix = (
        "name a folder that peft's save_pretrained or `lockstep checkpoint export RUN --to adapter"
        " --output FOLDER` has written"
    )
    why = None
    if (path / "adapter_model.bin").is_file():
        why = "adapter_model.bin is a pickle, which can run code when it is read"
        fix = "convert it to safetensors: load it in peft, and save_pretrained(FOLDER)"
    elif not path.is_dir():
        what = f"there is no folder {path}"
    raise UsageError(what, where=WHERE, why=why, fix=fix)


def load_adapters(model: nn.Module, folder: str, auto: str) -> set[str]:
    """Put the adapters of a folder into a model's layers, in place, and freeze everything else.

    A model on meta gets adapters without values: this checks that they fit.

    Returns:
        names of the model's parameters, as they were without adapters, of which the folder has a
        copy that is trained in full: a classifier's head.

    Raises:
        UsageError: the adapters are of another base, or the folder can't be read.
    """
    config = saved_config(folder, auto)
    path = Path(folder)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    values = _read(path / _WEIGHTS, only_shapes=on_meta)
    base = dict(model.state_dict())
    inject(model, config, where=WHERE)
    peft = peft_package(WHERE)
    wanted: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, adapter_name=ADAPTER, save_embedding_layers=False
    )
    _require_base(path, values, wanted, base)
    _require_names(path, values, wanted, config)
    for name, form in wanted.items():
        # how many classes a head has is known with the data, when there are values
        if not on_meta or ".lora_" in name:
            _require_shape(path, name, values[name], form, config)
    if not on_meta:
        named = {name: values[name].to(wanted[name].dtype) for name in wanted}
        peft.set_peft_model_state_dict(model, named, adapter_name=ADAPTER)
    return wanted.keys() & base.keys()


def _read(file: Path, *, only_shapes: bool) -> dict[str, Tensor]:
    """Return the tensors of a file by their names in the model; on meta with `only_shapes`."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 — it is not a mapping
                tensors[name.removeprefix(_OF_PEFT)] = (
                    torch.empty(opened.get_slice(name).get_shape(), device="meta")
                    if only_shapes
                    else opened.get_tensor(name)
                )
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{file} can't be read",
            where=WHERE,
            why=first_line(error),
            fix="save the adapter anew, or copy the whole file",
        ) from error
    return tensors


def _require_base(
    path: Path, values: dict[str, Tensor], wanted: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> None:
    """Take weights of the base out of `values`, which peft saves with adapters of embeddings.

    Raises UsageError: they are not those of this base.
    """
    for name in [name for name in values if name not in wanted]:
        own = base.get(name.replace(".base_layer.", "."))
        if own is None:
            continue
        saved = values.pop(name)
        same = saved.shape == own.shape and (own.is_meta or torch.equal(saved.to(own), own))
        if not same:
            raise UsageError(
                f"the adapter in {path} holds another {name} than the base",
                where=WHERE,
                why="it was trained with other embeddings, or with more of them",
                fix="name as model the folder of the base whose embeddings were resized",
            )


def _require_names(
    path: Path, values: Mapping[str, Tensor], wanted: Mapping[str, Tensor], config: Any
) -> None:
    """Refuse a file whose tensors are not those of the adapters in this model, by their names."""
    unknown = sorted(values.keys() - wanted.keys())
    missing = sorted(wanted.keys() - values.keys())
    if unknown or missing:
        what = f"the adapter in {path} does not fit the model's layers: "
        if unknown:
            what += f"no layer of it takes {listed(unknown)}"
        else:
            what += f"it lacks {listed(missing)}"
        raise UsageError(what, where=WHERE, fix=_other_base(config))


def _require_shape(path: Path, name: str, value: Tensor, form: Tensor, config: Any) -> None:
    """Refuse a tensor that has another shape than the adapter in this model."""
    if value.shape == form.shape:
        return
    why = f"the model's layer, with r: {config.r} of {_CONFIG}, makes it {list(form.shape)}"
    fix = _other_base(config)
    if ".lora_" not in name:
        why = f"the model's is {list(form.shape)}"
        fix += "; for a head, write as many classes as it has (model.args.num_labels)"
    what = f"{name} of the adapter in {path} is {list(value.shape)}"
    raise UsageError(what, where=WHERE, why=why, fix=fix)


def _other_base(config: Any) -> str:
    """Return what to do where an adapter is of another base."""
    fix = "name as model the folder of the base that the adapter was trained on"
    trained_on = config.base_model_name_or_path
    return f"{fix}: its {_CONFIG} says {trained_on}" if trained_on else fix
