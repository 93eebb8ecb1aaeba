"""One step: one optimizer update, the same text for every strategy.

    forward and backward of this rank's micro-batches → loss and count of the whole step → finish gradients
    → scale to the mean over valid targets → norm → clip → update

Backward runs on sums divided by a nominal count, a power of two, so that the actual count need not be known before it.
Nothing here waits for the device on a GPU, except under fp16, where the decision to skip needs one number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep.clipping import clip_adaptively, clip_by_value
from lockstep.config import GradientClipConfig
from lockstep.errors import RunError
from lockstep.monitor import PhaseClock
from lockstep.optim import Schedule, unfuse
from lockstep.parallel.exact_norm import exact_norm
from lockstep.parallel.layer_norms import layer_norms
from lockstep.parallel.placed import Ledger, Placed, Share
from lockstep.precision import LossScale
from lockstep.records import StepRecord


@dataclass
class Progress:
    """How far the run is. `step` is the position in the data; `updates` differs from it by the skipped steps."""

    step: int = 0
    updates: int = 0
    skipped: list[int] = field(default_factory=list)
    epoch: int = 0
    samples: int = 0


@dataclass
class Step:
    """All that an update needs besides the data.

    Attributes:
        placed: the model.
        optimizer: over `placed.parameters`; its groups' `initial_lr` is the peak learning rate.
        schedule: learning rate by updates.
        clip: clipping of the gradient.
        loss_scale: under fp16.
        nominal: what backward divides the summed loss by; a power of two near the step's count.
        progress: advanced by each step.
        stop_asked: this rank was asked to stop; set it at any time.
        stopping: all ranks know that one of them was asked to.
        clock: told which phase of the step begins.
        wants_layer_norms: whether the record of a step, by its number, is to hold them; the same on all ranks.
    """

    placed: Placed
    optimizer: Optimizer
    schedule: Schedule
    clip: GradientClipConfig
    loss_scale: LossScale | None = None
    nominal: float = 1.0
    progress: Progress = field(default_factory=Progress)
    stop_asked: bool = False
    stopping: bool = False
    clock: PhaseClock = field(default_factory=PhaseClock)
    wants_layer_norms: Callable[[int], bool] = lambda _step: False
    _watch: "Watch" = field(default_factory=lambda: Watch())

    def __post_init__(self) -> None:
        if self.placed.reproducible and unfuse(self.optimizer):
            self.placed.notices.append("reproducible: the optimizer's fused kernels are switched off")
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    @property
    def factor(self) -> float:
        """What the summed loss is multiplied by before backward."""
        return (self.loss_scale.scale if self.loss_scale else 1.0) / self.nominal

    def run(self, shares: list[Share], slots: int, samples: int) -> StepRecord:
        """One step over `slots` micro-batches of `samples` samples in all, of which this rank runs `shares`."""
        self.clock.enter("forward_backward")
        ledger = self.placed.ledger(slots)
        if self.stop_asked:
            ledger.vote_to_stop()
        with self.placed.cursor.running("train", self.progress.step):
            self.placed.forward_backward(shares, ledger, self.factor)
        return self.update(ledger, samples)

    def update(self, ledger: Ledger, samples: int) -> StepRecord:
        """What follows the last backward pass of a step."""
        self.clock.enter("optimizer")
        loss_sum, count = ledger.totals()
        count = count.clamp(min=1)  # a step without a valid target has a gradient of zero, not of nan
        self.placed.finish_gradients()
        gradients = self.placed.gradients()
        to_mean = (1.0 / self.factor / count).float()
        norm = self._norm(self.placed.counted_gradients(), count.device) * to_mean
        rate = self._set_learning_rate()
        overflow = self.loss_scale is not None and not math.isfinite(norm.item())
        record = StepRecord(
            step=self.progress.step + 1, loss=loss_sum / count, grad_norm=norm, lr=rate, samples=samples, tokens=count,
            epoch=self.progress.epoch, skipped=overflow, loss_scale=self.loss_scale.scale if self.loss_scale else None,
        )  # fmt: skip
        if self.wants_layer_norms(record.step):
            record.gradient_norms = layer_norms(self.placed, to_mean)
        # Under fp16 a norm that is no number is the scaler's business.
        seen = torch.zeros_like(norm) if self.loss_scale is not None else norm
        self.stopping = self._watch.look(record.step, seen, ledger.stop_votes) or self.stopping
        if overflow:
            self.progress.skipped.append(self.progress.step)
        else:
            record.clipped = self._clip_and_scale(gradients, to_mean, norm)
            self.optimizer.step()
            self.progress.updates += 1
        self.placed.settle(overflow)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.samples += samples
        self.clock.enter("other")
        return record

    def _norm(self, gradients: list[Tensor], device: torch.device) -> Tensor:
        if self.placed.reproducible:
            return exact_norm(gradients, self.placed.norm_groups, device, self.placed.num_parameters)
        return gradient_norm(gradients, self.placed.norm_groups, device)

    def _set_learning_rate(self) -> float:
        factor = self.schedule.factor(self.progress.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return float(self.optimizer.param_groups[0]["lr"])

    def _clip_and_scale(self, gradients: list[Tensor], to_mean: Tensor, norm: Tensor) -> Tensor | None:
        """Bring the gradients to the mean loss, clipped; one pass over them for a norm.

        Returns:
            the share of the gradient that clipping changed (see `StepRecord.clipped`).
        """
        kind, limit, groups = self.clip.strategy, self.clip.value, self.placed.norm_groups
        clipped = None
        if kind == "norm":
            to_mean = to_mean * torch.clamp(limit / (norm + 1e-6), max=1.0)
            clipped = (norm > limit).float()
        if gradients:
            torch._foreach_mul_(gradients, to_mean)
        if kind == "value":
            clipped = clip_by_value(gradients, limit, groups, norm.device)
        elif kind == "adaptive":
            parameters = self.placed.parameters.values()
            clipped = clip_adaptively(parameters, limit, groups, norm.device, exact=self.placed.reproducible)
        return clipped


def gradient_norm(gradients: list[Tensor], groups: list[dist.ProcessGroup], device: torch.device) -> Tensor:
    """The 2-norm over all gradients of all shards and stages, 0-dim float32, the same number on every rank."""
    local = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=device)
    if not groups:
        return local
    square = local.double().square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt().float()


class Watch:
    """Reads the few numbers on which the loop decides: is the gradient a number, did a rank vote to stop?

    On the CPU they are read at once. On a GPU they are copied behind the step's work and read one step later, when the
    copy has long arrived, so that nothing waits; all ranks read them at the same step.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, Any] | None = None

    def look(self, step: int, norm: Tensor, stop_votes: Tensor) -> bool:
        """Whether to stop now.

        Raises:
            RunError: the gradient norm of this step (on a GPU: of the one before) is nan or infinite.
        """
        if norm.device.type == "cpu":
            return self._judge(step, norm.item(), stop_votes.item())
        copy = torch.stack((norm.double(), stop_votes)).to("cpu", non_blocking=True)
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        earlier, self._pending = self._pending, (step, copy, arrived)
        if earlier is None:
            return False
        earlier[2].synchronize()
        return self._judge(earlier[0], *earlier[1].tolist())

    def _judge(self, step: int, norm: float, stop_votes: float) -> bool:
        if not math.isfinite(norm):
            raise RunError(
                f"the gradient norm of step {step} is {norm}",
                where=f"step {step}",
                why="the loss overflowed, or a batch holds values that are no numbers",
                fix="lower training.learning_rate, lengthen training.warmup_steps, or look at that step's samples",
            )
        return stop_votes > 0


def nominal_count(count: float, slots: int) -> float:
    """A power of two near the valid targets of a step of `slots` micro-batches, the first of which has `count`."""
    return 2.0 ** round(math.log2(max(1.0, count * slots)))
