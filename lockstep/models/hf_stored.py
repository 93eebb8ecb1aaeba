"""Finds where in a Hugging Face folder each weight of a model lies, for ranks that read pieces.

The library's own table says how names and forms in files become those in memory: experts that are
one by one in a file are stacked, gates and ups are joined. What only joins, stacks or swaps dims is
followed piece by piece (`lockstep.models.stored`); for other operations a rank reads all of the
tensors that make a weight, and keeps its piece.

Tests: tests/models/test_hf_stored.py
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.stored import (
    BytesRead,
    ComputedPart,
    FilePart,
    JoinedPart,
    ReadablePart,
    StackedPart,
    StoredWeights,
    SwappedPart,
    all_of,
)

try:
    from transformers import conversion_mapping, core_model_loading

    CAN_READ_PIECES = True
except ImportError:  # before transformers 5 weights had their names in memory by other rules
    CAN_READ_PIECES = False

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def files_of_weights(folder: Path) -> list[Path]:
    """Return the files of a folder that hold its weights, as the library chooses them."""
    if (folder / _ONE).is_file():
        return [folder / _ONE]
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return []
    return [folder / name for name in names]


def stored_weights(model: Any, folder: Path) -> tuple[StoredWeights, list[str]]:
    """Return the weights of a model on meta, and the names of those that the files do not have.

    Raises UsageError: a file is missing or damaged, or a weight has another shape.
    """
    counted = BytesRead()
    parts = dict(_in_files(files_of_weights(folder), counted))
    wanted = model.state_dict()
    weights: dict[str, ReadablePart] = {}
    for target in _stored_of(model, parts, wanted):
        weights |= target.parts(model)
    for name, part in weights.items():
        if name in wanted and tuple(wanted[name].shape) != tuple(part.shape):
            what = f"{name} has the shape {list(part.shape)} in {folder}"
            why = f"the model has {list(wanted[name].shape)}"
            fix = "leave model.args out that change the shapes of weights"
            raise UsageError(what, where="model.name", why=why, fix=fix)

    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(name)
    missing = []
    for names in aliases.values():  # a tied weight lies in the files under one name, or under both
        stored = next((name for name in names if name in weights), None)
        if stored is None:
            missing.append(names[0])
        else:
            weights |= {name: weights[stored] for name in names if name not in weights}
    return StoredWeights(weights, counted), missing


def _in_files(files: Sequence[Path], counted: BytesRead) -> Iterator[tuple[str, ReadablePart]]:
    """Yield the tensors of files, of which the headers alone are read."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(str(file), framework="pt", device="cpu") as opened:
                for key in opened.keys():  # noqa: SIM118 – it is not a dict
                    shape = tuple(opened.get_slice(key).get_shape())
                    yield key, FilePart(file, key, shape, counted)
        except (OSError, SafetensorError) as error:
            what = f"{file} can't be read"
            fix = "copy the folder again"
            raise UsageError(what, where="model.name", why=str(error), fix=fix) from None


@dataclass
class _StoredWeight:
    """Describes a weight of the model, or several that are made of the same tensors."""

    name: str  # of the first one
    converter: Any = None  # of the library; None: the tensor has only another name
    sources: dict[str, list[ReadablePart]] = field(
        default_factory=dict
    )  # by the converter's patterns

    def parts(self, model: Any) -> dict[str, ReadablePart]:
        """Return the parts of these weights by name."""
        if self.converter is None:
            return {self.name: self.sources[""][0]}
        on_meta = {
            pattern: [torch.empty(part.shape, device="meta") for part in parts]
            for pattern, parts in self.sources.items()
        }
        shapes = {name: tuple(each.shape) for name, each in self._made(model, on_meta).items()}
        followed = self._followed()
        if followed is not None and len(shapes) == 1:
            (name,) = shapes
            return {name: followed}
        return {
            name: ComputedPart(partial(self._read, model, name), shape)
            for name, shape in shapes.items()
        }

    def _made(self, model: Any, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Return what the library makes of tensors."""
        converter = copy.deepcopy(self.converter)
        converter.collected_tensors = dict(tensors)
        for pattern, those in tensors.items():
            converter.collected_tensors[pattern] = [partial(_same, each) for each in those]
        made = converter.convert(self.name, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }

    def _read(self, model: Any, name: str) -> Tensor:
        tensors = {pattern: [all_of(each) for each in its] for pattern, its in self.sources.items()}
        return self._made(model, tensors)[name]

    def _followed(self) -> ReadablePart | None:
        """Return the part that the operations make, if they only join, stack or swap."""
        parts_by_key: dict[str, list[ReadablePart]] = {
            key: list(parts) for key, parts in self.sources.items()
        }
        for operation in self.converter.operations:
            kind = type(operation)
            if kind is core_model_loading.MergeModulelist:
                parts_by_key = {
                    key: [StackedPart(parts, operation.dim)] for key, parts in parts_by_key.items()
                }
            elif kind is core_model_loading.Concatenate:
                patterns = [key for key in self.converter.source_patterns if key in parts_by_key]
                joined = [part for key in patterns for part in parts_by_key[key]]
                parts_by_key = {"": [JoinedPart(joined, operation.dim)]}
            elif kind is core_model_loading.Transpose and not operation.check_dims:
                dims = (operation.dim0, operation.dim1)
                parts_by_key = {
                    key: [SwappedPart(p, dims) for p in parts]
                    for key, parts in parts_by_key.items()
                }
            else:
                return None
        made = [part for parts in parts_by_key.values() for part in parts]
        return made[0] if len(made) == 1 else None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _stored_of(
    model: Any, parts: Mapping[str, ReadablePart], wanted: Mapping[str, Tensor]
) -> Iterator[_StoredWeight]:
    """Yield the weights of a model with the tensors of which each is made.

    The loop is that of the library's `convert_and_load_state_dict_in_model`.
    """
    table = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in table if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in table if isinstance(each, core_model_loading.WeightConverter)]
    by_pattern = {key: each for each in converters for key in each.source_patterns}
    rename = partial(
        core_model_loading.rename_source_key,
        base_model_prefix=model.base_model_prefix,
        meta_state_dict=wanted,
    )
    weights: dict[str, _StoredWeight] = {}
    for key in sorted(parts, key=core_model_loading.dot_natural_key):
        name, pattern = rename(key, renamings, converters)
        if name not in wanted and key in wanted:
            name, pattern = rename(key, [], [])
        if name not in wanted:
            continue  # of another head, or of an earlier version of the library
        converter = None if pattern is None else by_pattern[pattern]
        target = weights.setdefault(name, _StoredWeight(name, converter))
        target.sources.setdefault(pattern or "", []).append(parts[key])
    return iter(weights.values())


def fill_buffers(model: nn.Module) -> None:
    """Give the buffers of a model the values that no file has, as the library does it."""
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            methodcaller("_init_weights", module)(model)  # of transformers, not torch's
