"""`place`: from a model and a layout to `ParallelModel`, as one ordered list.

checks → names → keyed randomness → float8 → activation checkpointing → compile → shard or replicate → first values
"""

import torch
from torch import nn

from lockstep.config import StepConfig
from lockstep.config.checks import step_contradictions
from lockstep.layout import Layout
from lockstep.mesh import device_mesh
from lockstep.models.protocol import Objective, blocks_of
from lockstep.parallel import divergence, reproducible, side_effects
from lockstep.parallel.blocks import key_model, transform_blocks
from lockstep.parallel.buffers import refuse_synchronised
from lockstep.parallel.fp8 import apply_fp8
from lockstep.parallel.fsdp import units_of
from lockstep.parallel.gradient_hooks import take_hooks
from lockstep.parallel.initial import FirstValues, agree, canonical_names, on_meta
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.placement import DryRun, PlacementContext
from lockstep.parallel.refused import refuse_parameters, refuse_wrapped
from lockstep.parallel.unit_inputs import join_uses_of_inputs
from lockstep.precision import Precision, switch_tf32
from lockstep.randomness import RandomState
from lockstep.rules import refuse
from lockstep.strategy import Strategy, strategy_named


def place(
    model: nn.Module,
    layout: Layout,
    config: StepConfig,
    *,
    objective: Objective,
    device: torch.device,
    precision: Precision,
    dry_run: DryRun | None = None,
) -> ParallelModel:
    """Place a model on this rank, by the strategy that the layout names.

    Args:
        model: unwrapped; real, or on meta with `init_weights()`.
        layout: from `lockstep.strategy.resolve`; its size is the world size.
        config: the sections that say how: `Config.step`.
        objective: how a batch becomes a loss.
        device: of this rank.
        dry_run: the model has no values and gets none: for `lockstep plan`, under a fake process group.

    Raises:
        UsageError: the model is wrapped already, or does not offer what the strategy needs.
    """
    strategy = strategy_named(layout.strategy)
    refuse_wrapped(model)
    refuse(step_contradictions(config, layout, device.type if dry_run is None else dry_run.device_type))
    refuse_parameters(model, sharded=strategy.cuts_parameters(layout), reproducible=config.distributed.reproducible)
    switch_tf32(config.precision.tf32)
    strategy = strategy.on(layout)
    names, aliases = canonical_names(model)
    hooks = take_hooks(model, workers=layout.workers > 0)
    size = sum(p.numel() for p in model.parameters())
    placement = prepared(model, strategy, layout, config, objective, device, precision, dry_run)
    placed = strategy.place(placement) if dry_run is None else strategy.rehearse(placement)
    if not strategy.splits_model:
        assert size == sum(p.numel() for p in model.parameters()), "placement changed the number of parameters"
        assert set(placed.parameters) == set(names.values()), "placement changed names of parameters"
    placed.aliases, placed.num_parameters, placed.gradient_hooks = aliases, size, hooks
    if dry_run is None:
        divergence.guard_replicas(placed, config, placement.mesh)
        side_effects.watch(placed)
    return placed


def prepared(
    model: nn.Module, strategy: Strategy, layout: Layout, config: StepConfig, objective: Objective,
    device: torch.device, precision: Precision, dry_run: DryRun | None,
) -> PlacementContext:  # fmt: skip
    """Return the model keyed and transformed, the same on all ranks, with all that strategies need to know."""
    shared = layout.world_size > 1
    blocks = blocks_of(model)
    random_state = RandomState(config.training.seed, device)
    first = FirstValues(model, config.training.seed) if on_meta(model) and dry_run is None else None
    if strategy.keys_random_numbers(device):
        key_model(model, random_state, blocks, cut=strategy.splits_model)
    log_lines = apply_fp8(model, blocks, config.precision.fp8, device)
    log_lines += transform_blocks(model, config.training, random_state, blocks)
    if config.distributed.reproducible:
        join_uses_of_inputs(units_of(model, config.distributed.fsdp, blocks))
        log_lines += reproducible.switch_on(device) + reproducible.extra_traffic(config, layout)
    if first is None and dry_run is None and shared and not agree(model):
        log_lines.append("the model's values differed between ranks: all took rank 0's")
    if shared:
        refuse_synchronised(model)
    mesh = dry_run.mesh if dry_run is not None else device_mesh(layout, device.type) if shared else None
    return PlacementContext(
        model, layout, config, mesh, objective, device, precision, random_state, blocks, first, log_lines, dry_run
    )  # fmt: skip
