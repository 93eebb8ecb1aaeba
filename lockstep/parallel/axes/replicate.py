"""The axis `replicate`: ranks that hold all of what they hold, and run micro-batches of their own.

torch's DistributedDataParallel reduces their gradients once a step, while backward runs. How it is
told when, and what its errors mean, is in `lockstep.parallel.replicas.ddp`.

Tests: tests/parity/test_data_parallel.py
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import Pieces, StepTime, replicated_step
from lockstep.data.batches import AssignAnyRank, assign_contiguous, assign_strided
from lockstep.errors import Contradiction
from lockstep.layout import Layout
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.axes.rows import RowsAxis
from lockstep.parallel.comm.compression import Compression, compress
from lockstep.parallel.loss_accumulator import CarriedFigures
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.placement import AppliedStrategy, placed_in_order
from lockstep.parallel.replicas.ddp import DDPSync, wrapped_by_ddp
from lockstep.parallel.reproducible.gradient_trees import ReplicaTree
from lockstep.parallel.reproducible.tree import assign_tree
from lockstep.parallel.site import Site
from lockstep.registry import BY_SIZE


class ReplicateAxis(Axis):
    """Replicas of the model, whose gradients DDP, a compression, or the tree reduces."""

    name: ClassVar[str] = "replicate"
    goes_with: ClassVar[frozenset[str]] = frozenset(BY_SIZE)
    in_buckets: ClassVar[bool] = True

    _figures: CarriedFigures | None = None  # losses and counts that travel with the gradients

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        """Yield that one version of torch can't reduce under a debug switch."""
        level = dist.get_debug_level()  # type: ignore[attr-defined]  # torch's stubs lack it
        several = layout is not None and layout.world_size > 1
        if several and torch.__version__.startswith("2.13.") and level.name == "DETAIL":
            what = (
                "torch 2.13 dies of a segmentation fault in DistributedDataParallel under"
                " TORCH_DISTRIBUTED_DEBUG=DETAIL"
            )
            fix = (
                "write debug: info, or unset TORCH_DISTRIBUTED_DEBUG; or strategy: fsdp with"
                " fsdp.sharding_strategy: no_shard, which replicates as well"
            )
            yield Contradiction(("distributed.debug: detail",), what, fix)

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        return None if site.layout.is_one_group else cls(site)

    def wrap(
        self, model: nn.Module, config: StepConfig, group: dist.ProcessGroup
    ) -> DistributedDataParallel:
        """Wrap a whole model, on its device, its values already equal on all ranks of the group."""
        self._figures = _carried_figures(self.site, group)
        return wrapped_by_ddp(model, config, group, self._figures)

    def place_model(self) -> ParallelModel | None:
        """Wrap the model for DDP, with the assignment and the reduction of the config."""
        site = self.site
        site.materialise()
        if site.dry_run is not None:
            return _rehearsed(site)
        assert site.mesh is not None
        compression = _compressed(site)
        replicas = site.mesh["replicate"].get_group()
        with _untrained(site.spread_parameters):  # their own axis sums their gradients
            wrapped = self.wrap(site.model, site.config, replicas)
            if compression.hook is not None:
                wrapped.register_comm_hook(None, compression.hook)
            applied = AppliedStrategy(
                _assignment(site),
                runs=wrapped,
                gradient_sync=DDPSync(wrapped),
                compression=compression,
                # the tree is a sum; DDP's own reduction is a mean
                tree=ReplicaTree(wrapped, replicas) if site.reproducible else None,
                multiplier=1.0 if site.reproducible else float(site.ranks),
                carried_figures=self._figures,
            )
        return placed_in_order(site, applied)

    @classmethod
    def step_time(
        cls,
        pieces: Pieces,
        config: StepConfig,
        layout: Layout,
        cluster: GpuCluster,
        micro_batches: int,
    ) -> StepTime | None:
        """Return the time of a step whose gradients are all-reduced, bucket by bucket."""
        uncompressed = pieces.parameter_bytes
        ddp = config.distributed.ddp
        sizes = {
            "fp16": uncompressed / 2,
            "bf16": uncompressed / 2,
            "powersgd": pieces.low_rank_bytes,
        }
        sent = sizes.get(ddp.compression.kind, uncompressed)
        bucket = ddp.bucket_cap_mb * 2**20
        return replicated_step(
            pieces, layout, cluster, micro_batches, sent=sent, bucket_bytes=bucket
        )


@contextmanager
def _untrained(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Hide parameters, in the block, from code that collects trainable ones."""
    hidden = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in hidden:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in hidden:
            parameter.requires_grad_(True)


def _carried_figures(site: Site, group: dist.ProcessGroup) -> CarriedFigures | None:
    """Return what lets gradients carry losses and counts; None where they can't.

    They can where DDP itself adds the gradients of all ranks, unchanged: not those of some of them,
    nor compressed ones, and not where it looks for the parameters that a loss depends on.
    """
    ddp = site.config.distributed.ddp
    changes = site.reproducible or ddp.compression.kind != "none"
    looks = ddp.find_unused_parameters or ddp.static_graph
    ranks = site.layout.world_size
    in_float32 = any(p.requires_grad and p.dtype is torch.float32 for p in site.model.parameters())
    if (
        site.device.type == "cpu"
        and site.ranks == group.size() == ranks
        and ranks & (ranks - 1) == 0
        and in_float32
        and not (changes or looks)
    ):
        return CarriedFigures(site.rank, ranks)
    return None


def _assignment(site: Site) -> AssignAnyRank:
    """Return how micro-batches go to ranks.

    Where ranks exchange rows in each micro-batch, they run the same number.
    """
    if site.spread_names:
        return partial(assign_tree, even=True) if site.reproducible else assign_strided
    if site.axis(RowsAxis) is not None:
        return assign_strided
    return assign_tree if site.reproducible else assign_contiguous


def _rehearsed(site: Site) -> ParallelModel:
    """Place a replica without values, with a stand-in for DDP, which refuses fake tensors."""
    assert site.dry_run is not None
    with _untrained(site.spread_parameters):
        reducer = site.dry_run.reducer(site.model, site.config.distributed.ddp)
    applied = AppliedStrategy(
        assign_contiguous, gradient_sync=reducer, multiplier=float(site.ranks)
    )
    return placed_in_order(site, applied)


def _compressed(site: Site) -> Compression:
    """Return the compression of gradients that the config asks for.

    The model is whole, and on its device.
    """
    assert site.mesh is not None
    bad = site.config.training.bad_numbers
    undoable = site.precision.mode == "fp16" or bad.action == "skip" or bad.recompute
    compression = compress(site.model, site.mesh["replicate"], site.config, undoable=undoable)
    site.log_lines.extend(compression.log_lines)
    return compression
