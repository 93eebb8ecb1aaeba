"""One step: one optimizer update, the same text for every strategy.

    forward and backward of this rank's micro-batches → loss and count of the whole step → finish gradients
    → scale to the mean over valid targets → norm → clip → update

Backward runs on sums divided by a nominal count, a power of two, so that the actual count need not be known before it.
Nothing here waits for the device on a GPU, except in the run's first step, and under fp16, where the decision to skip
needs one number.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep.bad_numbers import Anomaly, AnomalyDetector, BadNumbersError
from lockstep.clipping import clip_adaptively, clip_by_value
from lockstep.collectives import is_main_process
from lockstep.config import GradientClipConfig
from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError, listed
from lockstep.fused import scales, step_times
from lockstep.monitor import PhaseClock
from lockstep.optim import CallersRate, Schedule, TorchSchedule, unfuse
from lockstep.parallel.layer_norms import layer_norms
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.numbers import Number, at_least, at_most, exceeds, tensor_of
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.precision import LossScale
from lockstep.records import StepRecord
from lockstep.torch_compat import foreach


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
        total: the number of the run's last step; 0: nobody knows.
        nominal: what backward divides the summed loss by; a power of two near the step's count. None: nobody has seen a
            micro-batch yet.
        progress: advanced by each step.
        stop_asked: this rank was asked to stop; set it at any time.
        stopping: all ranks know that one of them was asked to.
        clock: told which phase of the step begins.
        wants_layer_norms: whether the record of a step, by its number, is to hold them; the same on all ranks.
        detector: finds bad numbers, and the votes to stop.
        avoid: positions whose data are passed over, after a rollback.
        bad: what was wrong with the last step, where it was skipped for that.
        after_update: called with the number of updates made, after each, on every rank.
        frozen_until: parameter → the first step (from 0) that trains it; before, its gradient is dropped.
    """

    placed: ParallelModel
    optimizer: Optimizer
    schedule: Schedule | TorchSchedule | CallersRate
    clip: GradientClipConfig
    loss_scale: LossScale | None = None
    total: int = 0
    nominal: float | None = None
    progress: Progress = field(default_factory=Progress)
    stop_asked: bool = False
    stopping: bool = False
    clock: PhaseClock = field(default_factory=PhaseClock)
    wants_layer_norms: Callable[[int], bool] = lambda _step: False
    anomaly_detector: AnomalyDetector = field(default_factory=AnomalyDetector)
    avoid: set[int] = field(default_factory=set)
    anomaly: Anomaly | None = None
    after_update: list[Callable[[int], None]] = field(default_factory=list)
    frozen_until: dict[str, int] = field(default_factory=dict)
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _trained: list[bool] = field(default_factory=list)  # which parameters want gradients, as they were placed

    def __post_init__(self) -> None:
        if self.placed.reproducible and unfuse(self.optimizer):
            self.placed.log_lines.append("reproducible: the optimizer's fused kernels are switched off")
        self._trained = [parameter.requires_grad for parameter in self.placed.parameters.values()]
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and all else that is no tensor and decides about later steps."""
        progress = self.progress
        return {
            "step": progress.step,
            "updates": progress.updates,
            "skipped": list(progress.skipped),
            "epoch": progress.epoch,
            "samples": progress.samples,
            "nominal": self.nominal,
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
            "losses": list(self.anomaly_detector.losses),
            "avoid": sorted(self.avoid),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.progress = Progress(
            state["step"], state["updates"], list(state["skipped"]), state["epoch"], state["samples"]
        )
        if state["nominal"] is not None:  # before the first step, and of weights that were imported, nobody knows it
            self.nominal = state["nominal"]
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.anomaly_detector.restart(state.get("losses", ()))
        self.avoid |= set(state.get("avoid", ()))

    def plan_run(self, total: int | None, schedule: Schedule | TorchSchedule | CallersRate) -> None:
        """Set the number of the run's last step, where it is known, and the learning rate up to it."""
        self.total, self.schedule = total or 0, schedule

    def observe(self, clock: PhaseClock, wants_layer_norms: Callable[[int], bool] | None) -> None:
        """Tell `clock` which phase of a step begins, and record the norms of layers where they are wanted."""
        self.clock = clock
        if wants_layer_norms is not None:
            self.wants_layer_norms = wants_layer_norms

    def avoid_data_of(self, step: int) -> None:
        """Pass over the data of a step, counted from 1, when the run comes to it again."""
        self.avoid.add(step - 1)

    def stop(self) -> None:
        """End the run here; every rank calls it after the same step."""
        self.stopping = True

    @property
    def factor(self) -> float:
        """What the summed loss is multiplied by before backward."""
        return (self.loss_scale.scale if self.loss_scale else 1.0) / (self.nominal or 1.0)

    def learn_nominal(self, first: Any, micro_batches_per_step: int) -> None:
        """Set it, once and for all steps: by the very first micro-batch of the run, which rank 0 has, for all ranks."""
        placed = self.placed
        count = float(placed.objective.estimate(first)) if is_main_process() else 0.0  # host waits for the device
        if placed.layout.world_size > 1:
            box = torch.tensor([count], dtype=torch.float64, device=placed.random_state.device)
            dist.broadcast(box, src=0)
            count = box.item()
        self.nominal = nominal_count(count, micro_batches_per_step)

    def open(self, micro_batches_per_step: int) -> LossAccumulator:
        """Begin a step: return its loss accumulator, and remember running statistics if the step may be undone.

        Raises:
            UsageError: parameters were frozen or thawed since the model was placed.
        """
        self._refuse_thawed()
        if self.anomaly_detector.skips:
            self._buffers = {name: buffer.clone() for name, buffer in self.placed.buffers.items()}
        accumulator = self.placed.loss_accumulator(micro_batches_per_step)
        accumulator.mark_step(self.progress.step + 1)
        return accumulator

    def pass_over(self, samples: int) -> None:
        """Leave out the step whose turn it is: its data are consumed, and nothing is learned from them."""
        self.anomaly = None
        self.progress.skipped.append(self.progress.step)
        self._advance(samples)

    def _advance(self, samples: int) -> None:
        self.progress.step += 1
        self.progress.samples += samples
        self.placed.synchronize(self.progress.step, last=self.progress.step == self.total)

    def run(
        self, micro_batches: list[MicroBatch], micro_batches_per_step: int, samples: int, *, epoch: int = 0
    ) -> StepRecord:
        """Run one step.

        Args:
            micro_batches: those of this rank.
            micro_batches_per_step: their number over all ranks.
            samples: of the step, over all ranks.
            epoch: of the data.
        """
        self.progress.epoch = epoch
        if self.nominal is None:
            self.learn_nominal(micro_batches[0].batch, micro_batches_per_step)
        self.clock.enter("forward_backward")
        accumulator = self.open(micro_batches_per_step)
        if self.stop_asked:
            accumulator.vote_to_stop()
        with self.placed.random_state.running("train", self.progress.step):
            self.placed.forward_backward(micro_batches, accumulator, self.factor)
        return self.update(accumulator, samples)

    def update(self, accumulator: LossAccumulator, samples: int) -> StepRecord:
        """What follows the last backward pass of a step.

        Raises:
            BadNumbersError: this step's numbers (on a GPU: those of the step before) are bad, and skipping it is not
                what the config says, or has been done too often. The step is over all the same.
        """
        placed = self.placed
        self.clock.enter("optimizer")
        loss_sum, count = accumulator.totals()
        count = at_least(count, 1.0)  # a step without a valid target has a gradient of zero, not of nan
        loss = loss_sum / count
        placed.finish_gradients()
        self._drop_frozen()
        updates, norm = placed.model_updates(accumulator, self.factor, count)
        rate = self._set_learning_rate()
        overflow = self.loss_scale is not None and not math.isfinite(float(norm))  # host waits for the device
        record = StepRecord(
            step=self.progress.step + 1, loss=loss, grad_norm=norm, lr=rate, samples=samples, tokens=count,
            epoch=self.progress.epoch, skipped=overflow, loss_scale=self.loss_scale.scale if self.loss_scale else None,
        )  # fmt: skip
        if self.wants_layer_norms(record.step) and updates:
            with updates[0].in_place(self.optimizer):
                record.gradient_norms = layer_norms(placed, updates[0].to_mean)
        # Under fp16 a norm that is no number is the scaler's business.
        seen = 0.0 if self.loss_scale is not None else norm
        out_of_step = accumulator.step_marks - record.step * self.placed.layout.world_size
        numbers = self.anomaly_detector.check(record.step, loss, seen, accumulator.stop_votes, out_of_step)
        self.stopping = numbers.stop or self.stopping
        self.anomaly = numbers.anomaly
        record.skipped = overflow or numbers.anomaly is not None
        if record.skipped:
            self.progress.skipped.append(self.progress.step)
        else:
            for update in updates:
                with update.in_place(self.optimizer):
                    gradients = placed.gradients() if update.gradients is None else update.gradients
                    record.clipped = self._clip_and_update(gradients, update.to_mean, update.norm)
            self.progress.updates += 1
            self._call_after_update()
        if numbers.anomaly is not None:
            for name, before in self._buffers.items():
                self.placed.buffers[name].copy_(before)
        self.placed.settle(record.skipped)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
        self.placed.clear_gradients()
        self._advance(samples)
        for check in placed.checks:
            check(self.progress.step)
        self.clock.enter("other")
        self._refuse(numbers.anomaly)
        return record

    def _refuse_thawed(self) -> None:
        """Refuse `requires_grad_` between steps where a strategy has built on what it was."""
        placed = self.placed
        now = [parameter.requires_grad for parameter in placed.parameters.values()]
        if now == self._trained or (placed.layout.world_size == 1 and not placed.reproducible):
            return
        names = [n for n, was, is_now in zip(placed.parameters, self._trained, now, strict=True) if was != is_now]
        raise UsageError(
            f"requires_grad of {listed(names)} was changed after the model was placed",
            why="gradients are reduced for the parameters that wanted one when the model was placed",
            fix="leave requires_grad as it was, and write Trainer(…, freeze_until={'module.name': first_step})",
        )

    def _drop_frozen(self) -> None:
        for name, until in self.frozen_until.items():
            if self.progress.step < until and name in self.placed.parameters:
                self.placed.parameters[name].grad = None

    def _call_after_update(self) -> None:
        if self.after_update:
            with torch.no_grad():
                for call in self.after_update:
                    call(self.progress.updates)

    def flush(self) -> None:
        """Read pending numbers before a checkpoint, which must hold no bad ones; the host waits for the device.

        Raises:
            BadNumbersError: the last step's numbers are bad.
        """
        numbers = self.anomaly_detector.flush()
        self.stopping = numbers.stop or self.stopping
        self._refuse(numbers.anomaly)

    def _refuse(self, anomaly: Anomaly | None) -> None:
        if anomaly is None or (
            self.anomaly_detector.skips and self.anomaly_detector.in_order < self.anomaly_detector.config.patience
        ):
            return
        goes_back = self.anomaly_detector.config.action == "rollback"
        raise BadNumbersError(anomaly, goes_back=goes_back, in_order=self.anomaly_detector.in_order)

    def _set_learning_rate(self) -> float:
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.schedule.rates(groups, self.progress.updates), strict=True):
            group["lr"] = rate
        return float(groups[0]["lr"])

    def _clip_and_update(self, gradients: list[Tensor], to_mean: Number, norm: Number) -> Number | None:
        """Bring the gradients to the mean loss, clipped, and update: by a fused optimizer in one pass over them.

        Returns:
            the share of the gradient that clipping changed (see `StepRecord.clipped`).
        """
        kind, limit, clipped = self.clip.strategy, self.clip.value, None
        if kind == "norm":
            to_mean = to_mean * at_most(limit / (norm + 1e-6), 1.0)
            clipped = exceeds(norm, limit)
        if kind in ("none", "norm") and scales(self.optimizer):
            step_times(self.optimizer, to_mean)
            return clipped
        if gradients:
            foreach.mul_(gradients, tensor_of(to_mean))
        groups, device = self.placed.norm_groups, self.placed.random_state.device
        if kind == "value":
            clipped = clip_by_value(gradients, limit, groups, device)
        if kind == "adaptive":
            parameters = self.placed.parameters.values()
            clipped = clip_adaptively(parameters, limit, groups, device, exact=self.placed.reproducible)
        self.optimizer.step()
        return clipped


def nominal_count(count: float, micro_batches_per_step: int) -> float:
    """Return a power of two near the number of valid targets of a step.

    Args:
        count: valid targets of the first micro-batch.
    """
    return 2.0 ** round(math.log2(max(1.0, count * micro_batches_per_step)))
