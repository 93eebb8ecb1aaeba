"""Gradients in half precision on the link, and the measurements that decide whether this pays.

A compression is a communication hook of DDP, which averages over ranks. Both types lose digits; fp16 also loses
elements below 6e-8 and turns those above 65504 into inf. torch's own bf16 hook refuses gloo, though gloo reduces bf16.

gloo reduces on the CPU, where a byte of fp16 takes 2.6 times as long as one of fp32. `auto` therefore measures both on
the ranks' own link, before the first step. Where that promises something, the first steps alternate between both
(`Trial`): the backward pass may hide the traffic, and other load and waits for data then fall on both.
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

_PROBE_NUMBERS = 1 << 19  # 2 MiB of fp32: long enough to hide latency, 0.3 s on a link of 100 Mbit/s
_PAYS_BELOW = 0.8  # of the uncompressed time; less of a gain is not worth the lost digits
_PAYS_FROM_SECONDS = 0.01  # per step: a gain below it is no gain

WARM_UP_STEPS = 2  # steps: buckets are cut anew after the first
ROUNDS = 5  # of each
TRIAL_PAYS_BELOW = 0.9  # of the time of a step


class Trial:
    """A hook of DDP that alternates between plain and compressed gradients, measures steps, and then keeps one.

    Args:
        name: of the compression.
        plain, small: the hooks.
        later_log_lines: receives the line with the result.
    """

    def __init__(
        self, name: str, plain: Hook, small: Hook, group: dist.ProcessGroup, device: torch.device,
        later_log_lines: list[str],
    ) -> None:  # fmt: skip
        self._name, self._plain, self._small = name, plain, small
        self._group, self._device, self._log_lines = group, device, later_log_lines
        self._compresses = False
        self._over = False
        self._began: float | None = None
        self._seconds: list[float] = []  # of each step but the first

    def hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket; DDP calls it."""
        return (self._small if self._compresses else self._plain)(state, bucket)

    def finish_update(self) -> None:
        """Measure the step that an update ended, and choose the next one's hook; every rank calls it."""
        if self._over:
            return
        accelerator.synchronize(self._device)  # a measurement has to wait
        now = time.perf_counter()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began, self._compresses = now, not self._compresses
        if len(self._seconds) == WARM_UP_STEPS + 2 * ROUNDS:
            self._decide()

    def _decide(self) -> None:
        """Choose a hook by the slowest rank's medians, so that all ranks choose the same."""
        # The run's first step is plain and not in the list: that begins with a compressed one.
        small, plain = self._seconds[WARM_UP_STEPS::2], self._seconds[WARM_UP_STEPS + 1 :: 2]
        times = torch.tensor([median(plain), median(small)], dtype=torch.float64, device=self._device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self._group)
        before, after = times.tolist()
        self._compresses, self._over = after < TRIAL_PAYS_BELOW * before, True
        found = f"a step takes {after:.3g} s with {self._name} and {before:.3g} s without"
        self._log_lines.append(f"compression auto: {self._name if self._compresses else 'none'}, as {found}")


@dataclass
class Compression:
    """A compression as `place` uses it.

    Attributes:
        hook: DDP's communication hook; None: DDP reduces by itself.
        log_lines: logged at start.
        powersgd: the memory of PowerSGD, where that is the kind.
        trial: of a compression that may pay.
        later_log_lines: lines that become known in the first steps.
    """

    hook: Hook | None = None
    log_lines: list[str] = field(default_factory=list)
    powersgd: PowerSGD | None = None
    trial: Trial | None = None
    later_log_lines: list[str] = field(default_factory=list)

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors for the checkpoint."""
        return {} if self.powersgd is None else {"powersgd": self.powersgd.state}

    def finish_update(self, skipped: bool) -> None:
        """Tell the compression that an update was made, or `skipped`."""
        if self.powersgd is not None:
            self.powersgd.finish_update(skipped)
        if self.trial is not None:
            self.trial.finish_update()


def compress(model: nn.Module, replicas: DeviceMesh, config: StepConfig, *, undoable: bool) -> Compression:
    """Return the compression that the config asks for; every rank calls it.

    Args:
        model: before it is wrapped, on its device.
        replicas: the ranks that hold it.
        undoable: steps may be skipped, or computed again, once their gradients are reduced.
    """
    asked = config.distributed.ddp.compression
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kind: str = asked.kind
    log_lines: list[str] = []
    if kind == "auto":
        device = next(iter(parameters.values())).device
        kind, line = choose(sum(p.numel() for p in parameters.values()), measure_link(replicas.get_group(), device))
        log_lines.append(line)
        if kind != "none":
            return _with_trial(kind, replicas.get_group(), device, log_lines)
    if kind in HALF:
        return Compression(half_precision_hook(DTYPES[kind], replicas.get_group()), log_lines)
    if kind == "none":
        return Compression(log_lines=log_lines)
    powersgd = PowerSGD(
        parameters, replicas, rank=asked.rank, start_step=asked.start_step, warm_start=asked.warm_start,
        error_feedback=asked.error_feedback, seed=config.training.seed, undoable=undoable,
    )  # fmt: skip
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    share = sent_numbers(shapes, "powersgd", asked.rank) / sent_numbers(shapes, "none")
    log_lines.append(
        f"powersgd of rank {asked.rank} sends {share:.1%} of the gradients from step {asked.start_step} on"
    )
    return Compression(powersgd.hook, log_lines, powersgd)


def _with_trial(kind: str, group: dist.ProcessGroup, device: torch.device, log_lines: list[str]) -> Compression:
    later_log_lines: list[str] = []
    small = half_precision_hook(DTYPES[kind], group)
    trial = Trial(kind, half_precision_hook(torch.float32, group), small, group, device, later_log_lines)
    return Compression(trial.hook, log_lines, trial=trial, later_log_lines=later_log_lines)


def half_precision_hook(dtype: torch.dtype, group: dist.ProcessGroup) -> Hook:
    """Return a hook that sends a bucket in `dtype` and returns its mean over `group` in the bucket's own type.

    With the bucket's own type it does what DDP does without a hook.
    """
    ranks = dist.get_world_size(group)

    def hook(_state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        # Divided before it is cast: a sum over ranks leaves the range of fp16 earlier than a mean.
        compressed = buffer.div_(ranks).to(dtype)
        sent = dist.all_reduce(compressed, group=group, async_op=True).get_future()

        def decompress(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            whole: Tensor = buffer.copy_(future.value()[0])
            return whole

        mean: torch.futures.Future[Tensor] = sent.then(decompress)
        return mean

    return hook


@dataclass(frozen=True)
class AllReduceCost:
    """The cost of an all-reduce of gradients on the ranks' link, in seconds per number, without and with compression.

    Attributes:
        plain: of fp32.
        half: of bf16, casts included.
    """

    plain: float
    half: float

    @property
    def text(self) -> str:
        """Both rates in words."""
        return f"{4e-6 / self.plain:.0f} MB/s of fp32 and {4e-6 / self.half:.0f} MB/s of fp32 sent as bf16"


def worth_compressing(numbers: int, link: AllReduceCost) -> bool:
    """Return whether bf16 for `numbers` gradients a step saves a fifth of the time and more than 10 ms."""
    before, after = numbers * link.plain, numbers * link.half
    return after < _PAYS_BELOW * before and before - after > _PAYS_FROM_SECONDS


def measure_link(group: dist.ProcessGroup, device: torch.device) -> AllReduceCost:
    """Time all-reduces over `group`; every rank calls it, and every rank gets the slowest rank's figures."""
    numbers = torch.zeros(_PROBE_NUMBERS, device=device)

    def plain() -> None:
        dist.all_reduce(numbers, group=group)

    def half() -> None:
        small = numbers.to(torch.bfloat16)
        dist.all_reduce(small, group=group)
        numbers.copy_(small)

    seconds = torch.tensor([_seconds(action, device) for action in (plain, half)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return AllReduceCost(*(seconds / _PROBE_NUMBERS).tolist())


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """Return the median of three runs, after one that opens connections."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        action()
        accelerator.synchronize(device)  # a measurement has to wait
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def choose(numbers: int, link: AllReduceCost) -> tuple[str, str]:
    """Return what `compression: auto` tries: (kind, a log line with the reason)."""
    if worth_compressing(numbers, link):
        saved, tried = numbers * (link.plain - link.half), 1 + WARM_UP_STEPS + 2 * ROUNDS
        return "bf16", (
            f"compression auto: bf16 may save {saved:.2f} s a step ({link.text}); the first {tried} steps take turns "
            "with and without it"
        )
    return "none", f"compression auto: none, as it would not pay here ({link.text})"


def sent_numbers(shapes: Mapping[str, tuple[int, ...]], kind: str, rank: int = 1) -> float:
    """Return the size of a step's all-reduces on a rank, in units of fp32 numbers.

    A ring of W ranks puts 2 (W - 1) / W times as much on each rank's link.
    """
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
