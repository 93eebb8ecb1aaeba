"""Units of FSDP2: which modules are gathered at once, and which of them the forward passes use.

FSDP2 requires that every rank calls the same units in the same order (see
`lockstep.parallel.fsdp.order`), and that the same parameters get gradients on all ranks.
`UnitUsage` gives a parameter that only other ranks use a gradient of zeros, and one that no rank
uses none. (On GPUs, after the first step, ranks compare what they used only where a model left
something unused: a comparison holds up the host.)

A language model whose output layer is tied to its embedding, with `auto_wrap_policy: transformer`:

    layers.0, layers.1     two units, each gathered while its own forward pass runs
    embedding, head        one parameter, used outside of either: in the root's unit, with the norm

A mixture of three experts on two ranks, in a step in which rank 0 used experts 0 and 1 and rank 1
expert 1 alone: the maximum over ranks of [1, 1, 0] and [0, 1, 0] is [1, 1, 0]. Rank 1's gradient of
expert 0 was zeros when FSDP2 reduced it; expert 2's `.grad` becomes None, as in one process, so
that an optimizer leaves its weights and moments alone.

Tests: tests/parallel/fsdp/test_fsdp.py
"""

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.config import FSDPConfig
from lockstep.errors import UsageError
from lockstep.parallel.execution.passes import MicroBatchPass
from lockstep.parallel.facts import ModelFacts, Named
from lockstep.registry import load_object

# part of torch's message where a sharded parameter meets a plain tensor
_MIXED = "mixed torch.Tensor and DTensor"
# and where the gradient of a sharded one is asked for
_NOT_IN_GRAPH = "appears to not have been used in the graph"
_END = 0  # the position of the model itself in the list of units: its forward pass is over


def explain_mixing(
    error: BaseException, explanation: Callable[[], UsageError]
) -> UsageError | None:
    """Return an explanation where torch found a parameter that is used while it is sharded.

    None for other errors.
    """
    if not isinstance(error, RuntimeError):
        return None
    if _NOT_IN_GRAPH in str(error):
        return used_elsewhere()
    return explanation() if _MIXED in str(error) else None


def used_elsewhere() -> UsageError:
    """Return the error for a parameter used outside of its module, where its name is unknown."""
    what = (
        "the forward pass uses a parameter outside of the module that it belongs to, where it is"
        " sharded"
    )
    why = "FSDP2 gathers the parameters of a block only while that block's own forward pass runs"
    fix = (
        "use it through its module; let a teacher follow its student in Trainer(…,"
        " after_update=function) (docs/how_to/teachers.md); or use ddp"
    )
    return UsageError(what, where="the model's forward pass", why=why, fix=fix)


@dataclass(frozen=True)
class Unit:
    """A module that FSDP2 gathers at once, without the units inside of it."""

    name: str  # in the model; the root, which is the model itself, has none
    module: nn.Module
    own: tuple[str, ...]  # names, in the module, of the parameters that are in no unit inside of it
    position: int  # of the module among the model's; the root's is 0

    def parameters(self) -> list[nn.Parameter]:
        """Return the unit's own parameters, as they are now."""
        return [self.module.get_parameter(name) for name in self.own]


def units_of(facts: ModelFacts, config: FSDPConfig) -> list[Unit]:
    """Return the units of a model, inner ones first, the root last."""
    segments = dict(facts.segments or ())
    borrowers = [
        (name, segments[segment])
        for segment, names in facts.borrowed.items()
        for name in names.values()
    ]
    return contained_units(facts.model, _candidates(facts, config), borrowers)


def contained_units(
    model: nn.Module, candidates: Named, borrowers: Sequence[tuple[str, nn.Module]] = ()
) -> list[Unit]:
    """Return those candidates that can be units, inner ones first, and the root last.

    A module is not a unit if a parameter of it is also used outside of it: tied weights stay in one
    unit, the root. `borrowers`: (name of a parameter, segment that uses it without owning it).
    """
    chosen = callable_units((name, m) for name, m in candidates if m is not model)
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    for name, borrower in borrowers:
        users[id(model.get_parameter(name))].add(id(borrower))

    def self_contained(unit: nn.Module) -> bool:
        inside = {id(m) for m in unit.modules()}
        return all(users[id(p)] <= inside for p in unit.parameters())

    inner = sorted(
        ((n, m) for n, m in chosen if self_contained(m)), key=lambda item: -item[0].count(".")
    )
    modules = {id(module) for _, module in inner}
    positions = {id(module): position for position, module in enumerate(model.modules())}
    return [
        Unit(name, module, _own_parameters(module, modules), positions[id(module)])
        for name, module in (*inner, ("", model))
    ]


def _own_parameters(unit: nn.Module, units: Container[int]) -> tuple[str, ...]:
    """Return the names of the parameters in a module that are in none of the units inside of it.

    `units`: the ids of all units but the root.
    """
    inner = [module for module in unit.modules() if id(module) in units and module is not unit]
    inside = {id(parameter) for module in inner for parameter in module.parameters()}
    return tuple(name for name, p in unit.named_parameters() if id(p) not in inside)


def in_order(units: Iterable[Unit]) -> list[Unit]:
    """Return units in the order of the model's modules, the root first."""
    return sorted(units, key=lambda unit: unit.position)


def _candidates(facts: ModelFacts, config: FSDPConfig) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of what the wrap policy picks."""
    model = facts.model
    policy = config.auto_wrap_policy
    if policy == "transformer":
        return list(facts.blocks)
    # modules with as many parameters that are in no unit yet, from the leaves up
    if policy == "size":
        taken: set[int] = set()
        picked = []
        # children come before their parents
        for name, module in reversed(list(model.named_modules())):
            free = [p for p in module.parameters() if id(p) not in taken]
            large = sum(p.numel() for p in free) >= config.min_num_params
            if name and large and implements_forward(module):
                picked.append((name, module))
                taken |= {id(p) for p in free}
        return picked[::-1]
    if isinstance(policy, list):
        picked = [(name, m) for name, m in model.named_modules() if type(m).__name__ in policy]
        if not picked:
            what = f"no module of the model is a {' or '.join(policy)}"
            fix = "name classes of it: " + ", ".join(
                sorted({type(m).__name__ for m in model.modules()})[:12]
            )
            raise UsageError(what, where="distributed.fsdp.auto_wrap_policy", fix=fix)
        return picked
    pick = _picking(load_object(policy, "distributed.fsdp.auto_wrap_policy"), policy)
    return [(name, m) for name, m in model.named_modules() if name and pick(m)]


def _picking(policy: Any, name: str) -> Callable[[nn.Module], object]:
    """Return a wrap policy as a function: module → whether it is a unit.

    `policy` is such a function, one of torch's policies, or a function that returns one of these.
    """
    if not callable(policy):
        fix = (
            "name a function of a module that says whether it is a unit, or one that returns a"
            " ModuleWrapPolicy"
        )
        raise UsageError(
            f"{name} can't be called", where="distributed.fsdp.auto_wrap_policy", fix=fix
        )
    parameters = inspect.signature(policy).parameters
    # torch's: it is also called to ask whether to look inside, which is always done here
    if "recurse" in parameters:
        return lambda module: policy(
            module, recurse=False, nonwrapped_numel=sum(p.numel() for p in module.parameters())
        )
    if not any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        return _picking(policy(), name)
    return policy  # type: ignore[no-any-return]


class UnitUsage:
    """The record of which units and parameters of a sharded model a step uses.

    Other replicas may run fewer micro-batches. `lockstep.parallel.fsdp.calls` tells it of passes
    and calls.

    `units`: the root first.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._model = units[0].module
        self._device = device
        self._units = units
        trained = self._model.named_parameters()
        self._names = [name for name, p in trained if p.ndim and p.requires_grad]
        self._used: set[str] = set()
        self._calls: dict[int, int] = {}  # position of a unit → calls in this forward pass
        self._called: set[int] = set()  # units that were called
        self._forward = False
        self._first_step = True
        self._varies = False  # whether a rank left a parameter unused when they last compared
        for unit in self._units:
            self._watch(unit)
            _fill_unused(unit.module, True)

    def begin_pass(self) -> None:
        """Begin a micro-batch."""
        self._forward = True

    def end_forward(self) -> None:
        """End the model's forward pass: calls in the backward pass are not counted."""
        self._forward = False

    def end_pass(self, passing: MicroBatchPass) -> None:
        """Compare, after the last micro-batch, which parameters the ranks used.

        FSDP2 has reduced the gradients in the backward pass, zeros where a parameter was not used.
        Parameters that no rank used have no gradient.
        """
        self._forward = False
        self._calls.clear()
        if passing.last:
            self._compare()
            self._used.clear()
            self._first_step = False

    def failed(self, error: BaseException) -> Exception | None:
        """Forget the pass; return a clearer error for one of torch's, if there is one."""
        self._forward = False
        self._calls.clear()
        return explain_mixing(error, self._not_called)

    def before_call(self, position: int, unit: nn.Module) -> None:
        """Note that the unit at `position` is about to be called."""
        if not self._forward:
            return
        self._called.add(position)
        self._calls[position] = self._calls.get(position, 0) + 1
        if self._calls[position] == 2:
            # its gradient is there after the last call's backward: others would send zeros
            _fill_unused(unit, False)

    def _watch(self, unit: Unit) -> None:
        """Put a hook on each of the unit's parameters, to note its gradient.

        It is done in the first call that makes gradients, after FSDP2 has gathered them.
        """
        mine = [name for name in unit.own if unit.module.get_parameter(name).ndim]

        def watch(module: nn.Module, _args: object) -> None:
            if not torch.is_grad_enabled():
                return
            handle.remove()
            for name in mine:
                gathered = module.get_parameter(name)
                if gathered.requires_grad:
                    full = f"{unit.name}.{name}" if unit.name else name
                    note = partial(lambda full, _parameter: self._used.add(full), full)
                    gathered.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

        handle = unit.module.register_forward_pre_hook(watch)

    def _compare(self) -> None:
        """Drop the gradients of parameters that no rank has used, as one process has none."""
        if self._device.type != "cpu" and not self._first_step and not self._varies:
            return  # the host would wait for the device in each step
        used_here = [name in self._used for name in self._names]
        # host waits
        flags = torch.tensor(
            [*used_here, not all(used_here)], dtype=torch.int64, device=self._device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        *used, varies = flags.tolist()  # host waits for the device
        self._varies = bool(varies)
        for name, there in zip(self._names, used, strict=True):
            if not there:
                self._model.get_parameter(name).grad = None

    def _not_called(self) -> UsageError:
        """Return the error of a unit whose parameters are used without a call of it."""
        unit = next(
            (u for position, u in enumerate(self._units) if position not in self._called),
            self._units[_END],
        )
        inside = sorted({_class_of(m) for _, m in callable_units(unit.module.named_children())})
        what = f"parameters of {unit.name or 'the model'} are used, but its forward() is not called"
        why = "FSDP gathers the parameters of a unit when the unit itself is called"
        fix = (
            f"gather what is called: auto_wrap_policy: [{', '.join(inside)}]; let a teacher follow"
            " its student in Trainer(…, after_update=function) (docs/how_to/teachers.md); or write"
            " strategy: ddp"
        )
        return UsageError(what, where="distributed.fsdp.auto_wrap_policy", why=why, fix=fix)


def _class_of(module: nn.Module) -> str:
    """Return the name of the module's class before FSDP2 replaced it."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _fill_unused(unit: nn.Module, wanted: bool) -> None:
    """Set whether FSDP2 takes zeros for gradients that a backward pass does not make.

    Since torch 2.13.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(wanted, recurse=False)  # type: ignore[operator]


def implements_forward(module: nn.Module) -> bool:
    """Return whether the module can be called; containers such as ModuleList can't."""
    return type(module).forward is not nn.Module.forward


def callable_units(modules: Any) -> Sequence[tuple[str, nn.Module]]:
    """Return (name, module) of callable modules with parameters; a container gives its members."""
    units: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        if not any(True for _ in module.parameters()):
            continue
        if implements_forward(module):
            units.append((name, module))
        else:
            units += callable_units((f"{name}.{child}", m) for child, m in module.named_children())
    return units
