"""Makes one step: one optimizer update, by the same code for every strategy.

    forward and backward of this rank's micro-batches → loss and count of the whole step
    → finish gradients → scale to the mean over valid targets → norm → clip → update

Backward runs on sums divided by a nominal count, a power of two, so that the actual count need not
be known before it. Where the run's first micro-batch has 2,000 valid targets, and a step has four:

    nominal    2¹³ = 8,192, near 4 × 2,000
    backward   of each micro-batch's summed loss / 8,192, so `.grad` is the sum's gradient / 8,192
    update     7,950 targets were valid: the mean's gradient is `.grad` × 8,192 / 7,950 (`to_mean`)

On a GPU the host waits for the step before, no more, except in a run's first steps, and where the
update depends on a number of this step: fp16, `bad_numbers.action: skip` and `recompute`. Each line
where it waits says: "host waits".

Tests: tests/parity/test_law_one.py, tests/parity/test_elementwise.py, tests/test_fused.py
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep.bad_numbers import (
    Anomaly,
    AnomalyDetector,
    BadNumbersError,
    StepCheck,
    wrongly_computed,
)
from lockstep.clipping import clip_adaptively, clip_by_value
from lockstep.config import GradientClipConfig
from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError, listed
from lockstep.monitor import PhaseClock
from lockstep.optim import Schedule, TorchSchedule, explain_failed_update, unfuse
from lockstep.parallel.loss_accumulator import (
    LossAccumulator,
    Number,
    at_most,
    divisor_of,
    exceeds,
    inverse,
    mean_of,
    tensor_of,
)
from lockstep.parallel.parallel_model import ModelUpdate, ParallelModel, layer_norms
from lockstep.precision import LossScale
from lockstep.process_group.collectives import is_main_process
from lockstep.run_directory.records import StepRecord
from lockstep.torch_compat import foreach
from lockstep.torch_compat.optimizer_step import pre_hooks


@dataclass
class Progress:
    """Progress of the run.

    `step` is the position in the data; `updates` differs from it by the skipped steps.
    """

    step: int = 0
    updates: int = 0
    skipped: list[int] = field(default_factory=list)
    epoch: int = 0
    samples: int = 0


class _FinishedGradients(NamedTuple):
    """A step between its last backward pass and its update; the same numbers on all ranks."""

    loss: Number  # mean over valid targets
    targets: Number
    tokens: Number  # read, whether they are targets or not
    norm: Number  # of the mean loss's gradient, before clipping
    updates: list[ModelUpdate]
    check: StepCheck


@dataclass
class Step:
    """Everything that an update needs besides the data."""

    placed: ParallelModel
    # over `placed.parameters`; its groups' `initial_lr` is the peak learning rate
    optimizer: Optimizer
    # None: the learning rate is what the caller's code sets, as in plain PyTorch
    schedule: Schedule | TorchSchedule | None
    clip: GradientClipConfig
    loss_scale: LossScale | None = None  # under fp16
    total: int = 0  # steps of the run; 0: unknown
    # divisor of the summed loss in backward; None: no micro-batch was seen yet
    nominal: float | None = None
    progress: Progress = field(default_factory=Progress)
    stop_asked: bool = False  # this rank was asked to stop; may be set at any time
    stopping: bool = False  # all ranks know that one of them was asked to stop
    clock: PhaseClock = field(default_factory=PhaseClock)
    # (number of a step) → whether its record has the norms of layers; the same on all ranks
    wants_layer_norms: Callable[[int], bool] = lambda _step: False
    anomaly_detector: AnomalyDetector = field(default_factory=AnomalyDetector)
    # steps, counted from 0, whose data are skipped, after a rollback
    avoid: set[int] = field(default_factory=set)
    anomaly: Anomaly | None = None  # of the last step, if it was skipped for that
    # called with the number of updates
    after_update: list[Callable[[int], None]] = field(default_factory=list)
    # name of a parameter → the first step, counted from 0, that trains it
    frozen_until: dict[str, int] = field(default_factory=dict)
    # running statistics as the step began, where it may be undone
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _num_groups: int = 0  # parameter groups of the optimizer when it was adopted
    _rates: Sequence[Any] | None = None  # learning rates that the schedule set in the last step
    # `requires_grad` of the parameters at placement
    _trained: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.placed.reproducible and unfuse(self.optimizer):
            self.placed.log_lines.append(
                "reproducible: the optimizer's fused kernels are switched off"
            )
        if self.placed.random_state.device.type == "mps" and unfuse(self.optimizer):
            # They take `grad_scale` and ignore it (FusedAdamWKernelImpl.mm), and gradients are
            # scaled by it here.
            self.placed.log_lines.append(
                "mps: the optimizer's fused kernels are switched off, they do not scale"
            )
        self._trained = [parameter.requires_grad for parameter in self.placed.parameters.values()]
        self._pre_hooks = pre_hooks(self.optimizer)
        self._adopt_groups()

    # ---- a step ----

    def run(
        self,
        micro_batches: list[MicroBatch],
        micro_batches_per_step: int,
        samples: int,
        *,
        epoch: int = 0,
    ) -> StepRecord:
        """Run one step of this rank's micro-batches.

        `micro_batches_per_step` and `samples` are over all ranks.
        """
        self.progress.epoch = epoch
        if self.nominal is None:
            self.set_nominal(micro_batches[0].batch, micro_batches_per_step)

        def compute() -> LossAccumulator:
            self.clock.enter("forward_backward")
            accumulator = self.open(micro_batches_per_step)
            if self.stop_asked:
                accumulator.vote_to_stop()
            with self.placed.random_state.running("train", self.progress.step):
                self.placed.forward_backward(micro_batches, accumulator, self.factor)
            return accumulator

        accumulator = compute()
        if not self.anomaly_detector.config.recompute:
            return self.update(accumulator, samples)
        finished = self._finish_gradients(accumulator)
        recomputed = None
        anomaly = finished.check.anomaly
        if anomaly is not None and not anomaly.no_targets:
            self._undo()
            self.placed.finish_update(True)
            self.anomaly_detector.forget_last()
            again = compute()
            finished = self._finish_gradients(again)
            if finished.check.anomaly is None:
                own = {micro_batch.index for micro_batch in micro_batches if micro_batch.real}
                losses = (accumulator.losses(), again.losses())
                recomputed = wrongly_computed(anomaly, float(finished.loss), losses, own)
        return self._update(finished, samples, recomputed)

    def update(self, accumulator: LossAccumulator, samples: int) -> StepRecord:
        """Finish a step after its last backward pass.

        It raises a BadNumbersError if this step's numbers (on a GPU: those of the step before) are
        bad, and not to be skipped, or too many in a row were. The step is complete nevertheless.
        """
        return self._update(self._finish_gradients(accumulator), samples)

    def skip_step(self, samples: int) -> None:
        """Skip the next step: its data are consumed, but not trained on."""
        self.anomaly = None
        self.progress.skipped.append(self.progress.step)
        self._advance(samples)

    def flush(self) -> None:
        """Read pending numbers before a checkpoint, which must contain no bad ones.

        The host waits for the device.
        """
        numbers = self.anomaly_detector.flush()
        self.stopping = numbers.stop or self.stopping
        self._raise_if_bad(numbers.anomaly)

    # ---- before its passes ----

    def open(self, micro_batches_per_step: int) -> LossAccumulator:
        """Begin a step, and return its loss accumulator.

        The running statistics are saved if the step may be undone.
        """
        self._check_requires_grad()
        if self.placed.objective.observed is not None:
            self.placed.objective.observed.begin_step(micro_batches_per_step)
        if self.anomaly_detector.decides_at_once:
            self._buffers = {name: buffer.clone() for name, buffer in self.placed.buffers.items()}
        accumulator = self.placed.loss_accumulator(micro_batches_per_step)
        accumulator.mark_step(self.progress.step + 1)
        return accumulator

    def _check_requires_grad(self) -> None:
        """Reject `requires_grad_` between steps if a strategy depends on its value at placement."""
        placed = self.placed
        if placed.layout.world_size == 1 and not placed.reproducible:
            return
        now = [parameter.requires_grad for parameter in placed.parameters.values()]
        if now == self._trained:
            return
        each = zip(placed.parameters, self._trained, now, strict=True)
        names = [name for name, was, is_now in each if was != is_now]
        why = "gradients are reduced for the parameters that wanted one when the model was placed"
        fix = (
            "leave requires_grad as it was, and write Trainer(…, freeze_until={'module.name':"
            " first_step})"
        )
        raise UsageError(
            f"requires_grad of {listed(names)} was changed after the model was placed",
            why=why,
            fix=fix,
        )

    def set_nominal(self, first: Any, micro_batches_per_step: int) -> None:
        """Set the nominal count for all steps and ranks.

        It comes from the run's first micro-batch on rank 0.
        """
        placed = self.placed
        # host waits for the device
        count = float(placed.objective.estimate(first)) if is_main_process() else 0.0
        if placed.layout.world_size > 1:
            box = torch.full((1,), count, dtype=torch.float64, device=placed.random_state.device)
            dist.broadcast(box, src=0)
            count = box.item()  # host waits for the device
        self.nominal = nominal_count(count, micro_batches_per_step)

    @property
    def factor(self) -> float:
        """Factor of the summed loss before backward."""
        return (self.loss_scale.scale if self.loss_scale else 1.0) / (self.nominal or 1.0)

    # ---- after its passes ----

    def _finish_gradients(self, accumulator: LossAccumulator) -> _FinishedGradients:
        """Sum loss and gradients over the ranks, and judge the numbers of the step.

        The gradients in `.grad` stay sums divided by the nominal count: each of the returned
        updates has the factor that makes the mean over valid targets of them.
        """
        placed = self.placed
        self.clock.enter("optimizer")
        loss_sum, targets = accumulator.totals()
        loss = mean_of(loss_sum, targets)
        placed.finish_gradients()
        for name, until in self.frozen_until.items():
            if self.progress.step < until and name in placed.parameters:
                placed.parameters[name].grad = None
        updates, norm = placed.model_updates(accumulator, self.factor, divisor_of(targets))
        # Under fp16 the loss scale handles a norm that is not finite.
        checked_norm = 0.0 if self.loss_scale is not None else norm
        step = self.progress.step + 1
        # Each rank added the number of its step: the sum differs if one is at another step.
        out_of_step = accumulator.step_marks - step * placed.layout.world_size
        check = self.anomaly_detector.check(
            step, loss, checked_norm, accumulator.stop_votes, out_of_step, targets
        )
        if check.anomaly is not None:
            empty = accumulator.without_targets()
            check = replace(check, anomaly=check.anomaly.beside(empty) if empty else check.anomaly)
        return _FinishedGradients(loss, targets, accumulator.tokens_read, norm, updates, check)

    def _update(
        self, finished: _FinishedGradients, samples: int, recomputed: str | None = None
    ) -> StepRecord:
        """Set the learning rate, update unless the step is skipped, and advance.

        All ranks have the same numbers, so they decide alike. A step that is skipped leaves the
        model's parameters and running statistics as they were, and advances nevertheless.
        """
        placed = self.placed
        updates = finished.updates
        norm = finished.norm
        anomaly = finished.check.anomaly
        self._set_rates()
        lr = float(self.optimizer.param_groups[0]["lr"])
        step = self.progress.step + 1
        # On a GPU an anomaly may be that of the step before, whose gradient was zero if it had no
        # valid target.
        is_bad = anomaly is not None and anomaly.step == step
        # host waits
        overflow = self.loss_scale is not None and not is_bad and not math.isfinite(float(norm))
        gradient_norms = None
        if self.wants_layer_norms(step) and updates:
            with updates[0].in_place(self.optimizer):
                gradient_norms = layer_norms(placed, updates[0].to_mean)
        self.stopping = finished.check.stop or self.stopping
        self.anomaly = anomaly

        skipped = overflow or is_bad
        clipped = None
        if skipped:
            self.progress.skipped.append(self.progress.step)
        else:
            clipped = self._apply(updates)
        if is_bad:
            self._undo()
        placed.finish_update(skipped)
        record = StepRecord(
            step=step,
            loss=finished.loss,
            grad_norm=norm,
            lr=lr,
            samples=samples,
            tokens=finished.targets,
            tokens_read=finished.tokens,
            epoch=self.progress.epoch,
            clipped=clipped,
            recomputed=recomputed,
            skipped=skipped,
            loss_scale=self.loss_scale.scale if self.loss_scale else None,
            gradient_norms=gradient_norms,
        )
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
        placed.clear_gradients()
        self._advance(samples)
        for check in placed.checks:
            check(self.progress.step)
        self.clock.enter("other")
        self._raise_if_bad(anomaly)
        return record

    def _apply(self, updates: Sequence[ModelUpdate]) -> Number | None:
        """Clip the gradients and update the parameters; return `StepRecord.clipped`.

        `updates` has one entry; under `local_training`, one for each model that trains by itself.
        """
        clipped: Number | None = None
        for update in updates:
            with update.in_place(self.optimizer):
                gradients = (
                    self.placed.gradients() if update.gradients is None else update.gradients
                )
                clipped = self._clip_and_update(gradients, update.to_mean, update.norm)
        self.progress.updates += 1
        if self.after_update:
            with torch.no_grad():
                for call in self.after_update:
                    call(self.progress.updates)
        return clipped

    def _clip_and_update(
        self, gradients: list[Tensor], to_mean: Number, norm: Number
    ) -> Number | None:
        """Scale the gradients to the mean loss, clip them, and update.

        Return `StepRecord.clipped`.
        """
        kind = self.clip.strategy
        limit = self.clip.value
        clipped = None
        if kind == "norm":
            to_mean = to_mean * at_most(limit / (norm + 1e-6), 1.0)
            clipped = exceeds(norm, limit)
        if kind in ("none", "norm") and can_scale_gradients(self.optimizer, self._pre_hooks):
            step_scaled(self.optimizer, to_mean)
            return clipped
        # A factor of 1 is usual where every batch has the same power of two of samples.
        if gradients and (isinstance(to_mean, Tensor) or to_mean != 1.0):
            foreach.mul_(gradients, tensor_of(to_mean))
        groups = self.placed.norm_groups
        device = self.placed.random_state.device
        if kind == "value":
            clipped = clip_by_value(gradients, limit, groups, device)
        if kind == "adaptive":
            parameters = self.placed.parameters.values()
            clipped = clip_adaptively(
                parameters, limit, groups, device, exact=self.placed.reproducible
            )
        try:
            self.optimizer.step()
        except Exception as error:
            explain_failed_update(self.optimizer, error)
            raise
        return clipped

    def _undo(self) -> None:
        """Restore the running statistics that the step began with, and drop its gradients."""
        for name, before in self._buffers.items():
            self.placed.buffers[name].copy_(before)
        self.placed.clear_gradients()

    def _advance(self, samples: int) -> None:
        """Count a step that is over, and let models that train by themselves exchange."""
        self.progress.step += 1
        self.progress.samples += samples
        self.placed.synchronize(self.progress.step, last=self.progress.step == self.total)

    def _raise_if_bad(self, anomaly: Anomaly | None) -> None:
        """Raise a BadNumbersError, unless the step is skipped and not too many in a row were."""
        if anomaly is None:
            return
        detector = self.anomaly_detector
        is_skipped = detector.skips or anomaly.no_targets
        if is_skipped and detector.consecutive < detector.config.patience:
            return
        rolls_back = detector.config.action == "rollback"
        raise BadNumbersError(anomaly, rolls_back=rolls_back, consecutive=detector.consecutive)

    # ---- parameter groups and learning rates ----

    def _adopt_groups(self) -> None:
        """Take over the optimizer's parameter groups.

        Some may have been added between steps.
        """
        if self.placed.reproducible:
            unfuse(self.optimizer)
        placed = {id(parameter) for parameter in self.placed.parameters.values()}
        for number, group in enumerate(self.optimizer.param_groups):
            group.setdefault("initial_lr", group["lr"])
            unknown = [parameter for parameter in group["params"] if id(parameter) not in placed]
            if unknown and number >= self._num_groups > 0:
                what = (
                    f"the group that was added to the optimizer has {len(unknown)} parameter(s)"
                    " that are not trained"
                )
                why = "placement has replaced the model's parameters by this rank's"
                fix = (
                    "take them from the model now: optimizer.add_param_group({'params':"
                    " model.head.parameters()})"
                )
                raise UsageError(what, where="the optimizer", why=why, fix=fix)
        self._num_groups = len(self.optimizer.param_groups)

    def _set_rates(self) -> None:
        """Set the learning rate of each parameter group for this step's update."""
        groups = self.optimizer.param_groups
        if len(groups) != self._num_groups:
            self._adopt_groups()
            self._rates = None
        if self.schedule is None:
            return
        if self._rates is not None and isinstance(self.schedule, Schedule):
            self._keep_callers_rates(groups, self._rates)
        self._rates = self.schedule.rates(groups, self.progress.updates)
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate

    def _keep_callers_rates(self, groups: list[dict[str, Any]], made: Sequence[Any]) -> None:
        """Take a rate that the caller's code set on the optimizer as the new peak.

        Plain PyTorch keeps such a rate too.
        """
        for group, rate in zip(groups, made, strict=True):
            if group["lr"] != rate and isinstance(group["lr"], float):
                factor = rate / group["initial_lr"] if group["initial_lr"] else 1.0
                group["initial_lr"] = group["lr"] / (factor or 1.0)

    # ---- the run that the step is in ----

    def plan_run(self, total: int | None, schedule: Schedule | TorchSchedule | None) -> None:
        """Set the number of the run's last step, if it is known, and the schedule."""
        self.total = total or 0
        self.schedule = schedule

    def observe(self, clock: PhaseClock, wants_layer_norms: Callable[[int], bool] | None) -> None:
        """Set the clock of a step's phases, and when to record the norms of layers."""
        self.clock = clock
        if wants_layer_norms is not None:
            self.wants_layer_norms = wants_layer_norms

    def start_after(self, step: int) -> None:
        """Begin after a step that another process has made, without skipped ones before it."""
        self.progress = Progress(step=step, updates=step)

    def avoid_data_of(self, step: int) -> None:
        """Skip the data of a step, counted from 1, when the run reaches it again."""
        self.avoid.add(step - 1)

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop after the step that is running.

        A handler of signals may call it at any time.
        """
        self.stop_asked = True

    def stop(self) -> None:
        """Stop the run here; every rank calls it after the same step."""
        self.stopping = True

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and everything else, besides tensors, that later steps depend on."""
        scale = self.loss_scale.state_dict() if self.loss_scale else None
        losses = list(self.anomaly_detector.losses)
        avoid = sorted(self.avoid)
        return {
            **asdict(self.progress),
            "nominal": self.nominal,
            "loss_scale": scale,
            "losses": losses,
            "avoid": avoid,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._rates = None  # the optimizer's groups have been restored, too
        keys = ("step", "updates", "epoch", "samples")
        self.progress = Progress(
            skipped=list(state["skipped"]), **{key: state[key] for key in keys}
        )
        # it is unknown before the first step, and for imported weights
        if state["nominal"] is not None:
            self.nominal = state["nominal"]
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.anomaly_detector.restart(state.get("losses", ()))
        self.avoid |= set(state.get("avoid", ()))


_LEAST_NOMINAL = 2.0**-20  # sums that are divided by less could overflow


def nominal_count(count: float, micro_batches_per_step: int) -> float:
    """Return a power of two near the number of valid targets of a step, or the sum of weights.

    `count`: of its first micro-batch, which may not be like the others.

    >>> nominal_count(2000, micro_batches_per_step=4)
    8192.0
    """
    return 2.0 ** round(math.log2(max(_LEAST_NOMINAL, count * micro_batches_per_step)))


# Optimizers whose fused kernels divide gradients by the attribute `grad_scale`.
_SCALING = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}


def can_scale_gradients(optimizer: Optimizer, hooks: Sequence[Mapping[int, Any]]) -> bool:
    """Return whether the optimizer's update can scale the gradients.

    It can if it is fused and has none of the `hooks` before its step.
    """
    if type(optimizer) not in _SCALING or any(hooks):
        return False
    # A loop: this is called in each step, and `all` of a generator takes longer.
    for group in optimizer.param_groups:  # noqa: SIM110
        if not group["fused"]:
            return False
    return True


def step_scaled(optimizer: Optimizer, factor: Number) -> None:
    """Update with the gradients times `factor`, which the fused kernel multiplies in."""
    optimizer.grad_scale = tensor_of(inverse(factor))  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
