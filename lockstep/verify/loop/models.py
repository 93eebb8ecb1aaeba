"""Looks at the models of a training loop: who trains their parameters, and in which mode.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

import weakref
from collections import Counter
from typing import Any

from torch import Tensor, nn

from lockstep.errors import listed
from lockstep.torch_compat.wrapper_names import WRAPPER_NAMES
from lockstep.verify.loop.findings import LoopLog
from lockstep.verify.loop.made import MadeObjects
from lockstep.verify.own_lines import own_line

_WRAPPERS = {*WRAPPER_NAMES, "module", "_forward_module"}
_DRAWS_OR_NORMALISES = (
    nn.Dropout,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)


def plain_name(name: str) -> str:
    """Return a parameter's name as the unwrapped model has it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of wrappers, such as DistributedDataParallel.

    A wrapper's own mode says nothing.
    """
    while inner := [child for name, child in model.named_children() if name in _WRAPPERS]:
        (model,) = inner[:1]
    return model


def _in_training(model: nn.Module) -> bool:
    """Return whether a model is in training mode.

    The stage of a pipeline has no mode of its own, its segments do.
    """
    inner = _unwrapped(model)
    return any(part.training for part in getattr(inner, "segments_here", (inner,)))


def _name_in(model: nn.Module, name: str) -> str:
    """Return the unwrapped model's name of a parameter.

    The stage of a pipeline knows that of the model it is of.
    """
    naming = getattr(_unwrapped(model), "name_in_model", None)
    return plain_name(name) if naming is None else str(naming(plain_name(name)))


class ModelChecks:
    """Looks at models: their parameters' names, optimizers, modes, tied and frozen weights."""

    def __init__(self, log: LoopLog, made: MadeObjects) -> None:
        self._log = log
        self._made = made
        self.models: list[nn.Module] = []
        self.names: dict[int, str] = {}  # id of a parameter → its name
        self._tied: dict[tuple[str, ...], None] = {}
        self._frozen: set[int] = (
            set()
        )  # ids of parameters without gradients, from the first call on
        self._called: set[int] = set()  # ids of modules that were called in the first steps
        self._called_at: dict[int, str] = {}  # id of a module → where it was called last
        self._calls: Counter[tuple[int, bool]] = Counter()  # (model, in training mode) → calls
        # modules that were put into evaluation mode, and where, in order
        self._evaluated: list[tuple[weakref.ref[nn.Module], str]] = []

    @property
    def all_in_training(self) -> bool:
        """Return whether all models are in training mode."""
        return all(map(_in_training, self.models))

    def knows(self, parameter: Tensor) -> bool:
        """Return whether a model with a parameter was called."""
        return id(parameter) in self.names

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter, or what it is where no model with it was called."""
        return self.names.get(id(parameter), "a parameter")

    def left_training(self, module: nn.Module) -> None:
        """Note a module that is put into evaluation mode."""
        others = []
        for ref, line in self._evaluated:
            other = ref()
            if other is not None and other is not module:
                others.append((ref, line))
        self._evaluated = [*others, (weakref.ref(module), own_line())]

    def module_called(self, module: nn.Module) -> None:
        """Note a module that takes part in training, and where it is called."""
        self._called.add(id(module))
        if self._log.looks:
            self._called_at[id(module)] = own_line()

    def model_called(self, model: nn.Module) -> None:
        """Look at a model that is called from outside, with gradients."""
        if not any(model is each for each in self.models):
            self._begin_with(model)
        self._calls[id(model), _in_training(model)] += 1

    def _begin_with(self, model: nn.Module) -> None:
        """Learn a model's names, and its tied and frozen parameters."""
        self.models.append(model)
        shared: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(parameter), []).append(name)
            self.names.setdefault(id(parameter), _name_in(model, name))
            if not parameter.requires_grad:
                self._frozen.add(id(parameter))
        self._tied |= {tuple(names): None for names in shared.values() if len(names) > 1}

    def is_frozen(self, parameter: Tensor) -> bool:
        """Return whether a parameter has required no gradient since its model was called first."""
        return id(parameter) in self._frozen and not parameter.requires_grad

    def check_modes(self, own: list[Tensor]) -> None:
        """Find a model that evaluation code has left in evaluation mode."""
        updated = {id(p) for p in own if p.grad is not None}
        for model in self.models:
            was_in_training = self._calls[id(model), True] > 0
            is_updated = not updated.isdisjoint(map(id, model.parameters()))
            if (
                was_in_training
                and is_updated
                and not _in_training(model)
                and _draws_or_normalises(model)
            ):
                self._find_evaluation_mode(model, f", from step {self._log.steps} on")

    def _find_evaluation_mode(self, model: nn.Module, since: str) -> None:
        text = (
            f"the model is trained in evaluation mode{since}: without dropout, and with the running"
            " statistics of its normalisations"
        )
        fix = "model.train() before the training loop and after evaluation"
        parts = set(map(id, model.modules()))
        lines = [line for module, line in self._evaluated if id(module()) in parts]
        self._log.find("evaluation mode", text, fix, lines[-1] if lines else "")

    def check_optimizers(self, optimizers: list[Any]) -> None:
        """Find parameters without an optimizer, and weights that are no longer tied."""
        in_optimizers = ids_of_parameters(optimizers)
        for model in self.models:
            self._check_optimizers_of(model, optimizers, in_optimizers)
            self._check_tied_weights(model)

    def check_first_modes(self, optimizers: list[Any]) -> None:
        """Find models that were in evaluation mode in each of the first steps."""
        in_optimizers = ids_of_parameters(optimizers)
        for model in self.models:
            calls = self._calls[id(model), False]
            in_training = self._calls[id(model), True]
            is_trained = any(id(p) in in_optimizers for p in model.parameters())
            if calls > 1 and not in_training and is_trained and _draws_or_normalises(model):
                self._find_evaluation_mode(model, "")

    def _check_optimizers_of(
        self, model: nn.Module, optimizers: list[Any], in_optimizers: set[int]
    ) -> None:
        """Find parameters that require gradients, and that no optimizer has.

        A model none of whose parameters is in an optimizer is frozen on purpose, and one that is
        flattened has other parameters than its optimizer.
        """
        trained = {
            _name_in(model, name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        missing = [
            name
            for name, parameter in trained.items()
            if id(parameter) not in in_optimizers and parameter.is_leaf
        ]
        is_flattened = any(
            "FullyShardedDataParallel" in type(module).__name__ for module in model.modules()
        )
        if missing and len(missing) < len(trained) and not is_flattened:
            text = f"{listed(missing, 5)} require gradients, and no optimizer has them"
            fix = "give the optimizer all of model.parameters(), after the last of them is made"
            line = self._made.line_of(optimizers[-1]) if optimizers else ""
            self._log.find("parameters without an optimizer", text, fix, line)

    def _check_tied_weights(self, model: nn.Module) -> None:
        """Find weights that were one tensor when the model was first seen, and are several now."""
        now = dict(model.named_parameters(remove_duplicate=False))
        for names in self._tied:
            tensors = {id(now[name]) for name in names if name in now}
            if len(tensors) > 1 and all(name in now for name in names):
                text = " and ".join(map(plain_name, names))
                self._log.find("tied weights", f"{text} were one tensor, and are trained apart now")

    def check_detached(self, without_gradient: list[str]) -> None:
        """Find parameters of modules that are called, among those that never got a gradient."""
        modules = [
            (_name_in(model, name), module)
            for model in self.models
            for name, module in model.named_modules()
        ]
        called = {name for name, module in modules if id(module) in self._called}
        detached = [name for name in without_gradient if _owner(name) in called]
        # of an optimizer that gets no gradient at all
        known = {"stale optimizer", "gradient synchronisation", "parameters without gradients"}
        if not detached or known & set(self._log.findings):
            return
        text = (
            f"{listed(detached, 5)} take part in the forward pass, and got no gradient in"
            f" {self._log.first} steps"
        )
        fix = "let no detach(), no_grad() or .data cut them off from the loss"
        owner = _owner(detached[0])
        lines = [self._called_at.get(id(module), "") for name, module in modules if name == owner]
        self._log.find("parameters without gradients", text, fix, next(filter(None, lines), ""))

    def loaded(self, model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
        """Look at the result of `load_state_dict(strict=False)`."""
        if missing and unexpected and 2 * len(missing) > len(list(model.state_dict())):
            text = (
                f"load_state_dict(strict=False) left out {len(missing)} tensors, such as"
                f" {missing[0]}, and did not know {len(unexpected)}, such as {unexpected[0]}"
            )
            fix = "give the names of the checkpoint the prefix of the model's"
            self._log.find("checkpoint not loaded", text, fix, own_line())


def ids_of_parameters(optimizers: list[Any]) -> set[int]:
    """Return the ids of all parameters that optimizers have."""
    return {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _owner(parameter_name: str) -> str:
    """Return the name of the module that has a parameter."""
    return parameter_name.rpartition(".")[0]


def _draws_or_normalises(model: nn.Module) -> bool:
    return any(isinstance(module, _DRAWS_OR_NORMALISES) for module in model.modules())
