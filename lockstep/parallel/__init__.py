"""`place`: from a model and a layout to `Placed`. One ordered list; each strategy is one file beside this one.

checks → names → keyed randomness → float8 → activation checkpointing → compile → shard or replicate → first values
"""

from collections.abc import Callable

import torch
from torch import nn

from lockstep.config import Config
from lockstep.mesh import Layout
from lockstep.models.protocol import Objective, blocks_of
from lockstep.parallel import (
    accelerate,
    data_parallel,
    ddp,
    diloco,
    divergence,
    fsdp,
    reproducible,
    side_effects,
    single,
)
from lockstep.parallel.blocks import key_model, transform_blocks
from lockstep.parallel.buffers import refuse_synchronised
from lockstep.parallel.compiled import ColdStart
from lockstep.parallel.fp8 import apply_fp8
from lockstep.parallel.gradient_hooks import take_hooks
from lockstep.parallel.initial import FirstValues, agree, canonical_names, on_meta
from lockstep.parallel.ledger import Ledger, Loss, Share
from lockstep.parallel.loop import evaluated, in_order, plain_forward
from lockstep.parallel.placed import Placed
from lockstep.parallel.placement import Laid, Placement
from lockstep.parallel.refused import refuse_impossible, refuse_parameters, refuse_wrapped
from lockstep.parallel.unit_inputs import join_uses_of_inputs
from lockstep.precision import Precision, switch_tf32
from lockstep.randomness import Cursor

__all__ = ["Ledger", "Loss", "Placed", "Share", "place"]

STRATEGIES: dict[str, Callable[[Placement], Laid]] = {
    "single": single.lay,
    "dp": data_parallel.lay,
    "ddp": ddp.lay,
    "fsdp": fsdp.lay,
    "accelerate": accelerate.lay,
    "diloco": diloco.lay,
}


def place(
    model: nn.Module,
    layout: Layout,
    config: Config,
    *,
    objective: Objective,
    device: torch.device,
    precision: Precision,
) -> Placed:
    """Lay a model over the ranks.

    Args:
        model: unwrapped; real, or on meta with `init_weights()`.
        layout: from `lockstep.mesh.resolve`; its size is the world size.
        objective: how a batch becomes a loss.
        device: of this rank.

    Raises:
        UsageError: the model is wrapped already, or does not offer what the strategy needs.
    """
    refuse_wrapped(model)
    refuse_impossible(config, layout, device)
    refuse_parameters(model, layout, reproducible=config.distributed.reproducible)
    switch_tf32(config.precision.tf32)
    names, aliases = canonical_names(model)
    hooks = take_hooks(model, workers=layout.strategy == "diloco")
    size = sum(p.numel() for p in model.parameters())
    placement = _prepared(model, layout, config, objective, device, precision)
    if layout.strategy == "pipeline" and placement.mesh is not None:
        from lockstep.parallel import pipeline  # torch's pipelining loads its compiler: seconds at every start

        placed = pipeline.lay(placement)
    else:
        placed = _placed(placement)
        assert size == sum(p.numel() for p in model.parameters()), "placement changed the number of parameters"
        assert set(placed.parameters) == set(names.values()), "placement changed names of parameters"
    placed.aliases, placed.num_parameters, placed.gradient_hooks = aliases, size, hooks
    divergence.guard_replicas(placed, config, placement.mesh)
    side_effects.watch(placed)
    return placed


def _prepared(
    model: nn.Module, layout: Layout, config: Config, objective: Objective, device: torch.device, precision: Precision
) -> Placement:
    """The model keyed and transformed, the same on all ranks, with all that strategies need to know."""
    shared = layout.world_size > 1
    blocks = blocks_of(model)
    cursor = Cursor(config.training.seed, device)
    first = FirstValues(model, config.training.seed) if on_meta(model) else None
    if layout.strategy != "dp" or data_parallel.num_gpus(device) == 1:
        key_model(model, cursor, blocks, cut=shared and layout.strategy == "pipeline")
    notices = apply_fp8(model, blocks, config.precision.fp8, device)
    notices += transform_blocks(model, config.training, cursor, blocks)
    if config.distributed.reproducible:
        reproducible.require(config, layout)
        join_uses_of_inputs(fsdp.units_of(model, config.distributed.fsdp, blocks))
        notices += reproducible.switch_on(device) + reproducible.extra_traffic(config, layout)
    if first is None and shared and not agree(model):
        notices.append("the model's values differed between ranks: all took rank 0's")
    if shared:
        refuse_synchronised(model)
    mesh = layout.mesh(device.type) if shared else None
    return Placement(
        model, layout, config, mesh, objective, device, precision, cursor, blocks, first, notices
    )  # fmt: skip


def _placed(placement: Placement) -> Placed:
    """A model whose micro-batches run one at a time: every strategy but pipelines."""
    p, model = placement, placement.model
    alone = p.mesh is None and p.layout.strategy not in ("dp", "diloco")
    laid = single.lay(p) if alone else STRATEGIES[p.layout.strategy](p)
    micro_step, said_later = laid.micro_step, laid.compression.said_later
    if p.config.training.compile:
        micro_step = ColdStart(len(p.blocks) or 1, said_later).over(micro_step)
    if laid.tree is not None:
        micro_step = reproducible.guarded(laid.tree.over(micro_step))
    persistent = model.state_dict(keep_vars=True)
    placed = Placed(
        layout=p.layout,
        parts=[model],
        parameters=dict(model.named_parameters()) | laid.parameters,
        buffers={name: buffer for name, buffer in model.named_buffers() if name in persistent},
        objective=p.objective,
        cursor=p.cursor,
        assign=laid.assign,
        micro_step=micro_step,
        forward_backward=in_order(micro_step),
        evaluate=evaluated(model, p.objective, p.cursor, p.precision),
        forward=plain_forward(model, p.precision),
        finish_gradients=laid.tree.finish if laid.tree is not None else lambda: None,
        settle=laid.compression.settle,
        norm_groups=laid.norm_groups,
        counted=laid.counted,
        notices=p.notices,
        said_later=said_later,
        state=laid.compression.state,
        reproducible=p.reproducible,
    )
    laid.local(placed)
    return placed
