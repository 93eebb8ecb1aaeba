"""Finds the module behind a loss function, which may have weights.

Such weights are class centres, a temperature, or the weights of terms.

Tests: tests/parity/test_loss_weights.py
"""

import functools
import inspect
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.attributes import attributes_of
from lockstep.errors import UsageError, listed
from lockstep.torch_compat.module_state import persistent_buffers
from lockstep.torch_compat.wrapper_names import WRAPPER_NAMES

PREFIX = "loss_fn."  # of the names of a loss function's weights in a model's state


def module_of(loss_fn: Any) -> nn.Module | None:
    """Return the module that a loss function is, whose method it is, or that it wraps.

    None if there is none.
    """
    if isinstance(loss_fn, functools.partial):
        return module_of(loss_fn.func)
    if inspect.ismethod(loss_fn):
        return module_of(loss_fn.__self__)
    wrapped = next(
        (found for name in WRAPPER_NAMES if (found := getattr(loss_fn, name, None)) is not None),
        None,
    )
    inner = wrapped or getattr(loss_fn, "loss_fn", None)  # of torch.compile, or a WholeBatch
    if isinstance(inner, nn.Module) or (callable(inner) and not isinstance(loss_fn, nn.Module)):
        return module_of(inner)
    return loss_fn if isinstance(loss_fn, nn.Module) else None


@dataclass(frozen=True)
class LossModule:
    """A loss function that is a module, beside the model whose loss it computes."""

    module: nn.Module
    # name → parameter that trains and is not the model's, too
    weights: dict[str, nn.Parameter]
    # name → persistent buffer that is not the model's, nor an argument of torch's losses
    buffers: dict[str, Tensor]
    shared: list[str]  # names of the model's parameters that it uses
    taken: list[str]  # names of the model's parameters that are named like its own


def read_loss(loss: nn.Module, model: nn.Module) -> LossModule:
    """Return what a loss function has of its own, and what it shares with the model."""
    of_model = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {
        PREFIX + name: parameter
        for name, parameter in loss.named_parameters()
        if parameter.requires_grad and id(parameter) not in of_model
    }
    persistent = persistent_buffers(loss)
    of_torch = (
        module
        for module in loss.modules()
        if type(module).__module__ == nn.CrossEntropyLoss.__module__
    )
    others = {id(buffer) for module in of_torch for buffer in module.buffers(recurse=False)}
    others |= {id(buffer) for buffer in model.buffers()}
    buffers = {
        PREFIX + name: buffer
        for name, buffer in loss.named_buffers()
        if name in persistent and id(buffer) not in others
    }
    shared = [of_model[id(p)] for p in loss.parameters() if id(p) in of_model]
    taken = [name for name in of_model.values() if name.startswith(PREFIX)]
    return LossModule(loss, weights, buffers, shared, taken)


def hidden_parameters(loss_fn: Any, of_model: Container[int]) -> list[nn.Parameter]:
    """Return the parameters that train in a loss function that is not a module.

    They are in its closure or its attributes. `of_model`: ids of the model's own, which are not
    among them.
    """
    if loss_fn is None or module_of(loss_fn) is not None:
        return []
    held = dict.fromkeys(_parameters_in(loss_fn, depth=3))
    return [p for p in held if p.requires_grad and id(p) not in of_model]


def _parameters_in(value: Any, depth: int) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth and not isinstance(value, type | Tensor):
        for inner in _held_by(value):
            yield from _parameters_in(inner, depth - 1)


def _held_by(value: Any) -> list[Any]:
    """Return what a function, a container or an object holds."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__]
    if inspect.isfunction(value):
        seen = inspect.getclosurevars(value)
        return [
            *seen.nonlocals.values(),
            *(v for v in seen.globals.values() if not inspect.ismodule(v)),
        ]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    return [] if inspect.ismodule(value) else list((attributes_of(value) or {}).values())


def refuse_shared(loss: LossModule, *, cut: bool) -> None:
    """Refuse a loss function that shares parameters, or their names, with the model.

    Shared parameters are refused only where the model is `cut` over ranks, equal names everywhere.
    """
    if cut and loss.shared:
        what = f"the loss function uses {listed(loss.shared)} of the model"
        why = "a rank has its piece of it alone, outside of the model's forward pass"
        fix = "let forward return what the loss needs of it, or write strategy: ddp"
        raise UsageError(what, where="loss_fn", why=why, fix=fix)
    if loss.taken and loss.weights:
        what = f"the model's {listed(loss.taken)} is named like a weight of the loss function"
        raise UsageError(
            what, where="loss_fn", fix="name the model's attribute otherwise than loss_fn"
        )
