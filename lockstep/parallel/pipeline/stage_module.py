"""One stage's module: a run of the model's segments, and the parameters that they borrow.

The first stage takes its inputs from the batch, the last one turns outputs into a loss or returns
them, as the `StageCall` says with which it is called: nothing but tensors travels between stages.

Tests: tests/parallel/pipeline/test_pipeline.py, tests/parity/test_pipeline.py
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from lockstep.models.chain import run_segment
from lockstep.models.observed import LossCalls
from lockstep.parallel.facts import Named
from lockstep.parallel.fsdp.units import Unit
from lockstep.parallel.pipeline.plan import PipelinePlan
from lockstep.parallel.pipeline.stage_parameters import Registration, StageParameters
from lockstep.parallel.strides import copied_to
from lockstep.precision import Precision
from lockstep.torch_compat.tensor_versions import base_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # of the whole model's forward pass
NO_INPUTS: Inputs = ((), {})


@dataclass(frozen=True)
class StageCall:
    """The arguments of a stage beside the activations.

    FSDP2, which casts and hooks tensors, does not look inside. Stages in the middle use neither.
    """

    inputs: Inputs  # of the model's forward pass; empty for a stage in the middle
    # (the model's outputs, calls of torch's loss functions that made them, if observed) → what the
    # last stage returns
    finish: Callable[[Any, LossCalls | None], Any]


class StageModule(nn.Module):
    """Stage `index` of `count`.

    `borrowed`: segment name → {keyword: where the parameter is}, for each call; `earlier`: segment
    name → how often a module that draws under this name ran in earlier stages; `observes`: record
    calls of torch's loss functions in the last stage; `owns` registers what only segments of this
    stage borrow.
    """

    def __init__(
        self,
        index: int,
        count: int,
        segments: Sequence[tuple[str, nn.Module]],
        *,
        borrowed: Mapping[str, Mapping[str, Registration]],
        blocks: Sequence[tuple[str, nn.Module]],
        earlier: Mapping[str, int],
        precision: Precision,
        observes: bool = False,
        owns: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.index = index
        self.is_first = index == 0
        self.is_last = index == count - 1
        self.segments_here = nn.ModuleList(module for _, module in segments)
        self.owns = owns
        self._segments = [(module, borrowed.get(name, {})) for name, module in segments]
        self._names = [name for name, _ in segments]
        self._blocks = list(blocks)
        self.earlier = dict(earlier)
        self._autocast = precision.autocast()
        self._observes = observes

    def hold(self, loss_fn: nn.Module) -> None:
        """Hold the loss function, which has weights or buffers, as one of the modules here."""
        self.loss_fn = loss_fn

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return list(self._blocks)

    def name_in_model(self, name: str) -> str:
        """Return the unsplit model's name of a module or parameter here.

        Those who watch the training know it by that name.
        """
        first, _, rest = name.partition(".")
        if first != "segments_here" or not rest:
            return name
        position, _, inside = rest.partition(".")
        return ".".join(filter(None, (self._names[int(position)], inside)))

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield own and borrowed parameters."""
        own = list(super().parameters(recurse))
        yield from own
        seen = {id(parameter) for parameter in own}
        for registration in (each for _, borrowed in self._segments for each in borrowed.values()):
            if id(registration.tensor()) not in seen:
                seen.add(id(registration.tensor()))
                yield registration.tensor()

    def forward(self, call: StageCall, *values: Any) -> Any:
        """Run the stage's segments; the first takes the batch, the last may return a loss."""
        keywords: Mapping[str, Any] = {}
        ids_of_inputs = {id(value) for value in values}
        observing = LossCalls() if self.is_last and self._observes else nullcontext()
        with self._autocast, observing as calls:
            if self.is_first:
                values, keywords = call.inputs
            outputs: Any = values
            for segment, borrowed in self._segments:
                lent = {
                    keyword: registration.tensor() for keyword, registration in borrowed.items()
                }
                outputs = run_segment(segment, values, {**keywords, **lent}, call.inputs)
                values = outputs if isinstance(outputs, tuple) else (outputs,)
                keywords = {}
        if self.is_last:
            with self._autocast:
                return call.finish(outputs, calls)
        return tuple(_exclusive(value, ids_of_inputs) for value in values)


def _exclusive(value: Tensor, given: set[int]) -> Tensor:
    """Return a tensor that nothing else writes to, to be sent.

    It has the strides of `value`: kernels of the next segment may depend on them.
    """
    if base_of(value) is None and id(value) not in given:
        return value
    copied = value.clone()
    apply: Any = _Copied.apply
    return copied if copied.stride() == value.stride() else apply(value)


class _Copied(torch.autograd.Function):
    """A copy with the strides of a tensor that does not fill its memory, or is expanded.

    `clone` would give others.
    """

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return copied_to(value.detach(), value.stride())

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


Shard = Callable[[nn.Module, Named, set[nn.Parameter], bool], tuple[list[Unit], list[str]]]
"""(root, units inside of it, other roots' parameters, free them after each forward pass) → units in
order, lines to log.
"""


def stage_module_of(
    plan: PipelinePlan,
    stage: int,
    held: StageParameters,
    blocks: Named,
    precision: Precision,
    *,
    observes: bool,
) -> StageModule:
    """Return the module of stage `stage`, which this rank holds."""
    segments = [plan.segments[i] for i in plan.parts.stages[stage]]
    inside = {id(module) for _, segment in segments for module in segment.modules()}
    borrowed = {
        name: {
            keyword: held.parameters[parameter][0]
            for keyword, parameter in plan.model.lent.get(name, {}).items()
        }
        for name, _ in segments
    }
    # A module that is a segment several times draws new numbers in each run, and counts its runs
    # under all its names.
    earlier_segments = plan.segments[: plan.parts.stages[stage].start]
    before = [id(module) for _, module in earlier_segments]
    earlier = {
        name: before.count(id(module)) for name, module in plan.segments if id(module) in before
    }
    return StageModule(
        stage,
        len(plan.parts.stages),
        segments,
        borrowed=borrowed,
        blocks=[(name, block) for name, block in blocks if id(block) in inside],
        earlier=earlier,
        precision=precision,
        observes=observes,
        owns=held.of_stage.get(stage),
    )


class SharedUnit(nn.Module):
    """One FSDP2 unit for all parameters that several stages use.

    Its children own or register them.
    """

    def forward(self) -> None:
        """Do nothing: the parameters are gathered and reduced by hand."""


def shard_stages(
    parts: list[StageModule], held: StageParameters, inner: Named, shard: Shard, frees: bool
) -> tuple[nn.Module | None, list[list[Unit]], list[str]]:
    """Apply FSDP2 to each stage, whose units are among the `inner` ones of the model.

    Parameters that several stages share become a unit of their own. Return it, the units of each
    stage in order, and lines to log.
    """
    doubled = sorted(held.doubled & set(held.parameters))
    unit: nn.Module | None = None
    log_lines: list[str] = []
    if doubled:
        owners = {id(s.module): s.module for name in doubled for s in held.parameters[name]}
        unit = SharedUnit()
        for index, owner in enumerate(owners.values()):
            unit.add_module(str(index), owner)
        others = {p for name, p in held.named_parameters().items() if name not in held.doubled}
        shard(unit, [], others, False)
        assert isinstance(unit, FSDPModule)
        unit()  # FSDP2 prepares a root in its first forward pass
        unit.reshard()
    shared = {held.parameters[name][0].tensor() for name in doubled}
    units: list[list[Unit]] = []
    for part in parts:
        inside = {id(module) for module in part.modules()}
        own = [
            (n, m) for n, m in inner if id(m) in inside and not shared.issuperset(m.parameters())
        ]
        of_part, lines = shard(part, own, shared, frees)
        units.append(of_part)
        log_lines += [line for line in lines if line not in log_lines]
    return unit, units, log_lines
