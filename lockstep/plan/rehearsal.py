"""Rehearses one rank's step on fake tensors: runs the strategy's own code, and counts every byte.

`place` places the model as for training, over a fake process group. From a long chain of equal
blocks three run, and the record of one is repeated for those left out. The device is always the
CPU; on a GPU the same tensors are created, apart from autocast's list of operations and kernels'
own workspaces.

Tests: tests/plan/test_memory.py, tests/plan/test_stages.py,
tests/plan/test_rehearsal_leaves_nothing.py
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import Config, StepConfig
from lockstep.costs.hardware import Cost
from lockstep.data.batches import MicroBatch
from lockstep.errors import RunError
from lockstep.layout import Layout
from lockstep.optim import build_optimizer
from lockstep.parallel.facts import ModelFacts, Named
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.place import place, prepare
from lockstep.parallel.site import DryRun, Site
from lockstep.plan.tracker import (
    INDEX_OF_KIND,
    KINDS,
    EqualChunks,
    Peak,
    Reducer,
    Region,
    Tracker,
    mark_blocks,
    on_backward,
    peak_over,
    regions_of,
    tag_gradients,
)
from lockstep.plan.workload import REPEATED, Workload, kept_blocks
from lockstep.precision import Precision, resolve_mode
from lockstep.process_group.mesh import device_mesh, expert_mesh
from lockstep.randomness import RandomState
from lockstep.strategy import strategy_named
from lockstep.tensors import local
from lockstep.torch_compat.fake_tensors import FakeTensorMode
from lockstep.torch_compat.mesh_caches import forget_meshes

CPU = torch.device("cpu")
# modes of checkpointing under which equal blocks behave differently
GROUPED = ("every_n", "sequential")


@dataclass(frozen=True)
class Rehearsal:
    """Memory and work of one rank."""

    peak: Peak  # largest number of live bytes in a step
    persistent: dict[str, int]  # bytes by kind between two steps
    work: "Work"  # its computations
    stages: dict[int, "Work"] = field(default_factory=dict)  # pipeline stage → its computations
    # bytes that each stage of the pipeline sends per micro-batch
    sent: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """Costs of a micro-batch's passes and of the update.

    They include recomputation, and the copies around collectives.
    """

    forward: Cost
    backward: Cost
    update: Cost
    # Of a backward pass whose schedule has it in two halves: that of the inputs' gradients, and of
    # the weights'.
    halves: tuple[Cost, Cost] | None = None


def rehearse(
    work: Workload,
    config: Config,
    layout: Layout,
    *,
    micro_batches: int = 1,
    device_type: str = "cuda",
) -> Rehearsal:
    """Rehearse a rank's step under a data-parallel strategy (single, ddp, fsdp), on any device."""
    strategy = strategy_named(layout.strategy)
    assert not strategy.in_stages
    layout = layout.with_few_replicas()  # further ones change nothing
    alike = config.training.gradient_checkpointing not in GROUPED
    model, left_out = work.shortened(kept_blocks(device_type)) if alike else (work.model(), 0)
    with fake_ranks(layout.world_size), ExitStack() as modes:
        mesh = meshes(layout)
        tracker = modes.enter_context(tracked())
        facts = work.facts_of(model)
        placed = _place_model(tracker, facts, config, layout, mesh, device_type)
        optimizer = optimizer_of(config, placed.parameters, facts.blocks)
        batch = work.batch(config.training.batch_size)
        fill_state(optimizer)
        tag_persistent(tracker, [*model.parameters(), *model.buffers()], optimizer)
        tracker.restart()
        count = min(micro_batches, 2)
        # The count is over all ranks: the accumulator allocates space for all micro-batches.
        accumulator = LossAccumulator(
            count * layout.data_parallel_size, CPU, shared=layout.world_size > 1
        )
        assert placed.run_micro_batch is not None
        with placed.random_state.running("train", 0):
            for index in range(count):
                tracker.mark("forward")
                last = index == count - 1
                placed.run_micro_batch(MicroBatch(index, batch), accumulator, 1.0, last)
        tracker.mark("update")
        placed.finish_gradients()
        update(optimizer)
        regions = regions_of(tracker.items, (f"F{REPEATED}", f"B{REPEATED}"), left_out)
        start = tracker.start
        if left_out:
            reduces = strategy.in_buckets and layout.replicate > 1
            in_buckets = (
                set(model.parameters()) - spread_experts(facts, layout) if reduces else set()
            )
            states: dict[Tensor, Any] = {
                p: optimizer.state[placed.parameters[n]] for n, p in model.named_parameters()
            }
            start = with_blocks_left_out(
                start, facts.blocks[REPEATED][1], states, left_out, in_buckets
            )
    in_all = _work_of(regions, sum(start) / max(1, sum(tracker.start)))
    return Rehearsal(peak_over(start, regions), dict(zip(KINDS, start, strict=True)), in_all)


@contextmanager
def tracked() -> Iterator[Tracker]:
    """Work on fake tensors for the length of the block; return the tracker that counts them."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
        EqualChunks(),
        Tracker(fake) as tracker,
    ):
        yield tracker


def meshes(layout: Layout) -> DeviceMesh | None:
    """Create the meshes that a placement needs, before tensors are fake.

    Return the first of them.
    """
    if layout.expert > 1:
        expert_mesh(layout, "cpu")
    return device_mesh(layout, "cpu") if layout.world_size > 1 else None


def spread_experts(facts: ModelFacts, layout: Layout) -> set[nn.Parameter]:
    """Return the parameters of experts that are spread over ranks."""
    return set(facts.parameters_of_experts) if layout.expert > 1 else set()


def _work_of(regions: list[Region], grown: float) -> Work:
    """Return the costs of a step's last passes, which send as much as all of them do on average.

    `grown`: the memory's ratio to that in the rehearsal.
    """
    passes: dict[str, list[Cost]] = {"forward": [], "backward": [], "update": []}
    now = ""
    for region in regions:
        if region.label in passes:
            now = region.label
            passes[now].append(Cost())
        if now:
            passes[now][-1] = passes[now][-1].plus(region.cost)
    forward, backward, update = (each[-1].with_sent_of(each) for each in passes.values())
    return Work(forward, backward, update._replace(moved=round(update.moved * grown)))


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Create a process group of one process, whose collectives do nothing.

    Nothing of it is left at the end: this process may go on as a rank of a real one.

    Raises RunError: there is a real one.
    """
    if dist.is_initialized():
        raise RunError(
            "planning needs a process that has joined no process group yet",
            fix="plan before lockstep.setup(), or in a process of its own",
        )
    if world_size > 1:
        dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if world_size > 1:
            dist.destroy_process_group()
            forget_meshes()


def precision_of(config: Config) -> Precision:
    """Return the precision of a step on the CPU."""
    return Precision(resolve_mode(config.precision.mode, CPU)[0], "cpu")


def planned(config: StepConfig) -> StepConfig:
    """Return the config of a rehearsal: eager, on the device, with plain sums."""
    distributed = config.distributed.on_device().model_copy(update={"reproducible": False})
    training = config.training.model_copy(update={"compile": False})
    return StepConfig(training, config.precision.model_copy(update={"fp8": "none"}), distributed)


def prepared_site(facts: ModelFacts, layout: Layout, config: Config, dry_run: DryRun) -> Site:
    """Return the site of a model that is to be cut into stages, prepared as for training."""
    step = planned(config.step)
    random_state = RandomState(step.training.seed, CPU)
    return prepare(Site(facts, layout, step, precision_of(config), random_state, dry_run=dry_run))


def _place_model(
    tracker: Tracker,
    facts: ModelFacts,
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device_type: str,
) -> ParallelModel:
    """Place the model as for training, and mark in the tracker where its passes begin."""
    mark_blocks(tracker, facts.blocks)
    objective = facts.objective

    def loss(outputs: Any, batch: Any) -> Tensor:
        value = objective.loss(outputs, batch)
        on_backward(value, lambda: tracker.mark("backward"))
        return value

    placed = place(
        replace(facts, objective=replace(objective, loss=loss)),
        layout,
        planned(config.step),
        device=CPU,
        precision=precision_of(config),
        dry_run=dry_run_of(tracker, mesh, device_type),
    )
    # The reducer does it under DDP, but for experts.
    reduced = strategy_named(layout.strategy).in_buckets and layout.world_size > 1
    spread = spread_experts(facts, layout)
    tag_gradients(tracker, spread if reduced else facts.model.parameters())
    return placed


def dry_run_of(tracker: Tracker, mesh: DeviceMesh | None, device_type: str) -> DryRun:
    """Return a dry run in which messages along an axis are costs in the tracker's record."""
    return DryRun(
        mesh,
        device_type,
        partial(Reducer, tracker),
        lambda axis, size: tracker.items.append(Cost(sent={axis: size})),
    )


def update(optimizer: torch.optim.Optimizer) -> None:
    """Run what follows the last backward pass."""
    gradients = [
        local(p.grad)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    torch.nn.utils.get_total_norm(gradients)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def tag_persistent(
    tracker: Tracker, held: Iterable[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Count parameters and buffers, and the optimizer's state, as such."""
    tracker.tag(held, "parameters")
    states = optimizer.state.values()
    tracker.tag(
        [t for state in states for t in state.values() if isinstance(t, Tensor)], "optimizer"
    )


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, as its first step does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_of(
    config: Config, parameters: Mapping[str, nn.Parameter], blocks: Named
) -> torch.optim.Optimizer:
    """Build the config's optimizer; only its memory matters."""
    training = config.training
    return build_optimizer(
        training.optimizer,
        parameters,
        learning_rate=1e-3,
        weight_decay=training.weight_decay,
        args=training.optimizer_args,
        device=CPU,
        reproducible=config.distributed.reproducible,
        blocks=[name for name, _ in blocks],
    )


def with_blocks_left_out(
    start: tuple[int, ...],
    block: nn.Module,
    states: Mapping[Tensor, Mapping[str, Any]],
    left_out: int,
    in_buckets: Set[nn.Parameter] = frozenset(),
) -> tuple[int, ...]:
    """Add the memory of the blocks that were left out to the bytes by kind before a step.

    All of these blocks are equal to `block`.

    Args:
        states: parameter → its optimizer state.
        in_buckets: parameters whose gradients have buckets of their own.
    """
    parts_of_all = list(start)
    for parameter in block.parameters():
        size = _bytes(parameter)
        state = sum(_bytes(t) for t in states[parameter].values() if isinstance(t, Tensor))
        parts_of_all[INDEX_OF_KIND["parameters"]] += left_out * size
        parts_of_all[INDEX_OF_KIND["optimizer"]] += left_out * state
        parts_of_all[INDEX_OF_KIND["buckets"]] += left_out * size * (parameter in in_buckets)
    return tuple(parts_of_all)


def _bytes(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().nbytes()
