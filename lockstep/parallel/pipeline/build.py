"""A rank's stages: modules made of the model's segments, brought to FSDP2 where there are replicas or shards."""

from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.parallel.pipeline.holding import Holding
from lockstep.parallel.pipeline.part import CurrentMicroBatch, StageModule
from lockstep.parallel.pipeline.plan import PipelinePlan
from lockstep.precision import Precision

Blocks = list[tuple[str, nn.Module]]
Shard = Callable[[nn.Module, Blocks, set[nn.Parameter], bool], list[str]]
"""(root, its units, parameters that are another root's, free parameters after each forward pass) → lines to be said."""


def part_of(
    plan: PipelinePlan, stage: int, holding: Holding, blocks: Blocks, work: CurrentMicroBatch, precision: Precision
) -> StageModule:
    """The module of stage `stage`, which this rank holds."""
    segments = [plan.segments[i] for i in plan.parts.stages[stage]]
    inside = {id(module) for _, segment in segments for module in segment.modules()}
    borrowed = {
        name: {
            keyword: holding.parameters[parameter][0] for keyword, parameter in plan.model.lent.get(name, {}).items()
        }
        for name, _ in segments
    }
    # A module that is a segment several times draws anew each time it runs, and counts these under all its names.
    before = [id(module) for i in range(plan.parts.stages[stage].start) for module in [plan.segments[i][1]]]
    earlier = {name: before.count(id(module)) for name, module in plan.segments if id(module) in before}
    return StageModule(
        stage, len(plan.parts.stages), segments, borrowed=borrowed,
        blocks=[(name, block) for name, block in blocks if id(block) in inside],
        earlier=earlier, work=work, precision=precision, owns=holding.of_stage.get(stage),
    )  # fmt: skip


class SharedUnit(nn.Module):
    """One unit of FSDP2 for all parameters that several stages use: its children own or register them."""

    def forward(self) -> None:
        """Computes nothing: its parameters are gathered and reduced by hand."""


def shard_parts(
    parts: list[StageModule], holding: Holding, units: Blocks, shard: Shard, frees: bool
) -> tuple[nn.Module | None, list[str]]:
    """Hand each stage to FSDP2; what stages share, on this rank or across ranks, becomes a unit of its own."""
    doubled = sorted(holding.doubled & set(holding.parameters))
    unit: nn.Module | None = None
    log_lines: list[str] = []
    if doubled:
        owners = {id(s.module): s.module for name in doubled for s in holding.parameters[name]}
        unit = SharedUnit()
        for index, owner in enumerate(owners.values()):
            unit.add_module(str(index), owner)
        others = {p for name, p in holding.named_parameters().items() if name not in holding.doubled}
        shard(unit, [], others, False)
        assert isinstance(unit, FSDPModule)
        unit()  # FSDP2 prepares a root in its first forward pass
        unit.reshard()
    shared = {holding.parameters[name][0].tensor() for name in doubled}
    for part in parts:
        inside = {id(module) for module in part.modules()}
        own = [(n, m) for n, m in units if id(m) in inside and not shared.issuperset(m.parameters())]
        log_lines += [line for line in shard(part, own, shared, frees) if line not in log_lines]
    return unit, log_lines
