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

Tests: tests/parallel/forward_effects/test_state_between_calls.py,
tests/parallel/pipeline/test_chain_check.py
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UsageError, listed
from lockstep.parallel.forward_effects.attribute_changes import AttributeChanges
from lockstep.parallel.forward_effects.pass_traces import PassTraces
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.tensors import fingerprint, local
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
class _Looked:
    """Remembers what a look has seen of the model, or of a stage of it."""

    traces: PassTraces
    steps: list[int] = field(default_factory=list)  # of each pass that it has watched
    # of each pass: number among attributes → by how much it has changed
    changes: list[dict[str, float]] = field(default_factory=list)
    candidates: list[set[str]] = field(
        default_factory=list
    )  # of each pass: what seemed to be state

    def begin_look(self) -> None:
        """Forget what the look before this one has seen."""
        self.steps.clear()
        self.changes.clear()
        self.candidates.clear()

    def is_watched(self, step: int) -> bool:
        """Return whether a pass that begins belongs to the look."""
        passes = 2 if step in self.steps[:1] else 1
        return len({*self.steps, step}) <= _STEPS and self.steps.count(step) < passes

    @property
    def is_over(self) -> bool:
        """Return whether the look has seen passes of as many steps as it is for."""
        return len(set(self.steps)) == _STEPS


class _Watch:
    """Looks at the forward passes of a placed model, and reports what they leave.

    Args:
        placed: the model.
        compiled: whether blocks of it are compiled.
        looks_every: steps between two looks, at most.
    """

    def __init__(self, placed: ParallelModel, compiled: bool, looks_every: int) -> None:
        self.placed = placed
        self.compiled = compiled
        self.looks_every = looks_every
        self._looked = {
            id(root): _Looked(PassTraces(root, compiled=compiled)) for root in placed.parts
        }
        self._handles: list[Any] = []  # while a look goes on
        self._open: dict[int, _Values] = {}  # id of a unit whose pass runs → its parameters
        self._num_steps = 0  # that this process has made
        self._num_looks = 0
        self._generators_decided = False
        self._ended = False  # a look, in the step that runs
        self._changes: AttributeChanges | None = None  # from the end of the first look on
        self._warned: set[str] = set()
        self._placed_parameters: dict[str, nn.Parameter] = {}

    # ---- when to look ----

    def after_step(self, step: int) -> None:
        """Begin a look at the next step, if it is time, or an attribute is new in changing."""
        self._num_steps += 1
        if not self._generators_decided:
            self._generators_decided = _are_generators_decided(self.placed)
        if self._handles or self.compiled:
            return
        if self._ended:
            self._ended = False
            self._learn_attributes()
        is_time = self._num_steps + 1 in _EARLY or (step + 1) % self.looks_every == 0
        if is_time or (self._changes is not None and self._changes.has_new()):
            self.begin_look()

    def begin_look(self) -> None:
        """Watch the forward passes of the next steps."""
        self._num_looks += 1
        self._refuse_replaced()
        for looked in self._looked.values():
            looked.begin_look()
        for root in self.placed.parts:
            for module in root.modules():
                if module is root or isinstance(module, FSDPModule):
                    # After FSDP2 has gathered a unit, and before it frees it.
                    self._handles += [
                        module.register_forward_pre_hook(self._before(root, module)),
                        module.register_forward_hook(self._after(root, module), prepend=True),
                    ]

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

    # ---- a pass ----

    def _before(self, root: nn.Module, unit: nn.Module) -> Any:
        """Return a hook that notes, before a forward pass, what it could change."""
        looked = self._looked[id(root)]

        def before(_module: nn.Module, _args: Any) -> None:
            """Note attributes, generators, tensors and numbers, and a unit's parameters."""
            random_state = self.placed.random_state
            if random_state.phase != "train" or not torch.is_grad_enabled():
                return
            if unit is root:
                if not looked.is_watched(random_state.step):
                    return
                looked.steps.append(random_state.step)
                looked.traces.begin()
            elif not looked.traces.is_open:
                return
            parameters = {name: p for name, p in unit.named_parameters() if not p.is_meta}
            self._open[id(unit)] = _Values.of(parameters, random_state.device)

        return before

    def _after(self, root: nn.Module, unit: nn.Module) -> Any:
        """Return a hook that reports, after a forward pass, what it has changed."""

        def after(_module: nn.Module, _args: Any, _outputs: Any) -> None:
            """Report parameters that were written, and, of the root, all other traces."""
            before = self._open.pop(id(unit), None)
            if before is None:
                return
            written = before.written(unit, self.placed.random_state.device)
            if written:
                self._report_written([before.parameters[name] for name in written], written)
            if unit is root:
                self._report_traces(self._looked[id(root)])
                if all(looked.is_over for looked in self._looked.values()):
                    self._end_look()

        return after

    # ---- what is reported ----

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

    def _report_written(self, parameters: list[nn.Parameter], names_in_unit: list[str]) -> None:
        """Report parameters that a forward pass has written, by their names in the model."""
        names = {
            id(p): name
            for part in reversed(self.placed.parts)
            for name, p in part.named_parameters()
        }
        canonical = [
            names.get(id(parameter), name)
            for parameter, name in zip(parameters, names_in_unit, strict=True)
        ]
        self._report(
            f"the forward pass writes the parameter {listed(canonical)}",
            "each rank writes its own copy, from its own micro-batches, and a gathered copy of"
            " FSDP2 is lost",
            "update it after the optimizer, on all ranks alike: Trainer(…, after_update=function);"
            " for nn.Embedding(max_norm=…), let that function renormalise the weight"
            " (docs/how_to/teachers.md)",
        )

    def _report_traces(self, looked: _Looked) -> None:
        """Report what the pass that ends has left: draws, counters and state."""
        traces = looked.traces.end()
        if traces.generators:
            self._report(
                "the forward pass draws from a generator of the model's own,"
                f" {listed(traces.generators)}",
                "it does not know which micro-batch it draws for, so what it draws depends on the"
                " number of ranks",
                "draw with torch.rand, torch.randn … without generator=, or with Python's random or"
                " numpy.random: these are seeded for each micro-batch",
            )
        looked.changes.append(traces.changes)
        counters: list[str] = []
        if len(looked.changes) > 1:
            first = looked.changes[0]
            counters = [name for name, by in first.items() if traces.changes.get(name) == by]
        if counters:
            self._report(
                f"the forward pass advances the attribute {listed(counters)}",
                "it counts the micro-batches of one rank, so what follows from it depends on the"
                " number of ranks",
                "set it from the number of the update: Trainer(…, after_update=function)"
                " (docs/how_to/teachers.md)",
            )
        state = [*traces.tensors, *(name for name in traces.numbers if name not in counters)]
        self._report_state(*self._judge(looked, state, traces.perhaps))

    def _judge(
        self, looked: _Looked, state: list[str], perhaps: list[str]
    ) -> tuple[list[str], list[str]]:
        """Return what is state of what a pass has used and replaced, and what may be.

        After the first steps two passes of a look have to do it; the first of these can't tell a
        counter yet.
        """
        if self._num_looks == 1:
            return state, perhaps
        again = set().union(*looked.candidates)
        looked.candidates.append({*state, *perhaps})
        if len(looked.changes) == 1:
            return [], []
        return [n for n in state if n in again], [n for n in perhaps if n in again]

    def _report_state(self, state: list[str], perhaps: list[str]) -> None:
        """Warn of state that goes from one forward pass to the next, or refuse it."""
        why = (
            "a rank goes on from its own micro-batch, so what it computes depends on the number of"
            " ranks"
        )
        if state and self.placed.reproducible:
            fix = (
                "give the state to the model with the batch, or begin each forward pass with a new"
                " one; or register it as a buffer, and say in distributed.buffers how it combines;"
                " or set distributed.reproducible: false"
            )
            what = f"the forward pass goes on from {listed(state)}, which the one before it left"
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
