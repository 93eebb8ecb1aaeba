"""Compresses gradients on the link by DDP's communication hooks: half precision or PowerSGD.

DDP averages over ranks, and so do these hooks. Two ranks, a weight [4, 6], 24 numbers:

Half precision sends 24 numbers of two bytes. Each rank halves its gradient first: 40,000 on both
ranks is sent as 20,000 + 20,000, as a sum of 80,000 is infinite in fp16, which ends at 65,504.

PowerSGD of rank 1 sends 4 + 6 numbers. With u = [1, 2, 2, 0], whose length is 3, and
v = [1, 0, 0, 0, 0, 1], the ranks' gradients are M₀ = u vᵀ and M₁ = 3 u vᵀ:

    P = orth(mean of Mᵣ q)      ± u / 3, [4, 1], whatever the first q [6, 1] is
    Q = mean of Mᵣᵀ P           ± 6 v = ± [6, 0, 0, 0, 0, 6], [6, 1]
    P Qᵀ                        2 u vᵀ, the mean of the gradients
    errors, Mᵣ − P Qᵀ           − u vᵀ on rank 0, + u vᵀ on rank 1

This mean has rank 1, so nothing of it is lost: the errors, which ranks add to their next gradients,
are zero in the mean. What P Qᵀ lacks of a mean of higher rank stays in them, until it is sent.

torch's own bf16 hook refuses gloo, though gloo reduces bf16. Whether half precision pays depends on
the link: under `auto` the first steps alternate between both (`Trial`).

Tests: tests/parallel/comm/test_compression.py, tests/parallel/test_worked_examples.py
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs lack it
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.config import StepConfig
from lockstep.machine import accelerator
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.precision import DTYPES
from lockstep.randomness import derive_key
from lockstep.torch_compat import foreach

_LEAST_GAIN = 2  # a tensor is compressed if it then takes at most one number in so many


def matrix_of(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Return (n, m), of least n + m, of a parameter's gradient as a matrix.

    None where compressing it does not pay: a weight [4, 6] of 24 numbers is sent as 10 at rank 1,
    and as 20 at rank 2, which is more than half of them.

    >>> matrix_of((4, 6), rank=1), matrix_of((4, 6), rank=2), matrix_of((8, 2, 3, 3), rank=1)
    ((4, 6), None, (16, 9))
    """
    splits = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    best = min(splits, key=sum, default=(0, 0))
    return best if best[0] * best[1] >= _LEAST_GAIN * rank * sum(best) > 0 else None


@dataclass
class _PendingBucket:
    """A bucket between its hook and the last bucket's."""

    names: list[str]  # of the compressed ones
    matrices: list[Tensor]  # [n, m], views into the bucket; gradients plus memory
    plain: list[Tensor]  # views of the others
    sent: Tensor  # P of each matrix, then the others, flat
    work: dist.Work
    buffer: Tensor
    done: torch.futures.Future[Tensor]


class PowerSGD(AroundMicroBatch):
    """PowerSGD's communication hook for DDP, and its memory (Vogels, Karimireddy, Jaggi 2019).

    A gradient matrix M [n, m], the mean over ranks of M_r, is approximated by P Q^T with P =
    orth(mean M_r Q) and Q = mean M_r^T P, so that r (n + m) numbers are sent instead of n m. What
    is lost, M_r - P Q^T, is added to the rank's next gradient (error feedback); Q of one step is
    where the next one starts (warm start). Gradients are compressed unscaled: a loss scale would
    give the memory another weight whenever it changes. All collectives are issued in the same order
    on every rank: P when a bucket is ready, Q when the last one is.

    Args:
        mesh: 1-D, of the replicas.
        rank: r; a matrix with fewer rows or columns takes as many as it has.
        undoable: steps may be skipped after the hook has run, or be computed again; costs another
            memory of the model's size.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        *,
        rank: int,
        start_step: int,
        warm_start: bool,
        error_feedback: bool,
        seed: int,
        undoable: bool,
    ) -> None:
        self.group = mesh.get_group()
        self.ranks = mesh.size()
        self.rank = rank
        self.start_step = start_step
        self.seed = seed
        self.warm_start = warm_start
        self.undoable = undoable
        self.factor = 1.0  # what this step's gradients were multiplied by
        self._names = {id(p): name for name, p in parameters.items() if p.requires_grad}
        self._matrix: dict[str, tuple[int, int]] = {}  # name → (n, m) of those that are compressed
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}
        self._steps = torch.zeros(1, dtype=torch.int64)  # in host memory
        # what a checkpoint keeps; the tensors are live
        self.state: dict[str, Tensor] = {"steps": self._steps}
        for name, parameter in parameters.items():
            matrix = matrix_of(tuple(parameter.shape), rank)
            if matrix is None or not parameter.requires_grad or not parameter.is_contiguous():
                continue
            self._matrix[name] = matrix
            self._qs[name] = self._first_q(name).to(parameter.device)
            if warm_start:
                self.state[f"{name}//q"] = self._qs[name]
            if error_feedback:
                error = torch.zeros(matrix, device=parameter.device)
                self._errors[name] = error
                # Each rank has an error of its own: together, a stack of them, of which a rank
                # holds one slice.
                self.state[f"{name}//error"] = DTensor.from_local(
                    error.unsqueeze(0), mesh, [Shard(0)], run_check=False
                )
        self._waiting: list[_PendingBucket] = []
        # name → (error, Q) before this step
        self._undo: dict[str, tuple[Tensor | None, Tensor]] = {}

    def before(self, passing: MicroBatchPass) -> None:
        self.factor = passing.factor

    @property
    def steps(self) -> int:
        """Number of times that gradients were reduced for an update."""
        return int(self._steps.item())

    def hook(self, _state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket, when DDP has its gradients; the result is their mean over ranks."""
        buffer = bucket.buffer()
        last = bucket.is_last()
        if self.steps < self.start_step:
            if last:
                self._steps += 1
            sent = dist.all_reduce(
                buffer.div_(self.ranks), group=self.group, async_op=True
            ).get_future()
            return sent.then(lambda future: future.value()[0])  # type: ignore[no-any-return]
        waiting = self._begin(bucket, buffer)
        self._waiting.append(waiting)
        if last:
            self._steps += 1
            self._finish()
        return waiting.done

    def finish_update(self, skipped: bool) -> None:
        """Restore the memory and the count if the step was skipped, or will be computed again."""
        if skipped:
            self._steps -= 1
            for name, (error, q) in self._undo.items():
                self._qs[name].copy_(q)
                if error is not None:
                    self._errors[name].copy_(error)
        self._undo.clear()

    def _begin(self, bucket: GradBucket, buffer: Tensor) -> _PendingBucket:
        """Start the all-reduce of P of a bucket's matrices, and of what is not compressed."""
        names = []
        matrices = []
        plain = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[id(parameter)]
            if name in self._qs:
                names.append(name)
                matrices.append(gradient.view(self._matrix[name]))
            else:
                plain.append(gradient)
        foreach.div_(matrices, self.factor)
        if self._errors:
            foreach.add_(matrices, [self._errors[name] for name in names])
        if not self.warm_start:
            for name in names:
                self._qs[name].copy_(self._first_q(name))
        products = [matrix @ self._qs[name] for name, matrix in zip(names, matrices, strict=True)]
        # A sum, not a mean: the columns of P are made of length 1 afterwards, whatever they are
        # multiplied by. What is not compressed is divided when it has arrived.
        sent = torch.cat([t.reshape(-1) for t in (*products, *plain)])
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None
        devices: list[int | str | torch.device] | None = (
            [buffer.device] if buffer.device.type != "cpu" else None
        )
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        return _PendingBucket(names, matrices, plain, sent, work, buffer, done)

    def _finish(self) -> None:
        """Reduce Q of each bucket, and write the approximations.

        All buckets have been reduced to P.
        """
        # All Qs are under way before the first is waited for.
        second = []
        for bucket in self._waiting:
            bucket.work.wait()
            ps, plain = _split(
                bucket.sent,
                [(self._matrix[n][0], self._qs[n].shape[1]) for n in bucket.names],
                bucket.plain,
            )
            for gradient, reduced in zip(bucket.plain, plain, strict=True):
                torch.div(reduced, self.ranks, out=gradient)
            # of a zero matrix, too, it gives columns of length 1
            ps = [torch.linalg.qr(p)[0] for p in ps]
            qs = [matrix.T @ p for matrix, p in zip(bucket.matrices, ps, strict=True)]
            flat = torch.cat([q.reshape(-1) for q in qs]) if qs else bucket.sent.new_zeros(0)
            work = dist.all_reduce(flat, group=self.group, async_op=True) if qs else None
            second.append((bucket, ps, flat, work))
        for bucket, ps, flat, work in second:
            if work is not None:
                work.wait()
            qs, _ = _split(flat.div_(self.ranks), [self._qs[n].shape for n in bucket.names], [])
            for name, matrix, p, q in zip(bucket.names, bucket.matrices, ps, qs, strict=True):
                error = self._errors.get(name)
                if self.undoable:
                    self._undo[name] = (
                        None if error is None else error.clone(),
                        self._qs[name].clone(),
                    )
                # The matrix is a view into DDP's bucket: the approximation takes its place there,
                # with the loss scale that `_begin` took off.
                if error is not None:
                    error.copy_(matrix)
                torch.mm(p, q.T, out=matrix)
                if error is not None:
                    error.sub_(matrix)
                matrix.mul_(self.factor)
                self._qs[name].copy_(q)
            bucket.done.set_result(bucket.buffer)
        self._waiting.clear()

    def _first_q(self, name: str) -> Tensor:
        """Return [m, r] with orthonormal columns, drawn on the CPU from (seed, name, step)."""
        generator = torch.Generator().manual_seed(
            derive_key(self.seed, "powersgd", name, self.steps)
        )
        n, m = self._matrix[name]
        return torch.linalg.qr(torch.randn(m, min(self.rank, n), generator=generator))[0]  # type: ignore[no-any-return]


def _split(
    flat: Tensor, shapes: Sequence[tuple[int, ...]], like: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    all_shapes = [*shapes, *(tuple(t.shape) for t in like)]
    pieces = flat.split([math.prod(shape) for shape in all_shapes])  # type: ignore[no-untyped-call]
    views = [piece.view(shape) for piece, shape in zip(pieces, all_shapes, strict=True)]
    return views[: len(shapes)], views[len(shapes) :]


Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

HALF = ("fp16", "bf16")

WARM_UP_STEPS = 2  # steps: buckets are cut anew after the first
ROUNDS = 5  # of each
TRIAL_PAYS_BELOW = 0.9  # of the time of a step


@dataclass
class Trial:
    """The DDP hook that alternates plain and compressed gradients, times steps, then keeps one."""

    name: str  # of the compression
    plain: Hook
    small: Hook
    group: dist.ProcessGroup
    device: torch.device
    log_lines: list[str]  # receives the line with the result
    _compresses: bool = False
    _over: bool = False
    _began: float | None = None
    _seconds: list[float] = field(default_factory=list)  # of each step but the first

    def hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return (self.small if self._compresses else self.plain)(state, bucket)

    def finish_update(self) -> None:
        """Measure the step that an update ended, and choose the next one's hook.

        Every rank calls it.
        """
        if self._over:
            return
        accelerator.synchronize(self.device)  # a measurement has to wait
        now = time.perf_counter()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now
        self._compresses = not self._compresses
        if len(self._seconds) < WARM_UP_STEPS + 2 * ROUNDS:
            return
        # The slowest rank's medians decide, so that all ranks choose the same. The run's first step
        # is plain and not in the list: that begins with a compressed one.
        small = self._seconds[WARM_UP_STEPS::2]
        plain = self._seconds[WARM_UP_STEPS + 1 :: 2]
        times = torch.tensor(
            [median(plain), median(small)], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        before, after = times.tolist()
        self._compresses = after < TRIAL_PAYS_BELOW * before
        self._over = True
        comparison = f"a step takes {after:.3g} s with {self.name} and {before:.3g} s without"
        self.log_lines.append(
            f"compression auto: {self.name if self._compresses else 'none'}, as {comparison}"
        )


@dataclass
class Compression:
    """A compression as `place` uses it."""

    hook: Hook | None = None  # DDP's communication hook; None: DDP reduces by itself
    log_lines: list[str] = field(default_factory=list)  # logged at start
    powersgd: PowerSGD | None = None  # the memory of PowerSGD, where that is the kind
    trial: Trial | None = None  # of a compression that may pay
    # lines that become known in the first steps
    later_log_lines: list[str] = field(default_factory=list)

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        return {} if self.powersgd is None else {"powersgd": self.powersgd.state}

    def finish_update(self, skipped: bool) -> None:
        if self.powersgd is not None:
            self.powersgd.finish_update(skipped)
        if self.trial is not None:
            self.trial.finish_update()


def compress(
    model: nn.Module, replicas: DeviceMesh, config: StepConfig, *, undoable: bool
) -> Compression:
    """Return the compression that the config asks for, of a model that is not wrapped yet.

    Every rank calls it.

    `undoable`: steps may be skipped, or computed again, once their gradients are reduced.
    """
    asked = config.distributed.ddp.compression
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    group = replicas.get_group()
    if asked.kind == "auto":
        device = next(iter(parameters.values())).device
        later_log_lines: list[str] = []
        plain, small = (
            half_precision_hook(dtype, group) for dtype in (torch.float32, torch.bfloat16)
        )
        trial = Trial("bf16", plain, small, group, device, later_log_lines)
        line = (
            f"compression auto: the first {1 + WARM_UP_STEPS + 2 * ROUNDS} steps take turns with"
            " and without bf16"
        )
        return Compression(trial.hook, [line], trial=trial, later_log_lines=later_log_lines)
    if asked.kind in HALF:
        return Compression(half_precision_hook(DTYPES[asked.kind], group))
    if asked.kind == "none":
        return Compression()
    powersgd = PowerSGD(
        parameters,
        replicas,
        rank=asked.rank,
        start_step=asked.start_step,
        warm_start=asked.warm_start,
        error_feedback=asked.error_feedback,
        seed=config.training.seed,
        undoable=undoable,
    )
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    share = sent_numbers(shapes, "powersgd", asked.rank) / sent_numbers(shapes, "none")
    line = (
        f"powersgd of rank {asked.rank} sends {share:.1%} of the gradients from step"
        f" {asked.start_step} on"
    )
    return Compression(powersgd.hook, [line], powersgd)


def half_precision_hook(dtype: torch.dtype, group: dist.ProcessGroup) -> Hook:
    """Return a hook that sends a bucket in `dtype`, and returns its mean over `group`.

    The mean has the bucket's own type.
    """
    ranks = dist.get_world_size(group)

    def hook(_state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        # Divided before it is cast: a sum over ranks leaves the range of fp16 earlier than a mean.
        compressed = buffer.div_(ranks).to(dtype)
        sent = dist.all_reduce(compressed, group=group, async_op=True).get_future()

        return sent.then(lambda future: buffer.copy_(future.value()[0]))  # type: ignore[no-any-return]

    return hook


def sent_numbers(shapes: Mapping[str, tuple[int, ...]], kind: str, rank: int = 1) -> float:
    """Return the size of a step's all-reduces in fp32 numbers.

    A ring of W ranks sends 2 (W - 1) / W times as much.

    >>> shapes = {"weight": (4, 6), "bias": (4,)}
    >>> [sent_numbers(shapes, kind) for kind in ("none", "bf16", "powersgd")]
    [28, 14.0, 14]
    """
    uncompressed = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    if kind in HALF:
        return sum(uncompressed.values()) / 2
    if kind != "powersgd":
        return sum(uncompressed.values())
    total = 0
    for name, shape in shapes.items():
        matrix = matrix_of(shape, rank)
        total += uncompressed[name] if matrix is None else rank * sum(matrix)
    return total
