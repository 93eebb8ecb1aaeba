"""Knows the models of a script: their names, where they were made and called, and what ranks hold.

Tests: tests/verify/test_script.py
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.tensors import with_other_last_bits
from lockstep.verify.loop.models import plain_name
from lockstep.verify.own_lines import line_outside_of_modules, own_line
from lockstep.verify.script.observed import values
from lockstep.verify.script.record import ScriptRecord, TensorPiece
from lockstep.verify.script.task import ScriptTask

STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ObservedModels:
    """All models that one process of a script calls in training.

    Args:
        task: its first values are given to the models, by name.
        record: receives first values, and where models are made and called.
        rank: of this process.
        world: number of ranks.
        optimizers: returns those that have been made.
        own_gradient: is called with a parameter's name and its gradient in each backward pass,
            before ranks reduce it.
    """

    def __init__(
        self,
        task: ScriptTask,
        record: ScriptRecord,
        rank: int,
        world: int,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
        own_gradient: Callable[[str, Tensor], None],
    ) -> None:
        self._task = task
        self._record = record
        self._rank = rank
        self._world = world
        self._optimizers = optimizers
        self._own_gradient = own_gradient
        self._given = task.given
        self._models: list[nn.Module] = []
        self._prefixes: dict[int, str] = {}  # number of a model → of its parameters' names
        self._names: dict[int, str] = {}  # id of a parameter → its name
        self._flat: set[int] = set()  # ids of parameters in modules that FSDP1 cuts
        self._modules: dict[int, str] = {}  # id of a module → its name in the ranks
        # where modules were made, whoever calls them
        self._made: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def __contains__(self, module: object) -> bool:
        return any(module is model for model in self._models)

    def module_made(self, module: nn.Module) -> None:
        """Note where a module is made."""
        self._made[id(module)] = (weakref.ref(module), line_outside_of_modules())

    def module_name(self, module: nn.Module) -> str | None:
        """Return the name that the ranks have for a module; None if no model with it was called."""
        return self._modules.get(id(module))

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter; None if no model with it was called."""
        return self._names.get(id(parameter))

    def name_by_position(self, parameters: list[Tensor]) -> list[str]:
        """Return the names of an optimizer's parameters: a number for each that no model has."""
        names = self._given.names
        for position, parameter in enumerate(parameters):
            name = f"parameter {position}"
            if id(parameter) not in self._names:
                self._names[id(parameter)] = names.get(name, name)
                if not self._models:  # a function that is transformed may call the only one
                    self._record.first[self._names[id(parameter)]] = self.piece(parameter)
        return [self._names[id(parameter)] for parameter in parameters]

    def note_call(self, model: nn.Module) -> None:
        """Note where a model of the script is called, and whether a wrapper reduces for it."""
        number = next(at for at, each in enumerate(self._models) if each is model)
        prefix = self._prefixes.get(number)
        if prefix is None:
            return
        lines = self._record.lines
        line = own_line()
        if line:
            lines.models[prefix] = line
        if isinstance(model, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            lines.wrapped.add(prefix)

    def begin_with(self, model: nn.Module) -> None:
        """Learn the names of a model at its first call, and give it the task's first values."""
        parameters = dict(model.named_parameters())
        is_new = not any(id(parameter) in self._names for parameter in parameters.values())
        prefix = f"{len(self._models)}:" if self._models and is_new else ""
        if is_new or not self._models:
            self._prefixes[len(self._models)] = prefix
            self._record.lines.made[prefix] = self._line_that_made(model)
        self._models.append(model)
        self._take_names_by_order(prefix, parameters)
        modules = list(model.modules())
        if any(isinstance(module, STATISTICS) for module in modules):
            self._record.note_statistics()
        classes = {cls.__name__ for module in modules for cls in type(module).__mro__}
        is_flat = "FullyShardedDataParallel" in classes
        for name, module in model.named_modules():
            self._modules.setdefault(id(module), self._name_of_module(prefix + plain_name(name)))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in parameters.items():
            if id(parameter) in self._names:  # a part of a model that was called before, or around
                continue
            plain = prefix + plain_name(name)
            plain = self._given.names.get(plain, plain)
            self._begin_with_parameter(plain, parameter, is_flat=is_flat)
            can_be_nudged = parameter.is_floating_point() and not isinstance(parameter, DTensor)
            if self._task.conditions.nudged and can_be_nudged:
                with torch.no_grad():
                    parameter.copy_(with_other_last_bits(parameter, generator))

    def _take_names_by_order(self, prefix: str, parameters: dict[str, nn.Parameter]) -> None:
        """Take the ranks' names of a model's parameters, by the order in the only optimizer.

        A framework may wrap the model on several ranks only, so that another module is called
        first. Without this a further run, given the names, would be needed.
        """
        optimizers = self._optimizers()
        if not self._given.order or self._task.given.names or len(optimizers) != 1:
            return
        trained = [p for group in optimizers[0].param_groups for p in group["params"]]
        if len(trained) != len(self._given.order):
            return
        name_of = dict(zip(map(id, trained), self._given.order, strict=True))
        names = {
            prefix + plain_name(name): name_of[id(parameter)]
            for name, parameter in parameters.items()
            if id(parameter) in name_of
        }
        if any(mine != theirs for mine, theirs in names.items()):
            self._record.names.update(names)
            self._given = replace(self._given, names=self._record.names)

    def _begin_with_parameter(self, name: str, parameter: nn.Parameter, *, is_flat: bool) -> None:
        """Record a parameter's first value, and give it that of the task; watch its gradient.

        `is_flat`: FSDP1 has put it into one flat parameter with others, and has its gradients.
        """
        if is_flat:
            self._flat.add(id(parameter))
        elif parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.register_hook(partial(self._own_gradient, name))  # type: ignore[no-untyped-call]
        self._names[id(parameter)] = name
        self._record.first[name] = self.piece(parameter)
        given = self._given.for_rank(self._given.first.get(name, ()), self._rank)
        if given:
            with torch.no_grad():
                joined = values.give(parameter, given)
            if joined is not None:
                self._record.joined[name] = joined

    def _line_that_made(self, model: nn.Module) -> str:
        """Return the line that made the innermost of a model's modules; empty if none is known."""
        lines = []
        for part in model.modules():
            reference, line = self._made.get(id(part), (None, ""))
            if reference is not None and reference() is part and line:
                lines.append(line)
        return lines[-1] if lines else ""

    def _name_of_module(self, name: str) -> str:
        """Return the name that the ranks have for a module of this process."""
        return (self._given.prefix + name).rstrip(".")

    def gradients(self, parameters: list[Tensor]) -> dict[str, TensorPiece]:
        """Return this rank's pieces of the gradients, by the names of their parameters."""
        pieces = {}
        for position, parameter in enumerate(parameters):
            if parameter.grad is not None:
                name = self._names.get(id(parameter), f"parameter {position}")
                pieces[name] = self.piece(parameter.grad, parameter)
        return pieces

    def piece(self, tensor: Tensor, parameter: Tensor | None = None) -> TensorPiece:
        """Return this rank's piece of a parameter, or of its gradient."""
        is_flat = id(tensor if parameter is None else parameter) in self._flat
        return values.piece_of(tensor, flat=self._world > 1 and is_flat)
