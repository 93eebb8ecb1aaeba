"""Full sharding by FSDP2: each rank holds a share of parameters, gradients and optimizer states.

A *unit* is gathered at once: a repeated block, or what a wrap policy picks; all other parameters
belong to the root. A weight [4, 6] of a block, on two ranks, through a step of two micro-batches
under `full_shard`:

    between steps          [2, 6] on each rank: rows 0 and 1, rows 2 and 3
    before the block       gathered: [4, 6] on both, for the forward pass; then [2, 6] again
    before its backward    gathered again
    after it               each rank has a gradient [4, 6] of its micro-batch; a reduce-scatter
                           leaves the sum of both ranks' in [2, 6], and the rest is freed
    after the second       the two sums are added, [2, 6], and the optimizer updates [2, 6]

Gradients are summed, not averaged: losses are divided by the step's count already. FSDP2 can't
shard parameters without a dim (CLIP's `logit_scale`), so every rank holds them complete and FSDP2
ignores them (`Scalars`). Source: Zhao et al. 2023, "PyTorch FSDP"; torch.distributed.fsdp.

Tests: tests/parallel/fsdp/test_fsdp.py, tests/parallel/test_memory.py,
tests/parity/test_data_parallel.py
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.config import DistributedConfig, FSDPConfig, StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout, layout_of_sizes
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.fsdp.units import Unit
from lockstep.parallel.reproducible.tree import Partials, clear_zero_signs
from lockstep.precision import DTYPES
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy, given_sizes
from lockstep.torch_compat.tensor_versions import return_no_views


class FSDP(Strategy):
    """A shard of the model on every rank.

    First values are made one parameter at a time, and sharded.
    """

    topologies = {"fsdp": ("shard",), "hybrid": ("replicate", "shard")}
    axes = ("shard",)
    holds_parts = True

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        """Return how many replicas and shards the sharding strategy makes of the ranks."""
        kind = config.fsdp.sharding_strategy
        notice = ""
        if kind == "no_shard":
            replicate = config.replicate_size or world_size
            shard = config.shard_size or 1
        elif config.shard_size or config.replicate_size:
            shard = config.shard_size or max(1, world_size // (config.replicate_size or 1))
            replicate = config.replicate_size or max(1, world_size // shard)
        elif kind == "hybrid_shard":
            shard = per_node
            if shard == world_size:  # one node: one replica would be plain full_shard
                if world_size % 2:
                    what = (
                        f"hybrid_shard can't split {world_size} ranks of one node into two replicas"
                    )
                    fix = "use an even number of ranks, or full_shard"
                    raise UsageError(what, where="distributed.fsdp.sharding_strategy", fix=fix)
                shard = world_size // 2
                notice = (
                    f"hybrid_shard on one node: 2 replicas × {shard} shards (distributed.shard_size"
                    " sets it)"
                )
            replicate = world_size // shard
        else:
            replicate = 1
            shard = world_size
        sizes = {"replicate": replicate, "shard": shard}
        return replace(
            layout_of_sizes(self.name, sizes, world_size, given_sizes(config)), notice=notice
        )

    def describe(self, layout: Layout) -> str:
        return describe_shards(layout)

    def contradictions(
        self, config: StepConfig, layout: Layout | None = None
    ) -> Iterator[Contradiction]:
        """Refuse under `reproducible` to sum gradients over micro-batches on each rank first."""
        distributed = config.distributed
        if distributed.reproducible and distributed.fsdp.accumulate != "sharded":
            what = (
                f"accumulate: {distributed.fsdp.accumulate} sums gradients in another order than"
                " the tree"
            )
            fix = "write accumulate: sharded, or reproducible: false"
            yield Contradiction(
                ("distributed.reproducible", "distributed.fsdp.accumulate"), what, fix
            )

    def instead_of_compression(self, kind: str) -> str | None:
        half = kind in ("fp16", "bf16")
        return (
            f"write distributed.fsdp.reduce_dtype: {kind}"
            if half
            else "write kind: none, or strategy: ddp"
        )

    def cuts_parameters(self, layout: Layout) -> bool:
        return layout.world_size > 1

    casts_parameters = cuts_parameters

    def message_type(self, config: StepConfig) -> str | None:
        return config.distributed.fsdp.reduce_dtype

    def layouts_to_plan(
        self, model: ModelSize, config: StepConfig, cluster: GpuCluster
    ) -> Iterator[dict[str, Any]]:
        """Yield both ways to shard; on several hosts shards within each host, too."""
        if cluster.num_gpus == 1:
            return
        for kind in ("full_shard", "shard_grad_op"):
            yield {STRATEGIES.where: self.name, "distributed.fsdp.sharding_strategy": kind}
        if cluster.num_gpus > cluster.per_node:
            yield {
                STRATEGIES.where: self.name,
                "distributed.fsdp.sharding_strategy": "hybrid_shard",
                "distributed.shard_size": cluster.per_node,
            }

    def layout_with_offload(self) -> dict[str, Any]:
        return {
            STRATEGIES.where: self.name,
            "distributed.fsdp.sharding_strategy": "full_shard",
            "distributed.fsdp.cpu_offload": True,
        }

    def topologies_to_verify(self, config: StepConfig) -> list[str]:
        return ["hybrid:2x2"] if config.distributed.fsdp.sharding_strategy == "hybrid_shard" else []


def describe_shards(layout: Layout) -> str:
    """Return replicas and shards as a topology: `fsdp:4`, or `hybrid:2x2`."""
    if layout.replicate > 1 and layout.shard > 1:
        return f"hybrid:{layout.replicate}x{layout.shard}"
    return f"fsdp:{layout.replicate * layout.shard}"


def apply_fsdp(
    units: Sequence[Unit],
    mesh: DeviceMesh,
    config: FSDPConfig,
    *,
    foreign: set[nn.Parameter],
    param_dtype: str = "fp32",
    reshard_after_forward: bool | None = None,
    replicas_apart: bool = False,
    device_type: str | None = None,
) -> list[str]:
    """Shard a complete model, real or on meta, over the axes `replicate` and `shard` of `mesh`.

    Return lines to log.

    `units`: inner ones first, the root last, which is the model. `reshard_after_forward` overrides
    what the sharding strategy says. `replicas_apart`: the caller adds up the replicas' gradients;
    FSDP2 only shards. `foreign` parameters stay as they are.
    """
    model = units[-1].module
    # FSDP2 takes a 1-D mesh to shard, and for hybrids a 2-D one, whose first dim replicates.
    over = (
        mesh["shard"]
        if replicas_apart or mesh["replicate"].size() == 1
        else mesh["replicate", "shard"]
    )
    ranks = mesh["shard"].size()
    frees = config.sharding_strategy in ("full_shard", "hybrid_shard")

    def divisible_dim(parameter: nn.Parameter) -> Shard:
        # BDH's weights have 4 heads in dim 0: sharded along it, half of 8 ranks would hold nothing
        # of them. [4, 6] is sharded along dim 0 on two ranks, along dim 1 on three.
        return Shard(
            next((dim for dim, size in enumerate(parameter.shape) if size and size % ranks == 0), 0)
        )

    settings: dict[str, Any] = {
        "mesh": over,
        "reshard_after_forward": frees if reshard_after_forward is None else reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        "shard_placement_fn": divisible_dim,
        "ignored_params": foreign,
    }
    log_lines = _cast_buffers(model, config)
    return_no_views(model)
    # inner ones first: parameters in none belong to the outer one
    for unit in units:
        own = unit.parameters()
        at_root = sum(p.numel() for p in own)  # in the end, as the root comes last
        _refuse_mixture(unit.module, own)
        fully_shard(
            unit.module,
            mp_policy=_precision_of(own, config, param_dtype, exact=replicas_apart),
            **settings,
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no reduction with a factor; a plain sum is exact on every backend.
            module.set_force_sum_reduction_for_comms(True)
    inner = [unit.module for unit in units[:-1]]
    _prefetch(inner, config, on_cpu=(device_type or mesh.device_type) == "cpu")
    in_all = sum(p.numel() for p in model.parameters())
    if in_all and at_root > in_all / 2 and ranks > 1:
        log_lines.append(
            f"{at_root / in_all:.0%} of the parameters belong to no block: they are sharded at the"
            " root and gathered whole for each forward and backward pass"
        )
    return log_lines


def _refuse_mixture(unit: nn.Module, own: Sequence[nn.Parameter]) -> None:
    """Refuse a unit with trained parameters of several types."""
    dtypes = {
        parameter.dtype: parameter
        for parameter in own
        if parameter.requires_grad and parameter.ndim
    }
    if len(dtypes) > 1:
        names = {id(parameter): name for name, parameter in unit.named_parameters()}
        types = ", ".join(
            f"{names[id(p)]} is {str(d).removeprefix('torch.')}" for d, p in dtypes.items()
        )
        what = f"{type(unit).__name__} has parameters of several types: {types}"
        why = "FSDP sums the gradients of what it gathers at once in one type"
        fix = "convert them: model.to(torch.float32); or write strategy: ddp"
        raise UsageError(what, where="distributed.strategy: fsdp", why=why, fix=fix)


def _precision_of(
    parameters: Sequence[nn.Parameter], config: FSDPConfig, param_dtype: str, *, exact: bool
) -> MixedPrecisionPolicy:
    """Return the types in which a unit is gathered, and its gradients are summed."""
    low = None if param_dtype == "fp32" else torch.float32
    reduce_dtype: torch.dtype | None = (
        low if config.reduce_dtype is None else DTYPES[config.reduce_dtype]
    )
    # Gradients of low-precision parameters are summed in fp32 by default; those of float64 never
    # are, and where the bits count each is summed in its own type, as one process sums them.
    if exact or any(parameter.dtype == torch.float64 for parameter in parameters):
        reduce_dtype = None
    gathered_as = None if param_dtype == "fp32" else DTYPES[param_dtype]
    return MixedPrecisionPolicy(
        gathered_as, reduce_dtype, cast_forward_inputs=gathered_as is not None
    )


def _prefetch(units: Sequence[nn.Module], config: FSDPConfig, *, on_cpu: bool) -> None:
    """Say which units FSDP2 gathers ahead, in the forward and in the backward pass."""
    shards: list[FSDPModule] = [u for u in units if isinstance(u, FSDPModule)]
    ahead_in_forward = on_cpu if config.forward_prefetch is None else config.forward_prefetch
    if ahead_in_forward:
        # FSDP2 asks for them when this unit's values lie in place. On a CPU the caller lays them
        # there, and the link would stand still meanwhile, so one more is on its way.
        for position, this in enumerate(shards):
            this.set_modules_to_forward_prefetch(
                shards[position + 1 : position + (3 if on_cpu else 2)]
            )
    if config.backward_prefetch != "pre":
        # FSDP2 gathers the next unit before this one's backward unless a list says otherwise; a
        # unit that names itself, which is gathered already, gathers nothing ahead.
        for this in shards:
            this.set_modules_to_backward_prefetch([this])


def _cast_buffers(model: nn.Module, config: FSDPConfig) -> list[str]:
    if config.buffer_dtype in (None, "fp32"):
        return []  # rotary phases and running statistics break in bf16
    dtype = DTYPES[config.buffer_dtype]
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return [f"buffers are kept in {config.buffer_dtype}, as distributed.fsdp.buffer_dtype says"]


class Scalars(AroundMicroBatch):
    """The parameters without a dim of a sharded model, which every rank holds.

    A step of three micro-batches with one such parameter, on two ranks: rank 0 ran 0 and 2, rank 1
    ran 1, which did not use it. The rows (gradient, whether it is there) are summed over ranks:

        rank 0      [0.5, 1]  [0, 0]  [0.25, 1]
        rank 1      [0, 0]    [0, 0]  [0, 0]
        the sum     0.5 + 0.25, up the tree over micro-batches

    `own`: name → parameter. `mesh`: over which the other parameters are DTensors.
    """

    def __init__(self, own: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self._own = own
        self.placed: dict[str, nn.Parameter] = {}  # replicated DTensors over the parameters' memory
        for name, parameter in self._own.items():
            over = DTensor.from_local(
                parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False
            )
            self.placed[name] = nn.Parameter(over, parameter.requires_grad)
        self._trained = [name for name, parameter in self._own.items() if parameter.requires_grad]
        self._rows: dict[int, list[Tensor | None]] = {}

    def after(self, passing: MicroBatchPass) -> None:
        """Keep the gradients of a micro-batch.

        After the last one, give the placed parameters theirs.
        """
        if not self._trained:
            return
        gradients = [self._own[name].grad for name in self._trained]
        if passing.micro_batch.real:
            self._rows[passing.micro_batch.index] = gradients
        for name in self._trained:
            self._own[name].grad = None
        if passing.last:
            self._reduce(passing.micro_batches_per_step)

    @torch.no_grad()
    def _reduce(self, micro_batches_per_step: int) -> None:
        """Sum the step's gradients over all ranks, and give them to the placed parameters."""
        first = self._own[self._trained[0]]
        # Adding zeros changes no bit of a row; each value has a second column that says whether it
        # is there.
        table = torch.zeros(
            micro_batches_per_step, len(self._trained), 2, dtype=torch.float64, device=first.device
        )
        for index, row in self._rows.items():
            for column, gradient in enumerate(row):
                if gradient is not None:
                    table[index, column, 0] = gradient
                    table[index, column, 1] = 1.0
        self._rows.clear()
        dist.all_reduce(table)
        was_added = table[..., 1].bool().tolist()
        sums = Partials(micro_batches_per_step)
        for index in range(micro_batches_per_step):
            row = [
                table[index, column, 0].to(self._own[name].dtype)
                if was_added[index][column]
                else None
                for column, name in enumerate(self._trained)
            ]
            sums.add(index, row)
        for name, total in zip(self._trained, sums.total() or [], strict=True):
            if total is not None:
                clear_zero_signs([total])
                placed = self.placed[name]
                assert isinstance(placed, DTensor)
                placed.grad = DTensor.from_local(
                    total, placed.device_mesh, placed.placements, run_check=False
                )
