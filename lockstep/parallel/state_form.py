"""The form that a model gives its `state_dict`, by hooks, overridden methods and extra state.

Checkpoints hold parameters and persistent buffers by their names in the model, and
`get_extra_state` as JSON. What comes from a plain `state_dict`, or is to be one, goes through the
model's own code: for the time of a call it holds whole tensors on the CPU, in place of this rank's.

Tests: tests/checkpoint/test_own_forms.py
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.torch_compat.module_state import RegisteredState, without_hooks_of_fsdp

_METHODS = (
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)


@dataclass
class StateForm:
    """The form of one model, which is placed, as all ranks know it.

    Args:
        root: the model; it keeps its modules when it is placed.
        modules: names of those that have a form of their own.
        extra: name → module, of those with state beside their tensors.
        shapes: name → (shape, dtype) of the whole parameters and persistent buffers; all names of
            tied ones.
        owners: further name → first name, of tied tensors.
    """

    root: nn.Module
    modules: list[str]
    extra: dict[str, nn.Module]
    shapes: dict[str, tuple[torch.Size, torch.dtype]]
    owners: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, registered: RegisteredState) -> "StateForm | None":
        """Return the form of a model that is to be placed, with what is registered on its modules.

        None where torch's own code alone makes its `state_dict`.
        """
        named = dict(model.named_modules())
        with_own_form = [
            name for name, module in named.items() if _has_own_form(module, registered.hooks[name])
        ]
        if not with_own_form:
            return None
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        buffers = model.named_buffers(remove_duplicate=False)
        tensors |= {name: buffer for name, buffer in buffers if name in registered.persistent}
        first: dict[int, str] = {}
        owners = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        extra = {
            name: named[name]
            for name in with_own_form
            if _is_own(type(named[name]).get_extra_state)
        }
        _check_extra(extra)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        return cls(
            model, [name or type(model).__name__ for name in with_own_form], extra, shapes, owners
        )

    def written(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the model's own `state_dict` for whole tensors, by all their names.

        Others stay as they are.
        """
        with self._holding(tensors):
            state = dict(self.root.state_dict())
        return state | {name: tensor for name, tensor in tensors.items() if name not in self.shapes}

    def read(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the whole tensors that the model makes of a `state_dict`, by their first names.

        Raises:
            UsageError: the model's `load_state_dict` refuses it.
        """
        full = {
            name: torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in self.shapes.items()
            if self.owners[name] == name
        }
        with self._holding({name: full[first] for name, first in self.owners.items()}):
            try:
                self.root.load_state_dict(dict(state))
            except (RuntimeError, KeyError) as error:
                lines = [line.strip() for line in str(error).splitlines()]
                fix = "give what state_dict() of this very model returns"
                raise UsageError(
                    "the model does not load the state", why=" ".join(lines), fix=fix
                ) from error
        return full

    def extra_state(self, parts: Iterable[nn.Module]) -> dict[str, Any]:
        """Return name → state beside the tensors, of the modules within `parts`, for JSON."""
        modules_here = {id(module) for part in parts for module in part.modules()}
        states = {
            name: _json_of(name, module)
            for name, module in self.extra.items()
            if id(module) in modules_here
        }
        return {name: value for name, value in states.items() if value is not None}

    def load_extra(self, state: Mapping[str, Any]) -> None:
        """Give the modules what `extra_state` returned, of all ranks."""
        for name, value in state.items():
            if name in self.extra:
                self.extra[name].set_extra_state(value)

    @contextmanager
    def _holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model hold these tensors, by their names, inside of the block."""
        kept: list[tuple[nn.Module, str, Any]] = []
        for path, module in self.root.named_modules(remove_duplicate=False):
            parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, old in (
                parameters | dict(module.named_buffers(recurse=False, remove_duplicate=False))
            ).items():
                full = f"{path}.{name}" if path else name
                if full in tensors:
                    kept.append((module, name, old))
                    new = tensors[full]
                    setattr(
                        module,
                        name,
                        nn.Parameter(new, requires_grad=False) if name in parameters else new,
                    )
        try:
            with without_hooks_of_fsdp(self.root):
                yield
        finally:
            for module, name, old in reversed(kept):
                setattr(module, name, old)


def _has_own_form(module: nn.Module, hooks: Sequence[Any]) -> bool:
    own = [vars(module).get(name) or getattr(type(module), name) for name in _METHODS]
    return any(map(_is_own, (*own, *hooks)))


def _is_own(function: Any) -> bool:
    """Return whether a function is not torch's.

    torch's functions leave the current tensors as they are.
    """
    function = getattr(function, "func", function)  # of functools.partial
    where = getattr(function, "__module__", None) or type(function).__module__
    return not (where == "torch" or where.startswith("torch."))


def _check_extra(extra: Mapping[str, nn.Module]) -> None:
    for name, module in extra.items():
        _json_of(name, module)
        if not _is_own(type(module).set_extra_state):
            what = f"{name or type(module).__name__} has get_extra_state and no set_extra_state"
            raise UsageError(what, fix="write both: a run that resumes gives the state back")


def _json_of(name: str, module: nn.Module) -> Any:
    """Return a module's extra state; refuse what JSON would change."""
    value = module.get_extra_state()
    if value is None or (isinstance(value, Tensor) and not value.numel()):
        return None
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        what = f"get_extra_state of {name or type(module).__name__} returns what JSON can't hold"
        fix = (
            "return numbers, strings, lists and dicts of them; register tensors as buffers, by"
            " self.register_buffer('name', tensor)"
        )
        raise UsageError(
            what, where=listed([type(value).__name__]), why="checkpoints hold it as JSON", fix=fix
        )
    return value
