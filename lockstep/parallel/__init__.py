"""`place`: from a model and a layout to `Placed`. One ordered list; each strategy is one file beside this one.

checks → names → keyed randomness → activation checkpointing → compile → shard or replicate → first values
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.mesh import Layout
from lockstep.models.protocol import Objective, blocks_of, segments_of
from lockstep.parallel import accelerate, data_parallel, ddp, divergence, fsdp, reproducible
from lockstep.parallel.activation import apply_activation_checkpointing
from lockstep.parallel.buffers import RunningBuffers, refuse_synchronised
from lockstep.parallel.compiled import ColdStart, compile_blocks
from lockstep.parallel.compression import Compression, compress
from lockstep.parallel.initial import FirstValues, agree, canonical_names, materialise, on_meta
from lockstep.parallel.loop import evaluated, in_order, looped, plain_forward
from lockstep.parallel.placed import Ledger, Placed, Share, contiguous_shares, strided_shares
from lockstep.parallel.tree import hybrid_shares, tree_shares
from lockstep.parallel.tree_fsdp import ShardTree
from lockstep.parallel.tree_local import LocalTree, ReplicaTree
from lockstep.precision import Precision, switch_tf32
from lockstep.randomness import Cursor, key_segments

__all__ = ["Ledger", "Placed", "Share", "place"]


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
    switch_tf32(config.precision.tf32)
    names, aliases = canonical_names(model)
    before = sum(p.numel() for p in model.parameters())
    cursor = Cursor(config.training.seed, device)
    first = FirstValues(model, config.training.seed) if on_meta(model) else None
    shared = layout.world_size > 1
    blocks = blocks_of(model)
    if layout.strategy != "dp" or data_parallel.num_gpus(device) == 1:
        key_model(model, cursor, blocks)
    notices = _transform_blocks(model, config, cursor, blocks)
    if config.distributed.reproducible:
        reproducible.require(config, layout)
        notices += reproducible.switch_on(device)
        precision = reproducible.without_weight_cache(precision)
    if first is None and shared and not agree(model):
        notices.append("the model's values differed between ranks: all took rank 0's")
    mesh = layout.mesh(device.type) if shared else None
    if layout.strategy == "pipeline" and mesh is not None:
        from lockstep.parallel import pipeline  # torch's pipelining loads its compiler: seconds at every start

        refuse_synchronised(model)
        placed = pipeline.lay_pipeline(
            model, layout, config, mesh, objective=objective, cursor=cursor, precision=precision, blocks=blocks,
            units=fsdp.units_of(model, config.distributed.fsdp, blocks), first=first, device=device,
            shard=partial(_shard_stage, mesh, config),
        )  # fmt: skip
        if placed.reproducible:
            placed.forward_backward = reproducible.guarded(placed.forward_backward)
        placed.notices = notices + placed.notices
        placed.aliases, placed.num_parameters = aliases, before
        _guard_replicas(placed, config, mesh)
        return placed
    if first is None:
        model.to(device)
    placed = _lay(model, layout, config, mesh, objective, cursor, precision, blocks, notices, first, device)
    placed.parameters = dict(model.named_parameters())
    placed.aliases, placed.num_parameters = aliases, before
    persistent = model.state_dict(keep_vars=True)
    placed.buffers = {n: b for n, b in model.named_buffers() if n in persistent}
    after = sum(p.numel() for p in model.parameters())
    assert before == after, "placement changed the number of parameters"
    assert set(placed.parameters) == set(names.values()), "placement changed names of parameters"
    _guard_replicas(placed, config, mesh)
    return placed


def _guard_replicas(placed: Placed, config: Config, mesh: DeviceMesh | None) -> None:
    every = config.distributed.divergence_check_steps
    if mesh is not None and mesh["replicate"].size() > 1 and every is not None:
        placed.check = divergence.guard(placed, mesh["replicate"].get_group(), every)
    elif every is not None and "divergence_check_steps" in config.distributed.model_fields_set:
        placed.notices.append("divergence_check_steps: one replica, nothing to compare")


def _lay(
    model: nn.Module, layout: Layout, config: Config, mesh: DeviceMesh | None, objective: Objective, cursor: Cursor,
    precision: Precision, blocks: list[tuple[str, nn.Module]], notices: list[str], first: FirstValues | None,
    device: torch.device,
) -> Placed:  # fmt: skip
    """Shard or replicate, then fill in first values."""
    rank = dist.get_rank() if mesh is not None else 0
    if mesh is not None:
        refuse_synchronised(model)
    buffers = RunningBuffers(model, layout.data_parallel_size, reproducible=config.distributed.reproducible)
    loop = partial(looped, objective=objective, cursor=cursor, precision=precision, buffers=buffers)
    said_later: list[str] = []
    exact = config.distributed.reproducible
    tree: LocalTree | ReplicaTree | ShardTree | None = None
    groups = []
    compression = Compression()
    runs: nn.Module = model
    if layout.strategy == "fsdp" and mesh is not None:
        kind = config.distributed.fsdp
        notices += fsdp.apply_fsdp(
            model, mesh, kind, blocks, param_dtype=config.precision.param_dtype, replicas_apart=exact
        )
        _materialise(model, first, device)
        micro_step = loop(model, set_sync=partial(fsdp.set_sync, model, accumulate=kind.accumulate))
        assign = partial(strided_shares, rank=rank, ranks=layout.data_parallel_size)
        if exact:
            tree = ShardTree(model, mesh)
            assign = partial(
                hybrid_shares, replica=rank // layout.shard, replicas=layout.replicate,
                shard=rank % layout.shard, shards=layout.shard,
            )  # fmt: skip
        groups = [mesh["shard"].get_group()] if layout.shard > 1 else []
    else:
        _materialise(model, first, device)
        assign = partial(contiguous_shares, rank=rank, ranks=layout.data_parallel_size)
        if layout.strategy == "accelerate" and mesh is not None:
            compression = compress(model, mesh["replicate"], config, undoable=precision.mode == "fp16")
            notices += compression.notices
            prepared = accelerate.prepare(model, config, device, compression.hook)
            runs = prepared.model
            micro_step = loop(
                runs, set_sync=prepared.set_sync, multiplier=float(layout.data_parallel_size),
                after_backward=prepared.after_backward,
            )  # fmt: skip
        elif mesh is not None:
            compression = compress(model, mesh["replicate"], config, undoable=precision.mode == "fp16")
            notices += compression.notices
            runs = wrapped = ddp.apply_ddp(model, mesh, config.distributed.ddp, compression.hook)
            # The tree is a sum; DDP's own reduction is a mean.
            multiplier = 1.0 if exact else float(layout.data_parallel_size)
            micro_step = loop(
                wrapped, set_sync=partial(ddp.set_sync, wrapped), multiplier=multiplier,
                after_backward=ddp.check_reduced(wrapped),
            )  # fmt: skip
            micro_step = compression.over(micro_step)
            if exact:
                tree = ReplicaTree(wrapped, mesh["replicate"].get_group())
                assign = partial(tree_shares, rank=rank, ranks=layout.data_parallel_size)
        else:
            if layout.strategy == "dp":
                runs = data_parallel.apply_dp(model, config, cursor, notices)
                loop = partial(loop, objective=data_parallel.over_parts(objective))
            micro_step = loop(runs)
            if exact:
                tree = LocalTree(list(model.parameters()))
            if layout.strategy not in ("single", "dp"):
                notices.append(f"{layout.strategy} on one rank: nothing to synchronise or to shard")
    if config.training.compile:
        micro_step = ColdStart(len(blocks) or 1, said_later).over(micro_step)
    if tree is not None:
        micro_step = reproducible.guarded(tree.over(micro_step))
    return Placed(
        layout=layout,
        parts=[model],
        parameters={},
        objective=objective,
        cursor=cursor,
        assign=assign,
        micro_step=micro_step,
        forward_backward=in_order(micro_step),
        evaluate=evaluated(model, objective, cursor, precision),
        forward=plain_forward(model, precision),
        finish_gradients=tree.finish if tree is not None else lambda: None,
        settle=compression.settle,
        norm_groups=groups,
        notices=notices,
        said_later=said_later,
        state=compression.state,
        reproducible=exact,
    )


def _shard_stage(
    mesh: DeviceMesh, config: Config, root: nn.Module, units: list[tuple[str, nn.Module]], foreign: set[nn.Parameter],
    frees: bool,
) -> list[str]:  # fmt: skip
    """FSDP2 over a pipeline's stage, or over what stages share; units were chosen before the model was cut."""
    return fsdp.apply_fsdp(
        root, mesh, config.distributed.fsdp.model_copy(update={"auto_wrap_policy": "transformer"}), units,
        param_dtype=config.precision.param_dtype, reshard_after_forward=frees, foreign=foreign,
    )  # fmt: skip


def _materialise(model: nn.Module, first: FirstValues | None, device: torch.device) -> None:
    if first is not None:
        model.to_empty(device=device)
        materialise(model, first, model.named_parameters())


def key_model(model: nn.Module, cursor: Cursor, blocks: list[tuple[str, nn.Module]]) -> None:
    """Key random numbers by segment; a model that names none is one segment."""
    segments = segments_of(model)
    if segments is not None:
        key_segments(cursor, segments, chain=True)
    else:
        key_segments(cursor, [("", model)], chain=True)
        key_segments(cursor, blocks, chain=False)


def _transform_blocks(
    model: nn.Module, config: Config, cursor: Cursor, blocks: list[tuple[str, nn.Module]]
) -> list[str]:
    """Activation checkpointing, then compilation, on each block."""
    training = config.training
    apply_activation_checkpointing(
        blocks, training.gradient_checkpointing, cursor,
        every=training.gradient_checkpointing_every, compiled=training.compile,
    )  # fmt: skip
    if training.compile:
        compile_blocks(blocks or [("", model)])
        return [f"compile: {len(blocks) or 1} block(s), at their first forward pass"]
    return []


def refuse_impossible(config: Config, layout: Layout, device: torch.device) -> None:
    """What only becomes clear once the layout and the device are known.

    Raises:
        UsageError: with what to write instead.
    """
    dtype, sharded = config.precision.param_dtype, layout.strategy == "fsdp" and layout.world_size > 1
    if dtype != "fp32" and not sharded and layout.strategy != "pipeline":
        raise UsageError(
            f"precision.param_dtype: {dtype} needs strategy fsdp on two ranks or more, and this is {layout}",
            where="precision.param_dtype",
            why="FSDP keeps fp32 shards and casts parameters as it gathers them; elsewhere nothing is gathered",
            fix=f"write precision.mode: {dtype}, which computes in it under every strategy",
        )
    if layout.strategy == "fsdp" and config.distributed.fsdp.cpu_offload and device.type == "cpu":
        raise UsageError(
            "cpu_offload: the device is the CPU, where there is nothing to offload",
            where="distributed.fsdp.cpu_offload",
            fix="write cpu_offload: false",
        )


def refuse_wrapped(model: nn.Module) -> None:
    """A model that is wrapped already would be reduced twice.

    Raises:
        UsageError: with the line to delete.
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        name = type(model).__name__
        raise UsageError(
            f"the model is already wrapped in {name}",
            why="Lockstep places it, and would synchronise it twice",
            fix=f"delete the line model = {name}(model, …) and pass the model itself",
        )
