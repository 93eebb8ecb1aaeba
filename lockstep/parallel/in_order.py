"""Builds the `ParallelModel` of a strategy whose micro-batches run one at a time: all but pipelines."""

from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.compiled import ColdStart
from lockstep.parallel.micro_step import AroundMicroBatch, evaluated, in_order, micro_step_of, plain_forward
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.placement import AppliedStrategy, PlacementContext
from lockstep.parallel.reproducible import DeterministicKernels


def placed_in_order(placement: PlacementContext, applied: AppliedStrategy) -> ParallelModel:
    """Return the placed model of a strategy that runs a step's micro-batches in order.

    Args:
        applied: what the strategy made of the placement's model.
    """
    p, model = placement, placement.model
    later_log_lines = applied.compression.later_log_lines
    objective, runs = applied.objective or p.objective, applied.runs or model
    around = around_micro_batches(p, applied, later_log_lines)
    micro_step = micro_step_of(
        runs, objective, p.random_state, p.precision, around, multiplier=applied.multiplier
    )  # fmt: skip
    persistent = model.state_dict(keep_vars=True)
    return ParallelModel(
        layout=p.layout,
        parts=[model],
        parameters=dict(model.named_parameters()) | applied.parameters,
        buffers={name: buffer for name, buffer in model.named_buffers() if name in persistent},
        objective=p.objective,
        random_state=p.random_state,
        assign=applied.assign,
        micro_step=micro_step,
        forward_backward=in_order(micro_step),
        evaluate=evaluated(model, p.objective, p.random_state, p.precision),
        forward=plain_forward(model, p.precision),
        finish_gradients=applied.finish_gradients if applied.tree is None else applied.tree.finish,
        settle=applied.compression.settle,
        norm_groups=applied.norm_groups,
        counted=applied.counted,
        log_lines=p.log_lines,
        later_log_lines=later_log_lines,
        state=applied.compression.state,
        reproducible=p.reproducible,
    )


def around_micro_batches(
    p: PlacementContext, applied: AppliedStrategy, log_lines: list[str]
) -> list[AroundMicroBatch]:  # fmt: skip
    """Return all that wraps a micro-batch, outermost first: the one place where it is put in order.

    Args:
        log_lines: receives lines that become known in the first steps.
    """
    around: list[AroundMicroBatch] = []
    if applied.tree is not None:
        around += [DeterministicKernels(), applied.tree]  # the tree takes the gradients that all others have made
    if p.config.training.compile:
        around.append(ColdStart(len(p.blocks) or 1, log_lines))
    if applied.compression.powersgd is not None:
        around.append(applied.compression.powersgd)
    around += applied.around
    buffers = RunningBuffers(p.model, applied.statistics_over or p.ranks, reproducible=p.reproducible)
    if buffers.any:
        around.append(buffers)
    if applied.gradient_sync is not None:
        around.append(applied.gradient_sync)  # innermost: it finds missing gradients before others exchange anything
    return around
