"""Side effects of a forward pass, detected by looks at whole passes.

A look is at two steps one after another: the first two passes of one and the first of the next. It
is made in the first steps, in steps 4, 8, 16 and every hundredth, and after a step in which an
attribute was replaced that never was before
(`lockstep.parallel.forward_effects.attribute_changes`). Compiled blocks are looked at in the first
steps alone, as a look would have them compiled anew.

Parameters that a forward pass writes (`nn.Embedding(max_norm=…)`), counters among the attributes of
modules and the model's own generators differ from one process, without an error. On several ranks,
and under `reproducible`, such a model is refused; one process trains it with a warning. A parameter
counts as written if its version, its storage or the sum of its bits has changed: `.data` hides a
write from the version.

A tensor that a forward pass leaves in an attribute, and that the next one computes with and
replaces, is state: on each number of ranks it comes from other samples. So is a number that the
next one reads, and replaces, and a list whose members it uses, and that it adds to; after the first
steps only what two passes do this with, as a cache that grows does it once in a while. State is
refused under `reproducible`, and on several ranks it is a warning.

Tests: tests/parallel/test_state_between_calls.py, tests/parallel/test_chain_check.py
"""

import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from lockstep.errors import UsageError, listed
from lockstep.parallel.forward_effects.attribute_changes import OF_TORCH, AttributeChanges
from lockstep.parallel.forward_effects.kept_numbers import (
    KeptNumber,
    RecordedReads,
    grown,
    kept_numbers,
    members,
    sequence_of,
)
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.tensors import fingerprint, local
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.torch_compat.tensor_versions import version_of

_STEPS = 2  # of a look: a counter has moved in both of them
_EARLY = (4, 8, 16)  # steps with which a look begins, of those that this process makes

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class _Values:
    """The parameters of a unit, and what a write changes: version, memory position, bit sum."""

    parameters: dict[str, nn.Parameter]
    places: list[tuple[int, int]]
    sums: Tensor

    @classmethod
    def of(cls, parameters: dict[str, nn.Parameter], device: torch.device) -> "_Values":
        """Read the parameters as they are now; of sharded ones this rank's piece."""
        with torch.no_grad():
            values = [local(p).detach() for p in parameters.values()]
            sums = [fingerprint(v).to(device, non_blocking=True) for v in values]
        places = [
            (version_of(p), v.data_ptr()) for p, v in zip(parameters.values(), values, strict=True)
        ]
        return cls(parameters, places, torch.stack(sums) if sums else torch.empty(0, device=device))

    def written(self, unit: nn.Module, device: torch.device) -> list[str]:
        """Return the names of those that have changed since.

        FSDP2 has freed and replaced some, which are left out.
        """
        parameters_now = dict(unit.named_parameters())
        kept = [
            position
            for position, (name, p) in enumerate(self.parameters.items())
            if parameters_now.get(name) is p
        ]
        names = list(self.parameters)
        now = self.of(
            {names[position]: self.parameters[names[position]] for position in kept}, device
        )
        same = (self.sums[kept] == now.sums).tolist()  # host waits for the device
        return [
            names[position]
            for position, after, equal in zip(kept, now.places, same, strict=True)
            if self.places[position] != after or not equal
        ]


def watch(placed: ParallelModel, *, compiled: bool = False, looks_every: int = 100) -> None:
    """Watch a placed model's forward passes, and stop keying generators that are unused."""
    watch = _Watch(placed, compiled, looks_every)
    watch.begin_look()
    placed.checks.insert(0, watch.after_step)


def _are_generators_decided(placed: ParallelModel) -> bool:
    """Decide after the first step whether Python's and NumPy's generators stay keyed.

    False: no step has trained yet.
    """
    host = placed.random_state.host
    if host is None or host.settled:
        return True
    if not host.trained:
        return False
    drawn = torch.full((1,), host.drawn, dtype=torch.int32, device=placed.random_state.device)
    if placed.layout.world_size > 1:
        dist.all_reduce(drawn, op=dist.ReduceOp.MAX)
    any_drawn = bool(drawn.item())  # host waits for the device, once
    placed.random_state.decide_host(is_drawn_from=any_drawn)
    return True


@dataclass
class _Watch:
    placed: ParallelModel
    compiled: bool  # blocks of it are
    looks_every: int = 100  # steps between two looks, at most
    _handles: list[Any] = field(default_factory=list)  # while a look goes on
    _steps: int = 0  # that this process has made
    _looks: int = 0
    _generators_decided: bool = False
    _ended: bool = False  # a look, in the step that runs
    _changes: AttributeChanges | None = None  # from the end of the first look on
    # root → the steps of the passes that this look has watched
    _seen: dict[int, list[int]] = field(default_factory=dict)
    _open: dict[int, _Values] = field(default_factory=dict)  # unit → its parameters
    # root → what it was before the pass
    _attributes: dict[int, dict[str, Any]] = field(default_factory=dict)
    _generators: dict[int, dict[str, Any]] = field(default_factory=dict)
    # root → before the first pass
    _tensors: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    # root → in a later pass, if one was left by an earlier one
    _uses: dict[int, "_Uses"] = field(default_factory=dict)
    # root → before the first pass
    _numbers: dict[int, dict[str, KeptNumber]] = field(default_factory=dict)
    # root → in a later pass, of changed ones
    _reads: dict[int, RecordedReads] = field(default_factory=dict)
    # root → those that were there before the first pass
    _buffers: dict[int, set[str]] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    # root → by how much, in each pass of this look
    _moved: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    # root → the tensors and numbers that were there before the pass
    _names: dict[int, set[str]] = field(default_factory=dict)
    # root → what seemed to be state, in each pass of this look
    _candidates: dict[int, list[set[str]]] = field(default_factory=dict)
    _placed_parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def after_step(self, step: int) -> None:
        """Begin a look at the next step, if it is time, or an attribute is new in changing."""
        self._steps += 1
        if not self._generators_decided:
            self._generators_decided = _are_generators_decided(self.placed)
        if self._handles or self.compiled:
            return
        if self._ended:
            self._ended = False
            self._learn_attributes()
        is_time = self._steps + 1 in _EARLY or (step + 1) % self.looks_every == 0
        if is_time or (self._changes is not None and self._changes.has_new()):
            self.begin_look()

    def begin_look(self) -> None:
        """Watch the forward passes of the next steps."""
        self._looks += 1
        self._refuse_replaced()
        for held in (self._seen, self._moved, self._candidates):
            held.clear()
        for root in self.placed.parts:
            for module in root.modules():
                if module is root or isinstance(module, FSDPModule):
                    # After FSDP2 has gathered a unit, and before it frees it.
                    self._handles += [
                        module.register_forward_pre_hook(self.before(root, module)),
                        module.register_forward_hook(self.after(root, module), prepend=True),
                    ]

    def _refuse_replaced(self) -> None:
        """Refuse a model of which parameters, or the layers that have them, were replaced."""
        if any(isinstance(m, FSDPModule) for part in self.placed.parts for m in part.modules()):
            return  # its gathered parameters are others than the pieces
        parameters_now = {
            name: parameter
            for part in reversed(self.placed.parts)
            for name, parameter in part.named_parameters()
        }
        self._placed_parameters = self._placed_parameters or parameters_now
        held = {id(parameter) for parameter in parameters_now.values()}
        gone = [n for n, parameter in self._placed_parameters.items() if id(parameter) not in held]
        if gone:
            raise UsageError(
                f"the model's {listed(gone)} is another parameter now than the one that was placed",
                where="the model",
                why="a layer or a parameter was replaced after training had begun, and neither the"
                " optimizer nor other ranks nor checkpoints know of the new one",
                fix="replace it before the trainer is made; or write its values in place: with"
                " torch.no_grad(): layer.weight.copy_(new)",
            )

    def _end_look(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ended = True

    def _learn_attributes(self) -> None:
        """Take attributes as known that a look has judged, between two steps."""
        if self._changes is None:
            self._refuse_replaced()
            self._changes = AttributeChanges(self.placed.parts)
        else:
            self._changes.take_as_known()

    def _is_watched(self, root: nn.Module, step: int) -> bool:
        """Return whether a pass that begins belongs to the look."""
        seen = self._seen.setdefault(id(root), [])
        passes = 2 if step in seen[:1] else 1
        return len({*seen, step}) <= _STEPS and seen.count(step) < passes

    def before(self, root: nn.Module, unit: nn.Module) -> Any:
        """Return a hook that notes, before a forward pass, what it could change."""

        def before(_module: nn.Module, _args: Any) -> None:
            """Note attributes, generators, tensors and numbers, and a unit's parameters."""
            random_state = self.placed.random_state
            if random_state.phase != "train" or not torch.is_grad_enabled():
                return
            if unit is root:
                if not self._is_watched(root, random_state.step):
                    return
                self._seen[id(root)].append(random_state.step)
                self._attributes[id(root)] = dict(_attributes(root))
                self._generators[id(root)] = dict(_generators(root))
                self._watch_tensors(root)
                self._watch_numbers(root)
            elif id(root) not in self._attributes:
                return
            parameters = {name: p for name, p in unit.named_parameters() if not p.is_meta}
            self._open[id(unit)] = _Values.of(parameters, random_state.device)

        return before

    def after(self, root: nn.Module, unit: nn.Module) -> Any:
        """Return a hook that reports, after a forward pass, what it has changed."""

        def after(_module: nn.Module, _args: Any, _outputs: Any) -> None:
            """Report parameters that were written, and, of the root, all other traces."""
            before = self._open.pop(id(unit), None)
            if before is None:
                return
            written = before.written(unit, self.placed.random_state.device)
            if written:
                names = {
                    id(p): name
                    for part in reversed(self.placed.parts)
                    for name, p in part.named_parameters()
                }
                canonical = [names.get(id(before.parameters[name]), name) for name in written]
                self._report(
                    f"the forward pass writes the parameter {listed(canonical)}",
                    "each rank writes its own copy, from its own micro-batches, and a gathered copy"
                    " of FSDP2 is lost",
                    "update it after the optimizer, on all ranks alike: Trainer(…,"
                    " after_update=function); for nn.Embedding(max_norm=…), let that function"
                    " renormalise the weight (docs/how_to/teachers.md)",
                )
            if unit is root:
                self._compare_attributes(root)
                seen = [set(self._seen.get(id(part), ())) for part in self.placed.parts]
                if all(len(steps) == _STEPS for steps in seen):
                    self._end_look()

        return after

    def _watch_tensors(self, root: nn.Module) -> None:
        """Record uses, in the pass that begins, of tensors that earlier passes have left."""
        known = self._buffers.setdefault(
            id(root), {name for name, _ in root.named_buffers(remove_duplicate=False)}
        )
        tensors = dict(_tensors(root, known))
        self._names[id(root)] = set(tensors)
        if id(root) not in self._tensors:
            self._tensors[id(root)] = {name: _mark(tensor) for name, tensor in tensors.items()}
            return
        first = self._tensors[id(root)]
        longer = grown(first, tensors)
        left = {
            name: tensor
            for name, tensor in tensors.items()
            if first.get(name) != _mark(tensor) or sequence_of(name) in longer
        }
        if left:
            self._uses[id(root)] = _Uses(left)
            self._uses[id(root)].__enter__()  # type: ignore[no-untyped-call]  # until the pass is over

    def _watch_numbers(self, root: nn.Module) -> None:
        """Record reads, in the pass that begins, of numbers that earlier passes have left."""
        numbers = kept_numbers(root)
        self._names[id(root)].update(numbers)
        if id(root) not in self._numbers:
            self._numbers[id(root)] = numbers
            return
        first = self._numbers[id(root)]
        longer = grown(first, numbers)
        left = {
            name: number
            for name, number in numbers.items()
            if not number.equals(first.get(name)) or sequence_of(name) in longer
        }
        if left:
            self._reads[id(root)] = RecordedReads(left)
            if self.compiled:  # it would be compiled again
                self._reads[id(root)].unknown.update(left)
            else:
                self._reads[id(root)].start()

    def _kept_tensors(self, root: nn.Module) -> list[str]:
        """Return the tensors that the pass has computed with, and replaced or added to."""
        uses = self._uses.pop(id(root), None)
        if uses is None:
            return []
        uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        tensors = dict(_tensors(root, self._buffers[id(root)]))
        longer = grown(self._names[id(root)], tensors)
        replaced = {
            name
            for name in uses.used
            if name not in tensors or _mark(tensors[name]) != uses.marks[name]
        }
        return sorted(replaced | longer.intersection(map(sequence_of, uses.used)))

    def _kept_numbers(self, root: nn.Module) -> tuple[list[str], list[str]]:
        """Return the numbers that the pass has read, and replaced or added to, and unknown ones.

        Unknown ones were replaced, and reading of them can't be seen.
        """
        uses = self._reads.pop(id(root), None)
        if uses is None:
            return [], []
        uses.stop()
        numbers = kept_numbers(root)
        longer = grown(self._names[id(root)], numbers)
        replaced = {n for n, old in uses.numbers.items() if not old.equals(numbers.get(n))}
        state, perhaps = (
            sorted((replaced & those) | longer.intersection(map(sequence_of, those)))
            for those in (uses.read, uses.unknown)
        )
        return state, perhaps

    def _report_state(self, state: list[str], perhaps: list[str]) -> None:
        """Warn of state that goes from one forward pass to the next, or refuse it."""
        why = (
            "a rank goes on from its own micro-batch, so what it computes depends on the number of"
            " ranks"
        )
        fix = (
            "give the state to the model with the batch, or begin each forward pass with a new"
            " one; or register it as a buffer, and say in distributed.buffers how it combines"
        )
        if state and self.placed.reproducible:
            what = f"the forward pass goes on from {listed(state)}, which the one before it left"
            fix += "; or set distributed.reproducible: false"
            raise UsageError(what, where="distributed.reproducible", why=why, fix=fix)
        several = self.placed.layout.world_size > 1
        state = [name for name in state if name not in self._warned]
        perhaps = [name for name in perhaps if name not in self._warned]
        self._warned.update(state, perhaps)
        for names, goes_on in ((state, "goes on"), (perhaps, "may go on")):
            if names and (several or self.placed.reproducible):
                what = (
                    f"the forward pass {goes_on} from {listed(names)}, which the one before it left"
                )
                _log.warning("warning: %s: %s, and checkpoints do not have it", what, why)

    def _compare_attributes(self, root: nn.Module) -> None:
        """Compare generators, tensors, numbers and attributes with those before the pass."""
        tensors = self._kept_tensors(root)
        numbers, perhaps = self._kept_numbers(root)
        generators = self._generators.pop(id(root))
        if moved := [
            name
            for name, state in _generators(root)
            if name in generators and generators[name] != state
        ]:
            self._report(
                f"the forward pass draws from a generator of the model's own, {listed(moved)}",
                "it does not know which micro-batch it draws for, so what it draws depends on the"
                " number of ranks",
                "draw with torch.rand, torch.randn … without generator=, or with Python's random or"
                " numpy.random: these are seeded for each micro-batch",
            )
        before = self._attributes.pop(id(root))
        deltas = {n: v - before[n] for n, v in _attributes(root) if n in before and v != before[n]}
        passes = self._moved.setdefault(id(root), [])
        passes.append(deltas)
        counters: list[str] = []
        if len(passes) > 1:
            counters = [name for name, delta in passes[0].items() if deltas.get(name) == delta]
            if counters:
                self._report(
                    f"the forward pass advances the attribute {listed(counters)}",
                    "it counts the micro-batches of one rank, so what follows from it depends on"
                    " the number of ranks",
                    "set it from the number of the update: Trainer(…, after_update=function)"
                    " (docs/how_to/teachers.md)",
                )
        state = [*tensors, *(name for name in numbers if name not in counters)]
        state, perhaps = self._judge(root, state, perhaps, len(passes) == 1)
        self._report_state(state, perhaps)

    def _judge(
        self, root: nn.Module, state: list[str], perhaps: list[str], is_first: bool
    ) -> tuple[list[str], list[str]]:
        """Return what is state of what a pass has used and replaced, and what may be.

        After the first steps two passes of a look have to do it; the first of these can't tell a
        counter yet.
        """
        if self._looks == 1:
            return state, perhaps
        earlier = self._candidates.setdefault(id(root), [])
        again = set().union(*earlier)
        earlier.append({*state, *perhaps})
        if is_first:
            return [], []
        return [n for n in state if n in again], [n for n in perhaps if n in again]

    def _report(self, what: str, why: str, fix: str) -> None:
        """Refuse what the forward pass changes where ranks would differ by it; else warn once."""
        if self.placed.reproducible:
            raise UsageError(what, where="distributed.reproducible", why=why, fix=fix)
        if self.placed.layout.world_size > 1:
            raise UsageError(what, where="the model's forward pass", why=why, fix=fix)
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(
                "warning: %s: one process trains it as PyTorch does, but several ranks would refuse"
                " it: %s",
                what,
                why,
            )


class _Uses(TorchFunctionMode):
    """Records which of some tensors functions of torch are called with."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._kept = list(tensors.values())  # so that no other tensor gets the same id
        self.marks = {name: _mark(tensor) for name, tensor in tensors.items()}
        self.used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used |= {
            self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names
        }
        return func(*args, **(kwargs or {}))


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), version_of(tensor)


def _tensors(root: nn.Module, known: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of tensors in modules' attributes.

    Parameters and `known` buffers are left out.
    """
    for name, value in _own_attributes(root):
        yield from _inside(name, value, depth=3)
    yield from (
        (name, b) for name, b in root.named_buffers(remove_duplicate=False) if name not in known
    )


def _inside(name: str, value: Any, *, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for full, each, _ in members(name, value):
            yield from _inside(full, each, depth=depth - 1)


def _attributes(root: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the numbers among the attributes of its modules."""
    for name, value in _own_attributes(root):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _generators(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, state) of the generators among the attributes of its modules."""
    numpy = sys.modules.get("numpy")
    for name, value in _own_attributes(root):
        if isinstance(value, torch.Generator):
            yield name, value.get_state().cpu().numpy().tobytes()
        elif isinstance(value, random.Random):
            yield name, value.getstate()
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            yield name, repr(value.bit_generator.state)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            state = value.get_state()
            parts = [part.tolist() if hasattr(part, "tolist") else part for part in state]
            yield name, repr(parts)


def _own_attributes(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes that not every module has."""
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in OF_TORCH:
                yield f"{path}.{name}" if path else name, value
