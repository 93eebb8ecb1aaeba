"""Builds the `ParallelModel` of a strategy whose micro-batches run one at a time: all but pipelines."""

from lockstep.parallel import reproducible
from lockstep.parallel.compiled import ColdStart
from lockstep.parallel.loop import evaluated, in_order, plain_forward
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.placement import AppliedStrategy, PlacementContext


def placed_in_order(placement: PlacementContext, applied: AppliedStrategy) -> ParallelModel:
    """Return the placed model of a strategy that runs a step's micro-batches in order.

    Args:
        applied: what the strategy made of the placement's model.
    """
    p, model = placement, placement.model
    micro_step, later_log_lines = applied.micro_step, applied.compression.later_log_lines
    if p.config.training.compile:
        micro_step = ColdStart(len(p.blocks) or 1, later_log_lines).over(micro_step)
    if applied.tree is not None:
        micro_step = reproducible.guarded(applied.tree.over(micro_step))
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
