"""Local updates: workers train by themselves and meet every H steps, for links too slow for a reduction a step.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): each worker takes H inner steps with the run's optimizer on its own
part of every global batch; the mean over workers of what they changed, θ − θ_w, is an outer gradient, along which a
step of SGD with Nesterov's momentum (0.9, learning rate 0.7) takes the common parameters θ; all workers go on from
there, each with its own optimizer state. With momentum 0 and learning rate 1 it is local SGD (Stich 2018,
arXiv:1805.09767). Fragments (Douillard et al. 2025, arXiv:2501.18512) are exchanged at different steps, H apart each.

Which micro-batches a worker runs, what it draws and when it meets the others follow from the config, the seed and the
step, never from the number of ranks: W workers in one process, which takes them in turn, are W workers on W ranks.

Assumes parameters of one floating type. Memory beyond a plain replica: the common parameters and the momentum; under
int8 and int4 what was rounded away; and for each further worker on a rank all that a worker has.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.config import DiLoCoConfig, DistributedConfig, StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize, Pieces, StepTime, rarely_exchanged_step
from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError
from lockstep.layout import Layout, layout_of_sizes
from lockstep.parallel.in_order import placed_in_order
from lockstep.parallel.local_worker import Flat, Worker, WorkersLossAccumulator, require_one_type
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.micro_step import MicroStep
from lockstep.parallel.numbers import Number, number
from lockstep.parallel.outer_step import OuterStep
from lockstep.parallel.parallel_model import ModelUpdate, ParallelModel, assign_contiguous
from lockstep.parallel.placement import AppliedStrategy, PlacementContext
from lockstep.parallel.wire import LARGEST, QuantizedAllReduce, bytes_each
from lockstep.rules import Contradiction
from lockstep.strategy import Strategy, given_sizes


class DiLoCo(Strategy):
    """A whole model on this rank, which its workers take in turn; `LocalWorkers` does the rest."""

    topologies = {}
    same_training = False
    own_loops = False

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        ranks, workers = world_size, config.diloco.workers or world_size
        if max(config.shard_size or 1, config.pipeline_size or 1) > 1:
            raise UsageError(
                "under diloco each worker's model is whole on one rank",
                where="distributed.shard_size, distributed.pipeline_size",
                fix="leave them out, or choose strategy fsdp or pipeline",
            )
        if workers % ranks:
            whole, rest = divmod(workers, ranks)
            fewer = next(n for n in range(min(workers, ranks), 0, -1) if workers % n == 0)
            raise UsageError(
                f"{workers} workers can't be shared out evenly among {ranks} ranks: "
                f"{workers} = {whole} × {ranks} + {rest}",
                where="distributed.diloco.workers",
                fix=f"start {fewer} ranks, or set workers to {(whole + 1) * ranks}",
            )
        sizes = {"replicate": config.replicate_size or ranks}
        return replace(layout_of_sizes(self.name, sizes, ranks, given_sizes(config)), workers=workers)

    def describe(self, layout: Layout) -> str:
        more = f" ({layout.workers} workers)" if layout.workers != layout.replicate else ""
        return f"{self.name}:{layout.replicate}{more}"

    def contradictions(
        self, config: StepConfig, layout: Layout | None = None, device_type: str | None = None
    ) -> Iterator[Contradiction]:
        diloco, training = config.distributed.diloco, config.training
        if diloco.fragments > diloco.inner_steps:
            yield Contradiction(
                ("distributed.diloco.fragments", "distributed.diloco.inner_steps"),
                f"{diloco.fragments} fragments can't be spread over {diloco.inner_steps} steps, one at a time",
                f"write fragments: {diloco.inner_steps} or fewer",
            )
        micro_batches = (training.global_batch_size or 0) // training.batch_size
        if training.global_batch_size is not None and diloco.workers is not None and micro_batches < diloco.workers:
            yield Contradiction(
                ("training.global_batch_size", "training.batch_size", "distributed.diloco.workers"),
                f"a step has {micro_batches} micro-batches of {training.batch_size}, fewer than the "
                f"{diloco.workers} workers",
                f"write global_batch_size: {diloco.workers * training.batch_size} or more, or a smaller batch_size",
            )

    def instead_of_compression(self, kind: str) -> str | None:
        return "write distributed.diloco.send_as in its place, or strategy: ddp"

    def layouts_to_plan(self, model: ModelSize, config: StepConfig, cluster: GpuCluster) -> Iterator[dict[str, Any]]:
        # Only where it is asked for: it is other training.
        if config.distributed.diloco.workers in (None, cluster.num_gpus):
            yield from super().layouts_to_plan(model, config, cluster)

    def step_time(
        self, pieces: Pieces, config: StepConfig, layout: Layout, cluster: GpuCluster, micro_batches: int
    ) -> StepTime:
        options = config.distributed.diloco
        sent = pieces.parameter_bytes / 4 * bytes_each(options.send_as) / options.inner_steps
        return rarely_exchanged_step(pieces, layout, cluster, micro_batches, sent=sent)

    def further_state(self, config: StepConfig, parameters: int) -> float:
        options = config.distributed.diloco  # the common parameters, their momentum, and what is rounded away
        return 4.0 * parameters * (3 if options.send_as in LARGEST and options.error_feedback else 2)

    def on(self, layout: Layout) -> Strategy:
        return self

    def place(self, placement: PlacementContext) -> ParallelModel:
        p = placement
        p.materialise()
        # A worker sees its own micro-batches only.
        placed = placed_in_order(p, AppliedStrategy(partial(_assigned, *_numbers(p)), statistics_over=1))
        _bring_workers(p, placed)
        return placed

    def rehearse(self, placement: PlacementContext) -> ParallelModel:
        """Place a replica alone: what workers keep besides is `further_state`."""
        placement.materialise()
        return placed_in_order(placement, AppliedStrategy(partial(_assigned, *_numbers(placement)), statistics_over=1))


def _numbers(p: PlacementContext) -> tuple[range, int]:
    """(the workers of this rank, how many there are)."""
    total = p.layout.workers or p.ranks
    each = total // p.ranks
    return range(p.rank * each, (p.rank + 1) * each), total


def _assigned(mine: range, total: int, micro_batches: int) -> list[tuple[int, bool]]:
    return [assigned for number in mine for assigned in assign_contiguous(micro_batches, number, total)]


def _bring_workers(p: PlacementContext, placed: ParallelModel) -> None:
    """Let the workers of this rank train in a placed model."""
    mine, total = _numbers(p)
    assert placed.micro_step is not None
    config = p.config.distributed.diloco
    wire = QuantizedAllReduce(config.send_as, p.mesh["replicate"].get_group() if p.mesh is not None else None)
    workers = LocalWorkers(placed, placed.micro_step, mine, total, config, wire)
    placed.local_training = workers
    placed.forward_backward, placed.micro_step = workers.forward_backward, workers.micro_step
    placed.evaluate, placed.forward = workers.on_common(placed.evaluate), workers.on_common(placed.forward)
    placed.buffers = workers.buffers
    placed.log_lines += _said(config, total, p.ranks, placed)


def _said(config: DiLoCoConfig, total: int, ranks: int, placed: ParallelModel) -> list[str]:
    numbers = sum(p.numel() for p in placed.parameters.values() if p.requires_grad)
    sent = 2 * (ranks - 1) / ranks * numbers * (total // ranks) * bytes_each(config.send_as) / config.inner_steps
    parts = f", in {config.fragments} fragments" if config.fragments > 1 else ""
    whose = "" if config.workers else " (distributed.diloco.workers is unset: one a rank)"
    return [
        f"diloco: {total} worker{'s' * (total != 1)}{whose} train by themselves and exchange what they changed every "
        f"{config.inner_steps} steps as {config.send_as}{parts}: {sent / 1e6:.3g} MB a step and rank on average"
    ]


class LocalWorkers:
    """The workers of this rank, and what they share with those of others. Every rank makes the same calls.

    Args:
        placed: the model that they take in turn.
        micro_step: forward and backward of one micro-batch on the model as it stands.
        mine: the numbers of this rank's workers.
        total: over all ranks.
        wire: on which they meet.

    Raises:
        UsageError: the parameters are not of one floating type.
    """

    def __init__(
        self,
        placed: ParallelModel,
        micro_step: MicroStep,
        mine: range,
        total: int,
        config: DiLoCoConfig,
        wire: QuantizedAllReduce,
    ) -> None:
        self.total = total
        self._placed, self._micro_step = placed, micro_step
        self._parameters = {name: p for name, p in placed.parameters.items() if p.requires_grad}
        self._live_buffers = dict(placed.buffers)
        require_one_type(self._parameters)
        self._values, self._momentum = Flat(self._parameters), Flat(self._parameters)
        for name, parameter in self._parameters.items():
            self._values.views[name].copy_(parameter.detach())
        buffers = {name: buffer.clone() for name, buffer in self._live_buffers.items()}
        frozen = {name: p.detach() for name, p in placed.parameters.items() if not p.requires_grad}
        self._common_buffers = buffers
        order = placed.parameters.keys()
        whole = {**self._values.views, **frozen}
        self.common: dict[str, Tensor] = {name: whole[name] for name in order} | buffers
        feeds_back = config.send_as in LARGEST and config.error_feedback
        self._mine = [self._worker(number, feeds_back) for number in mine]
        self._in_place = self._mine[0]
        self._put(self._in_place.values.views, self._in_place.buffers)
        self._count: Any = 0  # valid targets of the worker that runs
        self._outer = OuterStep(self._values, self._momentum, buffers, config, wire)

    def _worker(self, number: int, feeds_back: bool) -> Worker:
        values = Flat(self._parameters)
        values.data.copy_(self._values.data)
        buffers = {name: buffer.clone() for name, buffer in self._live_buffers.items()}
        return Worker(number, values, buffers, Flat(self._parameters) if feeds_back else None)

    # ---- a step ----

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float
    ) -> None:
        """This rank's shares of a step, worker by worker."""
        left = iter(micro_batches)
        for worker in self._mine:
            count = len(assign_contiguous(accumulator.micro_batches_per_step, worker.number, self.total))
            with self._entered(worker):
                for place in range(1, count + 1):
                    self._run(worker, next(left), accumulator, factor, last=place == count)

    @property
    def micro_step(self) -> MicroStep | None:
        """One micro-batch of the only worker; None where several would take turns."""
        if len(self._mine) > 1:
            return None
        worker = self._mine[0]
        return lambda micro_batch, accumulator, factor, last: self._run(
            worker, micro_batch, accumulator, factor, last=last
        )

    def _run(
        self, worker: Worker, micro_batch: MicroBatch, accumulator: LossAccumulator, factor: float, *, last: bool
    ) -> Loss:
        loss = self._micro_step(micro_batch, accumulator, factor, last)
        if micro_batch.real:
            self._count = self._count + loss.targets
        worker.update = None
        if last:
            if not isinstance(self._count, int) or self._count > 0 or micro_batch.real:
                worker.update = self._update(worker, factor, accumulator)
            self._count = 0
        return loss

    def _update(self, worker: Worker, factor: float, accumulator: LossAccumulator) -> ModelUpdate:
        count = torch.as_tensor(self._count, dtype=torch.float64, device=self._placed.random_state.device).clamp(min=1)
        to_mean = (1.0 / factor / count).float()
        gradients = self._placed.gradients()
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros_like(to_mean)
        assert isinstance(accumulator, WorkersLossAccumulator)
        accumulator.add_norm(worker.number, norm * to_mean)
        return ModelUpdate(number(to_mean), number(norm * to_mean), in_place=partial(self._entered, worker))

    def loss_accumulator(self, micro_batches_per_step: int) -> LossAccumulator:
        """Return an empty accumulator for a step."""
        placed = self._placed
        return WorkersLossAccumulator(
            micro_batches_per_step, placed.random_state.device, shared=placed.layout.world_size > 1, workers=self.total
        )

    def model_updates(self, accumulator: LossAccumulator) -> tuple[list[ModelUpdate], Number]:
        """Return the updates of this rank's workers, and the mean norm of all workers' gradients.

        Args:
            accumulator: of the step, after its `totals`.
        """
        assert isinstance(accumulator, WorkersLossAccumulator)
        return [worker.update for worker in self._mine if worker.update is not None], accumulator.mean_norm

    @contextmanager
    def _entered(self, worker: Worker, optimizer: Optimizer | None = None) -> Iterator[None]:
        """The worker's parameters, buffers, gradients and optimizer state are in place inside."""
        if len(self._mine) == 1:
            yield
            return
        if worker is not self._in_place:
            self._put(worker.values.views, worker.buffers)
            self._in_place = worker
        parameters = self._parameters.values()
        for parameter, gradient in zip(parameters, worker.gradients, strict=False):
            parameter.grad = gradient
        if optimizer is not None:
            outside, optimizer.state = optimizer.state, worker.optimizer
        try:
            yield
        finally:
            worker.gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            if optimizer is not None:
                optimizer.state = outside

    def _put(self, values: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = values[name]
        for name, buffer in self._live_buffers.items():
            buffer.data = buffers[name]

    def synchronize(self, step: int, *, last: bool) -> None:
        """Exchange what is due after `step` steps; everything at the end of the run."""
        for worker in self._mine:
            worker.gradients = []
        self._outer.after(step, self._mine, last=last)

    # ---- what is evaluated and saved ----

    def on_common(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` on the common parameters."""

        def run_on_common(*args: Any, **kwargs: Any) -> Any:
            self._put(self._values.views, self._common_buffers)
            try:
                return run(*args, **kwargs)
            finally:
                self._put(self._in_place.values.views, self._in_place.buffers)

        return run_on_common

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Of all workers of this rank."""
        return {f"{w.prefix}/buffers/{name}": b for w in self._mine for name, b in w.buffers.items()}

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps beside the common model: momentum, and each worker as it stands."""
        kept = self._momentum.named("momentum") | self.buffers
        for worker in self._mine:
            kept |= worker.values.named(f"{worker.prefix}/values")
            kept |= worker.error.named(f"{worker.prefix}/error") if worker.error is not None else {}
        return kept

    def each(self, optimizer: Optimizer) -> Iterator[str]:
        """Yield the prefix of each worker's names in a checkpoint; its optimizer state is in place meanwhile."""
        for worker in self._mine:
            with self._entered(worker, optimizer):
                yield f"{worker.prefix}/"

    def begin_from_common(self) -> None:
        """Let all workers begin from the common parameters: those of a run that had no workers."""
        self._momentum.data.zero_()
        for worker in self._mine:
            worker.values.data.copy_(self._values.data)
            for name, buffer in worker.buffers.items():
                buffer.copy_(self._common_buffers[name])
