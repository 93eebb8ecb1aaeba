"""`place` makes a `ParallelModel` of a model's facts and a layout, in one ordered list of steps.

    refuse_unplaceable    what this layout can't have, before anything is changed
    prepare               strides, keyed random numbers, float8, activation checkpointing, compiled
                          blocks; equal values on all ranks; each axis of the strategy asked
    place_on_ranks        the model on its device: as stages, cut, or as a replica
    Axis.add_to_step_end  what each axis adds to the end of a step
    watch                 checks of replicas, and of side effects, while it trains

Each file that one of these steps is in is handed the model once (`python -m benchmarks.hops
--place`): what several of them need of it is read before, into its facts.

Tests: tests/parallel/test_foreign.py, tests/parity/test_foreign.py, tests/parity/test_compiled.py
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config import StepConfig
from lockstep.drawless import is_run_by_torch
from lockstep.errors import UsageError, listed
from lockstep.layout import Layout
from lockstep.models.hf_cache import switch_cache_off
from lockstep.models.hf_decoder import is_known_decoder
from lockstep.models.loss_modules import refuse_shared
from lockstep.parallel.axes.axis import axes_named
from lockstep.parallel.changes import replace_method
from lockstep.parallel.execution.activation import apply_activation_checkpointing
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.forward_effects import side_effects
from lockstep.parallel.forward_effects.buffers import keeping, refuse_synchronised
from lockstep.parallel.forward_effects.combined_buffers import (
    BufferWays,
    warn_of_unwritten,
    ways_of,
)
from lockstep.parallel.fp8 import apply_fp8
from lockstep.parallel.fsdp.units import Unit, units_of
from lockstep.parallel.gradient_hooks import take_hooks
from lockstep.parallel.initial import FirstValues, broadcast_values, to_empty
from lockstep.parallel.loss_weights import LossWeights
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.pipeline.chain_check import check_chain
from lockstep.parallel.placement import place_whole
from lockstep.parallel.refusals import refuse_parameters, refuse_unplaceable
from lockstep.parallel.replicas import divergence
from lockstep.parallel.reproducible.determinism import join_uses_of_inputs, switch_on
from lockstep.parallel.row_by_row import lay_out
from lockstep.parallel.site import DryRun, Site
from lockstep.precision import Precision, switch_tf32
from lockstep.process_group.mesh import device_mesh, replica_group
from lockstep.randomness import RandomState, key_segments
from lockstep.registry import BY_SIZE
from lockstep.strategy import SINGLE, strategy_named


def place(
    facts: ModelFacts,
    layout: Layout,
    config: StepConfig,
    *,
    device: torch.device,
    precision: Precision,
    dry_run: DryRun | None = None,
) -> ParallelModel:
    """Place a model on this rank, by the axes of the strategy that the layout names.

    Args:
        facts: of an unwrapped model, which is real, or on meta with `init_weights()`.
        layout: the number of ranks along each axis.
        config: the sections that say how a step is made.
        device: of this rank.
        precision: of the forward pass.
        dry_run: the model has no values and gets none, for `lockstep plan`, under a fake process
            group.

    Raises:
        UsageError: the model, or the config, can't be had on this layout.
    """
    device_type = device.type if dry_run is None else dry_run.device_type
    refuse_unplaceable(facts, layout, config, device_type, in_stages=_in_stages(layout))
    loss = loss_weights_of(facts, layout, config)
    switch_tf32(config.precision.tf32)
    loss_parameters = {} if loss is None else loss.own
    hooks = take_hooks(facts.model, loss_parameters, workers=layout.workers > 0)

    random_state = RandomState(config.training.seed, device)
    site = prepare(Site(facts, layout, config, precision, random_state, loss, dry_run))
    placed = place_on_ranks(site)
    for axis in site.axes.values():
        placed = axis.add_to_step_end(placed)

    num_parameters = facts.num_parameters + sum(p.numel() for p in loss_parameters.values())
    loss_attributes = {name: dict(vars(p)) for name, p in loss_parameters.items()}
    attributes = {**facts.attributes, **loss_attributes}
    if not _in_stages(layout):  # a rank of a pipeline holds some of them
        held = sum(p.numel() for p in placed.parameters.values())
        assert num_parameters == held, "placement changed the number of parameters"
        assert set(placed.parameters) == set(attributes), "placement changed names of parameters"
    keep_attributes(placed, attributes)
    placed = replace(
        placed,
        root=facts.model,
        aliases=facts.aliases,
        num_parameters=num_parameters,
        gradient_hooks=hooks,
        form=facts.form,
    )
    return watch(placed, site) if dry_run is None else placed


def loss_weights_of(facts: ModelFacts, layout: Layout, config: StepConfig) -> LossWeights | None:
    """Return the weights of a loss function that is a module; None where it is not one.

    A UsageError if this layout can't train them.
    """
    if facts.loss is None:
        return None
    exact = config.distributed.reproducible
    refuse_parameters(facts.loss.module, sharded=False, reproducible=exact)
    refuse_shared(facts.loss, cut=_cuts(layout) or _in_stages(layout) or layout.tensor > 1)
    return LossWeights(facts.loss, reproducible=exact)


# ---- prepare: alike on all ranks ----


def prepare(site: Site) -> Site:
    """Transform the model, alike on all ranks, and return its site with the axes on it.

    Then the model is keyed, in float8, checkpointed and compiled, as the config asks for; it has
    the values that all ranks have, and the axes have changed its layers.
    """
    layout = site.layout
    in_stages = _in_stages(layout)
    sharded = _cuts(layout) or (in_stages and layout.data_parallel_size > 1)
    site.log_lines.extend(
        lay_out(
            site.model,
            keeps_formats=not sharded and not layout.spreads,
            aligned=site.reproducible,
        )
    )

    first = None
    if site.facts.on_meta and site.dry_run is None:
        first = FirstValues(site.model, site.config.training.seed)
    if in_stages and first is None and site.dry_run is None:
        site.log_lines.extend(check_chain(site.facts))
    if strategy_named(layout.strategy).keys_random_numbers(site.device):
        key_model(site.facts, site.random_state, cut=in_stages)
    site.log_lines.extend(transform(site.facts, site.config, site.random_state))
    units = units_before_axes(site)
    if layout.world_size > 1:
        take_equal_values(site, first)

    site = with_mesh(replace(site, first=first, units=units))
    ask_axes(site)
    if first is not None:
        pieces = [axis.local_piece for axis in site.axes.values()]
        first.keep(pieces[::-1])  # the last one cuts first

    if site.loss is not None and site.dry_run is not None:
        site.loss.to_fake()
    elif site.loss is not None:
        site.log_lines.extend(prepare_loss(site.loss, site))
    return site


def key_model(facts: ModelFacts, random_state: RandomState, *, cut: bool = False) -> None:
    """Key random numbers by segment.

    A model that names none is one segment, which can't be `cut` into stages.
    """
    segments = facts.required_chain() if cut else facts.segments
    if segments is not None:
        # The stages of a pipeline run the segments themselves, each some of them.
        is_sequential = not cut and is_run_by_torch(facts.model)
        key_segments(random_state, segments, chain=True, is_sequential=is_sequential)
    else:
        key_segments(random_state, [("", facts.model)], chain=True)
        key_segments(random_state, facts.blocks, chain=False)


_COMPILED: WeakSet[nn.Module] = WeakSet()  # modules that `transform` has compiled


def transform(facts: ModelFacts, config: StepConfig, random_state: RandomState) -> list[str]:
    """Put float8, activation checkpointing and compiled code into a model's blocks.

    Returns lines to log.
    """
    model = facts.model
    blocks = facts.blocks
    training = config.training
    log_lines = apply_fp8(model, blocks, config.precision.fp8, random_state.device)
    if training.gradient_checkpointing != "none" or is_known_decoder(model):
        switch_cache_off(model, blocks)
    apply_activation_checkpointing(
        blocks,
        training.gradient_checkpointing,
        random_state,
        every=training.gradient_checkpointing_every,
        compiled=training.compile,
    )
    if training.compile:
        # Blocks are compiled inside of the hooks on them: the seed of a block is set before its
        # compiled code runs, and FSDP gathers it outside. Random numbers of compiled code are not
        # those of eager code.
        for _, block in blocks or [("", model)]:
            replace_method(block, torch.compile(block.forward), by="compile")
            _COMPILED.add(block)
        log_lines.append(f"compile: {len(blocks) or 1} block(s), at their first forward pass")
    return log_lines


def compiled_blocks(parts: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules within `parts` that `place` has compiled."""
    return (module for part in parts for module in part.modules() if module in _COMPILED)


def units_before_axes(site: Site) -> Sequence[Unit]:
    """Return the units of a model, for FSDP2 and for trees; ready to be summed exactly, if asked.

    They are read before axes cut layers, so that they are the same ones on any topology, but not
    before float8, which puts linears of its own in place of some that a wrap policy may pick.
    """
    layout = site.layout
    if not (site.reproducible or _cuts(layout) or _in_stages(layout)):
        return ()
    units = units_of(site.facts, site.config.distributed.fsdp)
    if site.reproducible:
        join_uses_of_inputs(unit.module for unit in units[:-1])
        site.log_lines.extend(switch_on(site.device))
    return units


def take_equal_values(site: Site, first: FirstValues | None) -> None:
    """Give all ranks rank 0's values, if the model has some; refuse layers that synchronise."""
    has_values = first is None and site.dry_run is None
    if has_values and not broadcast_values(site.model):
        site.log_lines.append(
            "the model's values differed between ranks: all took rank 0's (seed ranks alike before"
            " the model is made)"
        )
    refuse_synchronised(site.model)


def with_mesh(site: Site) -> Site:
    """Return the site with what axes need: the mesh, and how buffers are combined."""
    layout = site.layout
    facts = site.facts
    dry_run = site.dry_run
    if dry_run is not None:
        mesh = dry_run.mesh
    else:
        mesh = device_mesh(layout, site.device.type) if layout.world_size > 1 else None
    if dry_run is not None and layout.tensor * layout.expert > 1 and facts.on_meta:
        # a parameter on meta can't become a piece that is a fake tensor
        to_empty(site.model, torch.device("cpu"))
        facts = facts.after_new_parameters()

    ways = site.ways
    if site.config.distributed.buffers:
        ways = buffer_ways(facts, site.loss, site.config)
    return replace(site, facts=facts, mesh=mesh, ways=ways)


def buffer_ways(facts: ModelFacts, loss: LossWeights | None, config: StepConfig) -> BufferWays:
    """Return how the buffers that forward passes write are combined, by `distributed.buffers`."""
    model = facts.model
    of_loss = {} if loss is None else loss.buffers
    kept = {id(buffer) for name, buffer in model.named_buffers() if name in facts.persistent}
    kept |= {id(buffer) for buffer in of_loss.values()}
    module = None if loss is None else loss.module
    return ways_of(config.distributed.buffers, model, module, set(of_loss), kept)


def ask_axes(site: Site) -> None:
    """Fill a site with the axes that do something on it; each has changed the model's layers."""
    strategy = strategy_named(site.layout.strategy)
    for kind in axes_named((*(strategy.axes or ()), *BY_SIZE)):
        axis = kind.apply(site)
        if axis is not None:
            site.axes[kind.name] = axis
    for axis in site.axes.values():
        axis.apply_after_others()


def prepare_loss(loss: LossWeights, site: Site) -> list[str]:
    """Bring a loss function to the device, with the same values on all ranks.

    Returns lines to log.
    """
    loss.module.to(site.device)
    if site.layout.world_size > 1:
        refuse_synchronised(loss.module)
        if not broadcast_values(loss.module):
            return ["the loss function's values differed between ranks: all took rank 0's"]
    return []


# ---- place on ranks ----


def place_on_ranks(site: Site) -> ParallelModel:
    """Bring the model to the ranks: by the first axis that holds it.

    Without one, by the strategy's own `place`; without that, each rank holds all of it.
    """
    for axis in site.axes.values():
        placed: ParallelModel | None = axis.place_model()
        if placed is not None:
            require_placed(placed, site)
            return placed

    strategy = strategy_named(site.layout.strategy)
    if strategy.places_by_itself and not site.layout.is_one_group:
        placed = strategy.place(site)
        require_placed(placed, site)
        return placed

    if site.layout.world_size == 1 and strategy.name != SINGLE:
        site.log_lines.append(f"{strategy.name} on one rank: nothing to synchronise or to shard")
    return place_whole(site)


def require_placed(placed: object, placement: Site) -> None:
    """Reject what a strategy of a user returned, if it is not a placed model with values."""
    place = f"place of strategy {placement.layout.strategy}"
    if not isinstance(placed, ParallelModel):
        what = f"{place} returned a {type(placed).__name__}, not a ParallelModel"
        fix = (
            "end it with return placed_in_order(placement, AppliedStrategy(…)), of"
            " lockstep.parallel.placement"
        )
        raise UsageError(what, where="distributed.strategy", fix=fix)
    if placement.dry_run is not None:
        return  # a plan has no values
    without_values = [name for name, p in placed.parameters.items() if p.is_meta]
    if without_values:
        what = f"{place} left {listed(without_values)} without values"
        fix = (
            "call placement.materialise(), which brings the model to its device, before the"
            " parameters are used"
        )
        raise UsageError(what, where="distributed.strategy", fix=fix)


def keep_attributes(placed: ParallelModel, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy attributes of the model's parameters to the placed ones, by name.

    Optimizer groups are chosen by these attributes.
    """
    for name, parameter in placed.parameters.items():
        for attribute, value in attributes[name].items():
            if attribute not in vars(parameter):
                setattr(parameter, attribute, value)


# ---- watch ----


def watch(placed: ParallelModel, site: Site) -> ParallelModel:
    """Return a placed model with what looks at it while it trains.

    Evaluations keep its buffers, replicas are compared, and side effects of forward passes that a
    layout would lose are found.
    """
    config = site.config
    kept_buffers = [buffers for buffers in site.running if buffers.any]
    if kept_buffers:
        apart = bool(site.ways.patterns)
        placed = replace(placed, evaluate=keeping(kept_buffers, placed.evaluate, apart=apart))
    same = [each for axis in site.axes.values() for each in axis.replica_groups(placed)]
    if placed.local_training is None:
        placed = replace(placed, replicas=[*same, *along_replicate(site)])
    divergence.guard_replicas(placed, config, site.mesh, same, site.spread_names)
    every = config.distributed.divergence_check_steps or 100
    side_effects.watch(placed, compiled=config.training.compile, looks_every=every)
    if site.ways.patterns:
        warn_of_unwritten(placed, site.ways)
    return placed


def along_replicate(site: Site) -> list[tuple[dist.ProcessGroup, AbstractSet[str]]]:
    """Return the group of this rank's replicas, and what they do not hold alike, if there are any.

    Gradients are summed over them, so that they also make the same updates.
    """
    group = replica_group(site.mesh)
    return [] if group is None else [(group, site.spread_names)]


def _in_stages(layout: Layout) -> bool:
    return strategy_named(layout.strategy).in_stages and not layout.is_one_group


def _cuts(layout: Layout) -> bool:
    return strategy_named(layout.strategy).cuts_parameters(layout) and not layout.is_one_group
