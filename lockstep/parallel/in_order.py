"""From what a strategy applied to a model to `Placed`, where micro-batches run one at a time: all but pipelines."""

from lockstep.parallel import reproducible
from lockstep.parallel.compiled import ColdStart
from lockstep.parallel.loop import evaluated, in_order, plain_forward
from lockstep.parallel.placed import Placed
from lockstep.parallel.placement import Applied, Placement


def placed_in_order(placement: Placement, applied: Applied) -> Placed:
    """Return the placed model of a strategy that runs a step's micro-batches in order.

    Args:
        applied: what the strategy made of the placement's model.
    """
    p, model = placement, placement.model
    micro_step, said_later = applied.micro_step, applied.compression.said_later
    if p.config.training.compile:
        micro_step = ColdStart(len(p.blocks) or 1, said_later).over(micro_step)
    if applied.tree is not None:
        micro_step = reproducible.guarded(applied.tree.over(micro_step))
    persistent = model.state_dict(keep_vars=True)
    return Placed(
        layout=p.layout,
        parts=[model],
        parameters=dict(model.named_parameters()) | applied.parameters,
        buffers={name: buffer for name, buffer in model.named_buffers() if name in persistent},
        objective=p.objective,
        cursor=p.cursor,
        assign=applied.assign,
        micro_step=micro_step,
        forward_backward=in_order(micro_step),
        evaluate=evaluated(model, p.objective, p.cursor, p.precision),
        forward=plain_forward(model, p.precision),
        finish_gradients=applied.finish_gradients if applied.tree is None else applied.tree.finish,
        settle=applied.compression.settle,
        norm_groups=applied.norm_groups,
        counted=applied.counted,
        notices=p.notices,
        said_later=said_later,
        state=applied.compression.state,
        reproducible=p.reproducible,
    )
