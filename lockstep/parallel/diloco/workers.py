"""The workers of `diloco` on one rank: models that train alone, and exchange in the outer step.

The mean over workers of what they changed, θ − θ_w, is an outer gradient; a step of SGD along it,
with momentum (Nesterov's or plain), moves the common parameters θ, and every worker continues from
there. One number θ = 1, which two workers have trained to 0.8 and 0.6, at the outer learning rate
0.7 with Nesterov's momentum of 0.9:

    what they changed      0.2 and 0.4, in the mean 0.3
    momentum               0.9 · 0 + 0.3 = 0.3
    along                  0.3 + 0.9 · 0.3 = 0.57
    θ                      1 − 0.7 · 0.57 = 0.601, from which both go on

Tests: tests/parallel/diloco/test_diloco.py, tests/parallel/test_worked_examples.py
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config import DiLoCoConfig
from lockstep.data.batches import MicroBatch, assign_contiguous
from lockstep.division import ceil_div, round_up
from lockstep.errors import UsageError
from lockstep.parallel.comm import all_gather_flat
from lockstep.parallel.execution.passes import RunMicroBatch
from lockstep.parallel.loss_accumulator import (
    Loss,
    LossAccumulator,
    Number,
    divisor_of,
    number,
)
from lockstep.parallel.parallel_model import ModelUpdate, ParallelModel
from lockstep.precision import DTYPES

BLOCK = 256  # numbers that share a scale
LARGEST = {"int8": 127, "int4": 7}  # what is sent for the largest number of a block


def bytes_each(kind: str) -> float:
    """Return the bytes that one number takes on the link."""
    return _block_bytes(kind) / BLOCK if kind in LARGEST else float(DTYPES[kind].itemsize)


def _block_bytes(kind: str) -> int:
    return (BLOCK if kind == "int8" else BLOCK // 2) + 4


def encode(values: Tensor, kind: str) -> Tensor:
    """Encode fp32 […, a multiple of BLOCK] as bytes: uint8 […, `bytes_each` times as many].

    A block of 256 numbers whose largest is 7 has the scale 1 in int4, and takes 132 bytes:

    >>> block = torch.zeros(BLOCK)
    >>> block[:3] = torch.tensor([7.0, -3.4, 0.4])
    >>> coded = encode(block, "int4")
    >>> len(coded), decode(coded, "int4")[:3]
    (132, tensor([ 7., -3.,  0.]))
    """
    if kind not in LARGEST:
        return values.to(DTYPES[kind]).contiguous().view(torch.uint8)
    blocks = _blocks(values)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST[kind]
    rounded = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8).flatten(-2)
    packed = rounded.view(torch.uint8)
    if kind == "int4":  # a number of the first half, −7..7, and one of the second share a byte
        low, high = (rounded + 8).view(torch.uint8).chunk(2, -1)
        packed = low | high << 4
    return torch.cat([packed, scale.squeeze(-1).contiguous().view(torch.uint8)], -1)


def decode(coded: Tensor, kind: str) -> Tensor:
    """Decode the result of `encode` to fp32."""
    if kind not in LARGEST:
        return coded.view(DTYPES[kind]).float()
    border = coded.shape[-1] - 4 * (coded.shape[-1] // _block_bytes(kind))
    packed = coded[..., :border]
    scale = coded[..., border:].contiguous().view(torch.float32)
    rounded = packed.view(torch.int8)
    if kind == "int4":
        rounded = torch.cat([packed & 15, packed >> 4], -1).view(torch.int8) - 8
    return (_blocks(rounded.float()) * scale.unsqueeze(-1)).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:-1], -1, BLOCK)


class QuantizedAllReduce:
    """The all-reduce with few bits, by which a group's ranks exchange their workers' changes.

    An all-to-all brings a rank its workers' shares of every worker's tensor; it adds them in the
    order of the workers; an all-gather brings the shares of the mean together. Numbers are rounded
    in blocks that do not depend on the ranks, so the bits do not either. Rounding errors are
    returned, to be added to the next exchange (error feedback: Seide et al. 2014; four bits:
    Douillard et al. 2025, arXiv:2501.18512).

    `group`: ranks that hold as many workers each, in the ranks' order; None: this one holds all.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup | None) -> None:
        self._kind = kind
        self._group = group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())

    def mean(self, rows: Tensor, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean over all workers' rows, and this rank's rounding errors.

        `rows` are this rank's, fp32 [workers, numbers].

        The mean, fp32 [numbers], is the same on all ranks. The errors, [workers, numbers], are of
        each row, and of the mean in the worker's own share: added to the next rows, they correct
        both. `kind` replaces the object's own.
        """
        kind = kind or self._kind
        held, numbers = rows.shape
        workers = held * self._ranks
        share = BLOCK * ceil_div(numbers, BLOCK * workers)
        padded = F.pad(rows, (0, workers * share - numbers)).view(held, workers, share)
        coded = encode(padded, kind)
        to_each = coded.view(held, self._ranks, -1).transpose(0, 1).contiguous()
        theirs = decode(
            self._exchanged(to_each, dist.all_to_all_single).view(workers, held, -1), kind
        )
        total = theirs[0]
        for row in theirs[1:]:  # in their order
            total = total + row
        mean = total / workers
        # The mean travels in few bits, too. What that loses is added to the errors of the worker
        # whose share it is, times the number of workers: so its next row corrects the mean.
        coded_mean = encode(mean, kind)
        gathered = decode(
            self._exchanged(coded_mean, all_gather_flat, self._ranks).view(workers, -1), kind
        )
        lost = padded - decode(coded, kind)
        lost_of_mean = workers * (mean - decode(coded_mean, kind))
        for own in range(held):
            lost[own, self._rank * held + own] += lost_of_mean[own]
        return gathered.view(-1)[:numbers], lost.view(held, -1)[:, :numbers]

    def _exchanged(self, sent: Tensor, collective: Callable[..., Any], times: int = 1) -> Tensor:
        if self._group is None:
            return sent
        received = sent.new_empty(times * sent.numel())
        collective(received, sent.view(-1), group=self._group)
        return received if times > 1 else received.view(sent.shape)


_ALIGNED = 64  # elements: kernels are faster on aligned parameters


class FlatParameters:
    """The trainable parameters, of one type, in one tensor with a view for each.

    So an exchange is a few operations.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        first = next(iter(parameters.values()))
        size = 0
        starts = {}
        for name, parameter in parameters.items():
            starts[name] = size
            size += round_up(parameter.numel(), _ALIGNED)
        self.data = torch.zeros(round_up(size, BLOCK), dtype=first.dtype, device=first.device)
        self.views = {
            name: self.data.as_strided(p.shape, p.stride(), starts[name])  # a memory format stays
            for name, p in parameters.items()
        }

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}/{name}": view for name, view in self.views.items()}


@dataclass
class Worker:
    """One model that trains by itself."""

    number: int  # among all workers
    values: FlatParameters  # its parameters
    buffers: dict[str, Tensor]  # its persistent buffers
    # what int8 or int4 rounded away of its last change, and of its share of the last mean
    error: FlatParameters | None
    # of its step, while another worker is in place
    gradients: list[Tensor | None] = field(default_factory=list)
    # its state, while another worker is in place
    optimizer: Any = field(default_factory=lambda: defaultdict(dict))
    update: ModelUpdate | None = None  # its update of this step; None where it had no micro-batch

    @property
    def prefix(self) -> str:
        return f"worker-{self.number}"


def require_one_type(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that an exchange as one tensor would have to convert."""
    kinds = {p.dtype: name for name, p in parameters.items()}
    if len(kinds) != 1 or not next(iter(kinds)).is_floating_point:
        listed = (
            ", ".join(f"{name} is {dtype}" for dtype, name in kinds.items())
            or "there is none that trains"
        )
        what = "diloco exchanges parameters of one floating type"
        fix = "give all parameters that train one type (model.float()), or use ddp"
        raise UsageError(what, where="distributed.strategy: diloco", why=listed, fix=fix)


class WorkersLossAccumulator(LossAccumulator):
    """Accumulates losses under local updates, and a gradient norm for each of `workers`.

    A worker adds its norm after its backward pass.
    """

    def __init__(
        self, micro_batches_per_step: int, device: torch.device, *, shared: bool, workers: int
    ) -> None:
        super().__init__(micro_batches_per_step + workers, device, shared=shared)
        self.micro_batches_per_step = micro_batches_per_step

    def add_norm(self, worker: int, norm: Tensor) -> None:
        self._table[0, self.micro_batches_per_step + worker] = norm
        self._table[1, self.micro_batches_per_step + worker] = 1.0

    def start_reduce(self) -> None:
        """Do nothing yet: norms are still to come, so the all-reduce starts in `totals`."""

    def totals(self) -> tuple[Number, Number]:
        super().start_reduce()
        self._finish()
        sums = self._table[:, : self.micro_batches_per_step].sum(dim=1)
        return number(sums[0]), number(sums[1])

    @property
    def mean_norm(self) -> Number:
        """Mean norm of the workers' gradients, after `totals`; equal on all ranks."""
        norms, noted = self._table[:, self.micro_batches_per_step : -2].sum(dim=1)
        return number(norms / noted.clamp(min=1))


class OuterStep:
    """The rule and state of the exchange, after which workers go on from `common` and `buffers`."""

    def __init__(
        self,
        common: FlatParameters,
        momentum: FlatParameters,
        buffers: dict[str, Tensor],
        config: DiLoCoConfig,
        all_reduce: QuantizedAllReduce,
    ) -> None:
        self._common = common
        self._momentum = momentum
        self._buffers = buffers
        self._config = config
        self._all_reduce = all_reduce
        blocks = common.data.numel() // BLOCK
        parts = config.fragments
        bounds = [BLOCK * (blocks * k // parts) for k in range(parts + 1)]
        self._pieces = [slice(*ends) for ends in pairwise(bounds)]

    def after(self, step: int, workers: Sequence[Worker], *, last: bool) -> None:
        """Exchange what is due after `step` steps; everything at the end of the run."""
        inner = self._config.inner_steps
        # Four fragments and 100 inner steps: fragment 1 is due after step 25, 125, …, fragment 4
        # after step 100, 200, ….
        for fragment, piece in enumerate(self._pieces, 1):
            if last or step % inner == fragment * inner // len(self._pieces) % inner:
                self._step(piece, workers)
        if self._buffers and (last or step % inner == 0):
            self._average_buffers(workers)

    @torch.no_grad()
    def _step(self, piece: slice, workers: Sequence[Worker]) -> None:
        """Move a piece of the common parameters along the mean of what the workers changed."""
        config = self._config
        common = self._common.data[piece]
        momentum = self._momentum.data[piece]
        changes = torch.stack([(common - worker.values.data[piece]).float() for worker in workers])
        errors = [worker.error.data[piece] for worker in workers if worker.error is not None]
        if errors:
            changes += torch.stack(errors)
        mean, lost = self._all_reduce.mean(changes)
        for error, of_worker in zip(errors, lost, strict=False):
            error.copy_(of_worker)
        momentum.mul_(config.outer_momentum).add_(mean)
        along = mean.add(momentum, alpha=config.outer_momentum) if config.nesterov else momentum
        common.add_(along, alpha=-config.outer_learning_rate)
        for worker in workers:
            worker.values.data[piece].copy_(common)

    @torch.no_grad()
    def _average_buffers(self, workers: Sequence[Worker]) -> None:
        """Set running statistics to their mean over workers in fp32.

        Counts are the same or nearly so.
        """
        rows = [
            torch.cat([b.reshape(-1).float() for b in worker.buffers.values()])
            for worker in workers
        ]
        mean, _ = self._all_reduce.mean(torch.stack(rows), "fp32")
        begin = 0
        for name, common in self._buffers.items():
            values = mean[begin : begin + common.numel()]
            begin = begin + common.numel()
            common.copy_(
                (values if common.is_floating_point() else values.round()).view(common.shape)
            )
            for worker in workers:
                worker.buffers[name].copy_(common)


class LocalWorkers:
    """This rank's workers, the numbers `mine` of `total`, and their common model.

    Every rank makes the same calls.
    """

    def __init__(
        self,
        placed: ParallelModel,
        run_micro_batch: RunMicroBatch,
        mine: range,
        total: int,
        config: DiLoCoConfig,
        all_reduce: QuantizedAllReduce,
    ) -> None:
        self.total = total
        self._placed = placed
        self._run_micro_batch = run_micro_batch
        self._parameters = {name: p for name, p in placed.parameters.items() if p.requires_grad}
        self._live_buffers = dict(placed.buffers)
        require_one_type(self._parameters)
        self._values = FlatParameters(self._parameters)
        self._momentum = FlatParameters(self._parameters)
        for name, parameter in self._parameters.items():
            self._values.views[name].copy_(parameter.detach())
        self._common_buffers = buffers = {
            name: buffer.clone() for name, buffer in self._live_buffers.items()
        }
        frozen = {name: p.detach() for name, p in placed.parameters.items() if not p.requires_grad}
        by_name = {**self._values.views, **frozen}
        self.common: dict[str, Tensor] = {
            name: by_name[name] for name in placed.parameters
        } | buffers
        feeds_back = config.send_as in LARGEST and config.error_feedback
        self._workers = []
        for index in mine:
            values = FlatParameters(self._parameters)
            values.data.copy_(self._values.data)
            own = {name: buffer.clone() for name, buffer in self._live_buffers.items()}
            self._workers.append(
                Worker(index, values, own, FlatParameters(self._parameters) if feeds_back else None)
            )
        self._in_place = self._workers[0]
        self._put(self._in_place.values.views, self._in_place.buffers)
        self._count: Any = 0  # valid targets of the worker that runs
        self._outer = OuterStep(self._values, self._momentum, buffers, config, all_reduce)

    # ---- a step ----

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float
    ) -> None:
        remaining = iter(micro_batches)
        for worker in self._workers:
            count = len(
                assign_contiguous(accumulator.micro_batches_per_step, worker.number, self.total)
            )
            with self._entered(worker):
                for position in range(1, count + 1):
                    self._run(worker, next(remaining), accumulator, factor, position == count)

    @property
    def run_micro_batch(self) -> RunMicroBatch | None:
        """Forward and backward of one micro-batch of the only worker.

        None where there are several.
        """
        if len(self._workers) > 1:
            return None
        return partial(self._run, self._workers[0])

    def _run(
        self,
        worker: Worker,
        micro_batch: MicroBatch,
        accumulator: LossAccumulator,
        factor: float,
        last: bool,
    ) -> Loss:
        """Run a micro-batch of a worker; its last one makes the update that is due."""
        loss = self._run_micro_batch(micro_batch, accumulator, factor, last)
        if micro_batch.real:
            self._count = self._count + loss.targets
        worker.update = None
        if last:
            if not isinstance(self._count, int) or self._count > 0 or micro_batch.real:
                worker.update = self._update(worker, factor, accumulator)
            self._count = 0
        return loss

    def _update(self, worker: Worker, factor: float, accumulator: LossAccumulator) -> ModelUpdate:
        """Return a worker's update: the mean over its own valid targets, and the norm of that."""
        count = torch.as_tensor(
            divisor_of(self._count), dtype=torch.float64, device=self._placed.random_state.device
        )
        to_mean = (1.0 / factor / count).float()
        gradients = self._placed.gradients()
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros_like(to_mean)
        assert isinstance(accumulator, WorkersLossAccumulator)
        accumulator.add_norm(worker.number, norm * to_mean)
        return ModelUpdate(
            number(to_mean), number(norm * to_mean), in_place=partial(self._entered, worker)
        )

    def loss_accumulator(self, micro_batches_per_step: int) -> LossAccumulator:
        placed = self._placed
        return WorkersLossAccumulator(
            micro_batches_per_step,
            placed.random_state.device,
            shared=placed.layout.world_size > 1,
            workers=self.total,
        )

    def model_updates(self, accumulator: LossAccumulator) -> tuple[list[ModelUpdate], Number]:
        assert isinstance(accumulator, WorkersLossAccumulator)
        return [
            worker.update for worker in self._workers if worker.update is not None
        ], accumulator.mean_norm

    @contextmanager
    def _entered(self, worker: Worker, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Have a worker's parameters, buffers, gradients and optimizer state in place inside."""
        if len(self._workers) == 1:
            yield
            return
        if worker is not self._in_place:
            self._put(worker.values.views, worker.buffers)
            self._in_place = worker
        parameters = self._parameters.values()
        for parameter, gradient in zip(parameters, worker.gradients, strict=False):
            parameter.grad = gradient
        if optimizer is not None:
            outside = optimizer.state
            optimizer.state = worker.optimizer
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
        for worker in self._workers:
            worker.gradients = []
        self._outer.after(step, self._workers, last=last)

    # ---- what is evaluated and saved ----

    @contextmanager
    def on_common(self) -> Iterator[None]:
        self._put(self._values.views, self._common_buffers)
        try:
            yield
        finally:
            self._put(self._in_place.values.views, self._in_place.buffers)

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {
            f"{w.prefix}/buffers/{name}": b for w in self._workers for name, b in w.buffers.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps beside the common model: momentum and each worker."""
        kept = self._momentum.named("momentum") | self.buffers
        for worker in self._workers:
            kept |= worker.values.named(f"{worker.prefix}/values")
            kept |= worker.error.named(f"{worker.prefix}/error") if worker.error is not None else {}
        return kept

    def each(self, optimizer: Optimizer) -> Iterator[str]:
        """Yield the prefix of each model's names in a checkpoint.

        Its optimizer state is in place meanwhile.
        """
        for worker in self._workers:
            with self._entered(worker, optimizer):
                yield f"{worker.prefix}/"

    def begin_from_common(self) -> None:
        self._momentum.data.zero_()
        for worker in self._workers:
            worker.values.data.copy_(self._values.data)
            for name, buffer in worker.buffers.items():
                buffer.copy_(self._common_buffers[name])
