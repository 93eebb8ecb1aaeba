"""An optimizer's state by canonical parameter names, through torch.optim's public attributes.

A tensor of the state is named `"<parameter>//<key>"`, as in `layers.0.weight//exp_avg`. What is no tensor (the options
of the groups, plain numbers of the state) is JSON. Nothing depends on the order of parameters or on their number per
rank.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lockstep.checkpoint.local import open_part
from lockstep.checkpoint.manifest import read_manifest
from lockstep.checkpoint.names import optimizer_part
from lockstep.checkpoint.snapshot import as_json
from lockstep.errors import UsageError

SEPARATOR = "//"
_STEP = "step"  # torch's optimizers keep it on CPU, unless their kernels read it on the device
_ON_DEVICE = ("capturable", "fused")

# Which kernels compute the update, not what it is: there is no fused SGD for the shards that may go on from whole
# parameters, and a run on a CPU may go on from one on a GPU. So the running optimizer keeps its own.
_KERNELS = ("foreach", "fused", "capturable")


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer, for a `Snapshot`.

    Args:
        names: id of a parameter → its canonical name; every parameter of the optimizer has one.

    Returns:
        (the tensors, `"<parameter>//<key>"` → tensor, sharing the optimizer's memory; the rest as JSON:
        `{"groups": [{"params": [names], "options": {…}}], "values": {parameter: {key: number}}}`).

    Raises:
        UsageError: a parameter has no name, or a value is neither a tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        params = [_name(parameter, names) for parameter in group["params"]]
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append({"params": params, "options": as_json(options, "an option of the optimizer")})
        for name, parameter in zip(params, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}{SEPARATOR}{key}"] = value
                else:
                    values.setdefault(name, {})[key] = as_json(value, f"the optimizer's {key!r} of {name}")
    return tensors, {"groups": groups, "values": values}


def optimizers_in(path: str | Path) -> list[str]:
    """Return the names of the optimizers whose states a checkpoint holds."""
    parts = (part.partition("/") for part in read_manifest(path).parts)
    return sorted(name for kind, _, name in parts if kind == "optimizer")


def has_optimizer(path: str | Path, name: str) -> bool:
    """Whether a checkpoint holds the state of an optimizer of this name; one saved for its weights alone holds none."""
    return optimizer_part(name) in read_manifest(path).parts


def optimizer_targets(path: str | Path, name: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty tensors for the stored state of one optimizer, of the parameters that this rank holds.

    A fresh optimizer has no state to load into. What was stored in a parameter's shape is laid out like the parameter
    (device, mesh, placements); everything else (`step`) is a plain tensor on CPU. The dtype is the stored one.

    Args:
        parameters: canonical name → parameter, of this rank.
    """
    folder = Path(path)
    stored = open_part(folder, read_manifest(folder), optimizer_part(name)).stored
    return {
        full: _target(key, tensor, parameters[parameter])
        for full, tensor in stored.tensors.items()
        for parameter, _, key in (full.rpartition(SEPARATOR),)
        if parameter in parameters
    }


def restore_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor], groups: Mapping[str, Any]
) -> None:
    """Give an optimizer the state that `optimizer_state` took and `load` filled.

    Args:
        names: id of a parameter of this rank → its canonical name.
        tensors: the filled targets; they become the optimizer's own.
        groups: the JSON part; it may list parameters of other ranks too.

    Raises:
        UsageError: the optimizer has other groups than the stored one.
    """
    matched = list(_match_groups(optimizer, names, groups["groups"]))
    for group, stored in matched:
        for key, value in stored.items():
            if key not in _KERNELS:
                group[key] = _like(group.get(key), value)
    values: Mapping[str, Mapping[str, Any]] = groups["values"]
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        parameter, _, key = full.rpartition(SEPARATOR)
        by_parameter.setdefault(parameter, {})[key] = tensor
    for group, _ in matched:
        on_device = any(group.get(option) for option in _ON_DEVICE)
        for parameter in group["params"]:
            name = _name(parameter, names)
            state: dict[str, Any] = {**values.get(name, {})}
            for key, tensor in by_parameter.get(name, {}).items():
                state[key] = tensor if key == _STEP and not on_device else tensor.to(parameter.device)
            optimizer.state[parameter] = state
            if not state:
                del optimizer.state[parameter]


def _match_groups(
    optimizer: Optimizer, names: Mapping[int, str], stored: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of the optimizer with the options of the stored group that has its parameters."""
    home = {name: i for i, group in enumerate(stored) for name in group["params"]}
    if len(stored) != len(optimizer.param_groups):
        raise UsageError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(stored)}",
            fix="build the optimizer as it was built for the run that saved",
        )
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = _name(parameter, names)
            if home.get(name) != i:
                where = f"in group {home[name]}" if name in home else "in none"
                raise UsageError(
                    f"{name} is in group {i} of the optimizer, and {where} in the checkpoint",
                    fix="build the optimizer as it was built for the run that saved",
                )
        yield group, stored[i]["options"]


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise UsageError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model does not have",
            why="it was made before the model was placed, or from another model: what it updates is not trained on",
        )
    return names[id(parameter)]


def _target(key: str, stored: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    dtype = stored.properties.dtype
    if key != _STEP and stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype)


def _plain(value: Any) -> Any:
    """An option as JSON has it: a learning rate kept in a tensor is its number."""
    return value.item() if isinstance(value, Tensor) else value


def _like(current: Any, stored: Any) -> Any:
    """A stored option in the form that the optimizer keeps it in."""
    if isinstance(current, Tensor):
        return current.fill_(stored)
    return tuple(stored) if isinstance(current, tuple) else stored
