"""Gradients in half precision on the link, and the steps that decide whether this pays.

A compression is a communication hook of DDP, which averages over ranks. torch's own bf16 hook refuses gloo, though gloo
reduces bf16. Whether it pays depends on the link: under `auto` the first steps alternate between both (`Trial`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs lack it
from torch.distributed.device_mesh import DeviceMesh

from lockstep import accelerator
from lockstep.config import StepConfig
from lockstep.parallel.comm.powersgd import PowerSGD, matrix_of
from lockstep.precision import DTYPES

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

HALF = ("fp16", "bf16")

WARM_UP_STEPS = 2  # steps: buckets are cut anew after the first
ROUNDS = 5  # of each
TRIAL_PAYS_BELOW = 0.9  # of the time of a step


@dataclass
class Trial:
    """A hook of DDP that alternates between plain and compressed gradients, measures steps, and then keeps one."""

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
        """Measure the step that an update ended, and choose the next one's hook; every rank calls it."""
        if self._over:
            return
        accelerator.synchronize(self.device)  # a measurement has to wait
        now = time.perf_counter()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began, self._compresses = now, not self._compresses
        if len(self._seconds) < WARM_UP_STEPS + 2 * ROUNDS:
            return
        # The slowest rank's medians decide, so that all ranks choose the same. The run's first step is plain and not in
        # the list: that begins with a compressed one.
        small, plain = self._seconds[WARM_UP_STEPS::2], self._seconds[WARM_UP_STEPS + 1 :: 2]
        times = torch.tensor([median(plain), median(small)], dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        before, after = times.tolist()
        self._compresses, self._over = after < TRIAL_PAYS_BELOW * before, True
        found = f"a step takes {after:.3g} s with {self.name} and {before:.3g} s without"
        self.log_lines.append(f"compression auto: {self.name if self._compresses else 'none'}, as {found}")


@dataclass
class Compression:
    """A compression as `place` uses it."""

    hook: Hook | None = None  # DDP's communication hook; None: DDP reduces by itself
    log_lines: list[str] = field(default_factory=list)  # logged at start
    powersgd: PowerSGD | None = None  # the memory of PowerSGD, where that is the kind
    trial: Trial | None = None  # of a compression that may pay
    later_log_lines: list[str] = field(default_factory=list)  # lines that become known in the first steps

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        return {} if self.powersgd is None else {"powersgd": self.powersgd.state}

    def finish_update(self, skipped: bool) -> None:
        if self.powersgd is not None:
            self.powersgd.finish_update(skipped)
        if self.trial is not None:
            self.trial.finish_update()


def compress(model: nn.Module, replicas: DeviceMesh, config: StepConfig, *, undoable: bool) -> Compression:
    """Return the compression that the config asks for, of a model that is not wrapped yet; every rank calls it.

    `undoable`: steps may be skipped, or computed again, once their gradients are reduced.
    """
    asked = config.distributed.ddp.compression
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    group = replicas.get_group()
    if asked.kind == "auto":
        device, later_log_lines = next(iter(parameters.values())).device, list[str]()
        plain, small = (half_precision_hook(dtype, group) for dtype in (torch.float32, torch.bfloat16))
        trial = Trial("bf16", plain, small, group, device, later_log_lines)
        line = f"compression auto: the first {1 + WARM_UP_STEPS + 2 * ROUNDS} steps take turns with and without bf16"
        return Compression(trial.hook, [line], trial=trial, later_log_lines=later_log_lines)
    if asked.kind in HALF:
        return Compression(half_precision_hook(DTYPES[asked.kind], group))
    if asked.kind == "none":
        return Compression()
    powersgd = PowerSGD(
        parameters, replicas, rank=asked.rank, start_step=asked.start_step, warm_start=asked.warm_start,
        error_feedback=asked.error_feedback, seed=config.training.seed, undoable=undoable,
    )  # fmt: skip
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    share = sent_numbers(shapes, "powersgd", asked.rank) / sent_numbers(shapes, "none")
    line = f"powersgd of rank {asked.rank} sends {share:.1%} of the gradients from step {asked.start_step} on"
    return Compression(powersgd.hook, [line], powersgd)


def half_precision_hook(dtype: torch.dtype, group: dist.ProcessGroup) -> Hook:
    """Return a hook that sends a bucket in `dtype`, and returns its mean over `group` in the bucket's own type."""
    ranks = dist.get_world_size(group)

    def hook(_state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        # Divided before it is cast: a sum over ranks leaves the range of fp16 earlier than a mean.
        compressed = buffer.div_(ranks).to(dtype)
        sent = dist.all_reduce(compressed, group=group, async_op=True).get_future()

        return sent.then(lambda future: buffer.copy_(future.value()[0]))  # type: ignore[no-any-return]

    return hook


def sent_numbers(shapes: Mapping[str, tuple[int, ...]], kind: str, rank: int = 1) -> float:
    """Return the size of a step's all-reduces in fp32 numbers; a ring of W ranks sends 2 (W - 1) / W times as much."""
    whole = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    if kind in HALF:
        return sum(whole.values()) / 2
    if kind != "powersgd":
        return sum(whole.values())
    total = 0
    for name, shape in shapes.items():
        matrix = matrix_of(shape, rank)
        total += whole[name] if matrix is None else rank * sum(matrix)
    return total
