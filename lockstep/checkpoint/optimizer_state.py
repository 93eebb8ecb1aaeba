"""The state of an optimizer in a checkpoint: by names of parameters, in any layout of ranks.

Tensors are stored by canonical parameter names, as in `layers.0.weight//exp_avg`; options of the
groups and plain numbers are JSON. Nothing depends on the order of parameters or on their number per
rank.

Tests: tests/checkpoint/test_optimizers.py, tests/checkpoint/test_ranks.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.manifest import GROUPS_KEY, read_manifest, read_state
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.read import open_part
from lockstep.checkpoint.snapshot import as_json
from lockstep.checkpoint.storage import Checkpoint
from lockstep.errors import UsageError

SEPARATOR = "//"
_AS_BUILT = "build the optimizer as it was built for the run that saved"
_STEP = "step"  # torch's optimizers keep it on CPU, unless one of these options is on
_STEP_ON_DEVICE = ("capturable", "fused")
# These options choose kernels and do not change the update. The running optimizer keeps its own,
# because the stored ones may not be available: shards have no fused SGD, and a run on a CPU may
# continue one on a GPU.
_KERNEL_OPTIONS = ("foreach", "fused", "capturable")


def optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of an optimizer, for a `Snapshot`.

    It is two things: the tensors, `"<parameter>//<key>"` → tensor, which share the optimizer's
    memory, and the rest as JSON: `{"groups": [{"params": [names], "options": {…}}], "values":
    {parameter: {key: number}}}`. `names` has the canonical name by the id of each parameter.

    A UsageError is raised for a parameter without a name, and a value that is neither a tensor nor
    JSON.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        params = [_name(parameter, names) for parameter in group["params"]]
        options = {
            k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"
        }
        groups.append({"params": params, "options": as_json(options, "an option of the optimizer")})
        for name, parameter in zip(params, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}{SEPARATOR}{key}"] = value
                else:
                    values.setdefault(name, {})[key] = as_json(
                        value, f"the optimizer's {key!r} of {name}"
                    )
    return tensors, {"groups": groups, "values": values}


def optimizers_in(path: Checkpoint) -> list[str]:
    """Return the names of the optimizers with a state in a checkpoint."""
    parts = (part.partition("/") for part in read_manifest(path).parts)
    return sorted(name for kind, _, name in parts if kind == "optimizer")


def optimizer_targets(
    path: Checkpoint, name: str, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return empty tensors, by canonical name, for the stored state of one optimizer.

    They are those of this rank's `parameters`. A state tensor with the shape of its parameter gets
    the device, mesh and placements of the parameter; any other (`step`) is a plain tensor on CPU.
    The dtype is the stored one.
    """
    checkpoint = locate(path)
    targets = {}
    for full, stored in open_part(
        checkpoint, read_manifest(checkpoint), f"optimizer/{name}"
    ).stored.tensors.items():
        of, _, key = full.rpartition(SEPARATOR)
        dtype = stored.properties.dtype
        if of in parameters and key != _STEP and stored.size == parameters[of].shape:
            targets[full] = torch.empty_like(parameters[of], dtype=dtype, requires_grad=False)
        elif of in parameters:
            targets[full] = torch.empty(stored.size, dtype=dtype)
    return targets


def add_missing_groups(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], path: Checkpoint, name: str
) -> None:
    """Add the parameter groups that the run that saved had added later.

    Nothing is added unless the optimizer's own groups are the first of those in the checkpoint.
    Parameters that were frozen until then train from now on.
    """
    names = {id(parameter): each for each, parameter in parameters.items()}
    stored = [group["params"] for group in read_state(path)[GROUPS_KEY][name]["groups"]]
    own = [
        [names.get(id(parameter)) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    stored_here = [[each for each in group if each in parameters] for group in stored]
    if len(stored_here) > len(own) and stored_here[: len(own)] == own:
        for group in stored_here[len(own) :]:
            optimizer.add_param_group(
                {"params": [parameters[each].requires_grad_() for each in group]}
            )


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, Any],
) -> None:
    """Give an optimizer the state that `load` has read.

    Args:
        optimizer: of this rank; its parameters are in the same groups as those that were saved.
        names: the canonical name by the id of each parameter of this rank.
        tensors: of `optimizer_targets`, which the optimizer takes over.
        groups: as they were stored; they may list parameters of other ranks, too.

    Raises:
        UsageError: the optimizer has other groups.
    """
    _require_same_groups(optimizer, names, groups["groups"])
    for group, stored in zip(optimizer.param_groups, groups["groups"], strict=True):
        _restore_options(group, stored["options"])

    values: Mapping[str, Mapping[str, Any]] = groups["values"]
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        parameter, _, key = full.rpartition(SEPARATOR)
        by_parameter.setdefault(parameter, {})[key] = tensor
    for group in optimizer.param_groups:
        on_device = any(group.get(option) for option in _STEP_ON_DEVICE)
        for parameter in group["params"]:
            name = _name(parameter, names)
            state: dict[str, Any] = {**values.get(name, {})}
            for key, tensor in by_parameter.get(name, {}).items():
                state[key] = (
                    tensor if key == _STEP and not on_device else tensor.to(parameter.device)
                )
            optimizer.state[parameter] = state
            if not state:
                del optimizer.state[parameter]


def _require_same_groups(
    optimizer: Optimizer, names: Mapping[int, str], stored: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse an optimizer whose parameters are in other groups than those of a checkpoint."""
    if len(stored) != len(optimizer.param_groups):
        what = (
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint"
            f" {len(stored)}"
        )
        raise UsageError(what, fix=_AS_BUILT)
    home = {name: number for number, group in enumerate(stored) for name in group["params"]}
    for number, group in enumerate(optimizer.param_groups):
        for name in (_name(parameter, names) for parameter in group["params"]):
            if home.get(name) != number:
                where = f"in group {home[name]}" if name in home else "in none"
                what = (
                    f"{name} is in group {number} of the optimizer, and {where} in the checkpoint"
                )
                raise UsageError(what, fix=_AS_BUILT)


def _restore_options(group: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Give a parameter group the stored options, but for those that choose kernels."""
    for key, value in stored.items():
        current = group.get(key)
        if key in _KERNEL_OPTIONS:
            continue
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    """Return the canonical name of a parameter that an optimizer holds."""
    if id(parameter) not in names:
        what = (
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model does"
            " not have"
        )
        why = (
            "it was made before the model was placed, or from another model: what it updates is not"
            " trained on"
        )
        raise UsageError(what, why=why)
    return names[id(parameter)]
