"""Local updates: workers train by themselves and synchronize every H steps, for slow links.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with momentum 0 and learning rate 1 it is local
SGD (Stich 2018, arXiv:1805.09767). Fragments (Douillard et al. 2025, arXiv:2501.18512) are
exchanged at different steps, H apart each. W workers in one process, which runs them in turn, take
the same steps as W workers on W ranks.

Tests: tests/parallel/diloco/test_diloco.py
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Self

from lockstep.config import DistributedConfig, StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize, Pieces, StepTime, rarely_exchanged_step
from lockstep.data.batches import assign_contiguous
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout, layout_of_sizes
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.diloco.workers import LARGEST, LocalWorkers, QuantizedAllReduce, bytes_each
from lockstep.parallel.execution.passes import within
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.placement import AppliedStrategy, placed_in_order
from lockstep.parallel.site import Site
from lockstep.strategy import Strategy, given_sizes


class DiLoCo(Strategy):
    """A whole model on each rank, which the rank's workers train in turn (`LocalWorkers`)."""

    topologies = {}
    axes = ("lockstep.parallel.diloco.strategy:WorkersAxis",)
    same_training = False
    own_loops = False

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        """Share out the workers evenly among the ranks."""
        ranks = world_size
        workers = config.diloco.workers or world_size
        if max(config.shard_size or 1, config.pipeline_size or 1) > 1:
            what = "under diloco each worker's model is whole on one rank"
            fix = "leave them out, or choose strategy fsdp or pipeline"
            raise UsageError(
                what, where="distributed.shard_size, distributed.pipeline_size", fix=fix
            )
        if workers % ranks:
            each, rest = divmod(workers, ranks)
            fewer = next(n for n in range(min(workers, ranks), 0, -1) if workers % n == 0)
            what = (
                f"{workers} workers can't be shared out evenly among {ranks} ranks: {workers} ="
                f" {each} × {ranks} + {rest}"
            )
            fix = f"start {fewer} ranks, or set workers to {(each + 1) * ranks}"
            raise UsageError(what, where="distributed.diloco.workers", fix=fix)
        sizes = {"replicate": config.replicate_size or ranks}
        return replace(
            layout_of_sizes(self.name, sizes, ranks, given_sizes(config)), workers=workers
        )

    def describe(self, layout: Layout) -> str:
        more = f" ({layout.workers} workers)" if layout.workers != layout.replicate else ""
        return f"{self.name}:{layout.replicate}{more}"

    def instead_of_compression(self, kind: str) -> str | None:
        return "write distributed.diloco.send_as in its place, or strategy: ddp"

    def layouts_to_plan(
        self, model: ModelSize, config: StepConfig, cluster: GpuCluster
    ) -> Iterator[dict[str, Any]]:
        # Only on request: it trains differently.
        if config.distributed.diloco.workers in (None, cluster.num_gpus):
            yield from super().layouts_to_plan(model, config, cluster)

    def further_state(self, config: StepConfig, parameters: int) -> float:
        # the common parameters, their momentum, and rounding errors
        options = config.distributed.diloco
        return (
            4.0 * parameters * (3 if options.send_as in LARGEST and options.error_feedback else 2)
        )


class WorkersAxis(Axis):
    """Ranks whose workers train models of their own, and exchange what they changed."""

    name: ClassVar[str] = "workers"

    @classmethod
    def step_time(
        cls,
        pieces: Pieces,
        config: StepConfig,
        layout: Layout,
        cluster: GpuCluster,
        micro_batches: int,
    ) -> StepTime | None:
        """Return the mean time of a step, some of which exchange."""
        options = config.distributed.diloco
        sent = pieces.parameter_bytes / 4 * bytes_each(options.send_as) / options.inner_steps
        return rarely_exchanged_step(pieces, layout, cluster, micro_batches, sent=sent)

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        """Yield what workers that train alone do not go with."""
        diloco = config.distributed.diloco
        training = config.training
        if diloco.fragments > diloco.inner_steps:
            what = (
                f"{diloco.fragments} fragments can't be spread over {diloco.inner_steps} steps, one"
                " at a time"
            )
            fix = f"write fragments: {diloco.inner_steps} or fewer"
            yield Contradiction(
                ("distributed.diloco.fragments", "distributed.diloco.inner_steps"), what, fix
            )
        if training.bad_numbers.recompute:
            what = "each worker has made its own update before the numbers of all are known"
            fix = "leave recompute out, or use ddp or fsdp"
            yield Contradiction(
                ("training.bad_numbers.recompute", "distributed.strategy"), what, fix
            )
        if config.distributed.buffers:
            what = "each worker has buffers of its own, which are not combined over a step"
            fix = "leave buffers out, or use ddp or fsdp"
            yield Contradiction(("distributed.buffers", "distributed.strategy"), what, fix)
        micro_batches = (training.global_batch_size or 0) // training.batch_size
        if (
            training.global_batch_size is not None
            and diloco.workers is not None
            and micro_batches < diloco.workers
        ):
            yield Contradiction(
                ("training.global_batch_size", "training.batch_size", "distributed.diloco.workers"),
                f"a step has {micro_batches} micro-batches of {training.batch_size}, fewer than the"
                f" {diloco.workers} workers",
                f"write global_batch_size: {diloco.workers * training.batch_size} or more, or a"
                " smaller batch_size",
            )

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        return cls(site)

    def place_model(self) -> ParallelModel | None:
        """Place a replica, and have this rank's workers train it; in a plan, the replica alone."""
        site = self.site
        placed = _replica(site)
        if site.dry_run is not None:
            return placed  # what workers keep besides is `further_state`

        config = site.config.distributed.diloco
        total = site.layout.workers or site.ranks
        mine = _workers_of(site.rank, site.ranks, total)
        assert placed.run_micro_batch is not None
        group = site.mesh["replicate"].get_group() if site.mesh is not None else None
        all_reduce = QuantizedAllReduce(config.send_as, group)
        workers = LocalWorkers(placed, placed.run_micro_batch, mine, total, config, all_reduce)
        numbers = sum(p.numel() for p in placed.parameters.values() if p.requires_grad)
        each = numbers * (total // site.ranks) * bytes_each(config.send_as)
        sent = 2 * (site.ranks - 1) / site.ranks * each / config.inner_steps
        parts = f", in {config.fragments} fragments" if config.fragments > 1 else ""
        whose = "" if config.workers else " (distributed.diloco.workers is unset: one a rank)"
        placed.log_lines.append(
            f"diloco: {total} worker{'s' * (total != 1)}{whose} train by themselves and exchange"
            f" what they changed every {config.inner_steps} steps as {config.send_as}{parts}:"
            f" {sent / 1e6:.3g} MB a step and rank on average"
        )
        return replace(
            placed,
            local_training=workers,
            passes=workers.forward_backward,
            run_micro_batch=workers.run_micro_batch,
            evaluate=within(workers.on_common, placed.evaluate),
            forward=within(workers.on_common, placed.forward),
            buffers=workers.buffers,
        )


def _replica(site: Site) -> ParallelModel:
    """Place a model on which this rank's workers run the micro-batches of each in turn."""
    total = site.layout.workers or site.ranks

    def assign(micro_batches: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
        workers = _workers_of(rank, ranks, total)
        return [i for number in workers for i in assign_contiguous(micro_batches, number, total)]

    site.materialise()
    # A worker sees its own micro-batches only.
    return placed_in_order(site, AppliedStrategy(assign, statistics_over=1))


def _workers_of(rank: int, ranks: int, total: int) -> range:
    """Return the numbers of a rank's workers."""
    each = total // ranks
    return range(rank * each, (rank + 1) * each)
