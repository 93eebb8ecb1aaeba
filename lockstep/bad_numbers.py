"""Checks each step's numbers without waiting for the device.

They are: a loss that is not finite, a spike of it, and a vote to stop.

It assumes that loss, norm and votes are equal on all ranks, so that every rank decides the same at
the same step.

Tests: tests/faults/test_numbers.py, tests/parallel/execution/test_recompute.py
"""

import math
import socket
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config import BadNumbersConfig
from lockstep.errors import RunError, listed
from lockstep.machine import accelerator
from lockstep.parallel.loss_accumulator import Number, bad_count
from lockstep.process_group.collectives import world_size

ALL_IGNORED = (
    "all targets are ignored (-100, or the loss function's ignore_index), or all weights are 0:"
    " prompts that fill their sequences, or labels that were made otherwise than the loss expects"
    " them"
)
_READ_AT_ONCE = ("cpu", "mps")  # types of device; MPS has no float64


@dataclass(frozen=True)
class Anomaly:
    """A step whose loss or gradient norm is unusable."""

    step: int  # counted from 1, as in a `StepRecord`
    what: str  # a sentence without a full stop
    loss: float
    grad_norm: float
    no_targets: bool = False  # no sample of the step has a valid target, so that its loss is 0/0

    def beside(self, empty: Sequence[int]) -> "Anomaly":
        """Return it with a sentence on the step's micro-batches without a valid target.

        It is unchanged if no micro-batch has one.
        """
        if self.no_targets:
            return self
        which = listed([str(index) for index in empty])
        text = (
            f"{self.what}; micro-batch {which} has no valid target, where a mean that is written by"
            " hand is 0/0 "
        )
        return replace(self, what=text + "(divide by mask.sum().clamp(min=1))")


class BadNumbersError(RunError):
    """Raised for an anomaly that is not skipped: the run stops or rolls back."""

    def __init__(self, anomaly: Anomaly, *, rolls_back: bool = False, consecutive: int = 1) -> None:
        self.anomaly = anomaly
        self.rolls_back = rolls_back
        self.consecutive = consecutive
        often = f", the last of {consecutive} bad steps in order" if consecutive > 1 else ""
        why = "the loss overflowed, or a batch holds values that are not numbers"
        fix = (
            "lower training.learning_rate, lengthen training.warmup_steps, or look at that step's"
            " samples, which events.jsonl lists; training.bad_numbers.action: skip or rollback"
            " goes on without them"
        )
        if anomaly.no_targets:
            why = ALL_IGNORED
            fix = (
                "look at the targets of the samples that events.jsonl lists, and drop samples"
                " without any"
            )
        super().__init__(f"{anomaly.what}{often}", where=f"step {anomaly.step}", why=why, fix=fix)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), rolls_back=self.rolls_back, consecutive=self.consecutive), (
            self.anomaly,
        )


@dataclass(frozen=True)
class StepCheck:
    """The host's knowledge about a step (on a GPU: the step before)."""

    stop: bool = False
    anomaly: Anomaly | None = None


def _on_device(value: Number, device: torch.device) -> Tensor:
    """Return a 0-dim float64 tensor.

    `full` fills it there, where `as_tensor` would copy, and wait for the device.
    """
    return (
        value.double()
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=torch.float64, device=device)
    )


@dataclass
class AnomalyDetector:
    """Reads each step's numbers and detects anomalies.

    On the CPU and on MPS they are read at once. On other GPUs they are copied asynchronously and
    read one step later, so that nothing waits; under `action: skip` and `recompute` the host waits
    for them, since the update depends on them.
    """

    config: BadNumbersConfig = field(default_factory=BadNumbersConfig)
    # the last good ones, oldest first: they define a spike
    losses: deque[float] = field(default_factory=deque)
    consecutive: int = 0  # bad steps since the last good one
    without_targets: int = 0  # steps without a valid target, since this process began
    _pending: tuple[int, Tensor, Any] | None = None

    def __post_init__(self) -> None:
        self.skips = self.config.action == "skip"  # a bad step makes no update
        # the step's own update depends on its numbers
        self.decides_at_once = self.skips or self.config.recompute

    def forget_last(self) -> None:
        """Take back the bad step that `check` has found last: it is computed again."""
        self.consecutive -= 1

    def check(
        self,
        step: int,
        loss: Number,
        norm: Number,
        stop_votes: Number,
        out_of_step: Number,
        targets: Number = 1.0,
    ) -> StepCheck:
        """Check the numbers of `step`, after its gradients and before its update.

        Return what is known by now.

        A step whose `targets`, the number of valid ones, is 0 is an anomaly that does not end the
        run. A RunError is raised if the ranks are in different steps: `out_of_step` is not 0.
        """
        given = (loss, norm, stop_votes, out_of_step, targets)
        device = None
        for value in given:  # a loop, since it runs in each step and generators are slower
            if isinstance(value, Tensor):
                device = value.device
                break
        if device is None or device.type in _READ_AT_ONCE or self.decides_at_once:
            return self._evaluate(step, *map(float, given))  # host waits for the device, on a GPU
        copy = torch.stack([_on_device(value, device) for value in given]).to(
            "cpu", non_blocking=True
        )
        earlier = self._pending
        self._pending = (step, copy, accelerator.record_event(device))
        return self._read(earlier)

    def flush(self) -> StepCheck:
        """Return the pending result, before a checkpoint is written.

        The host waits for the device.
        """
        earlier = self._pending
        self._pending = None
        return self._read(earlier)

    def restart(self, losses: Iterable[float]) -> None:
        """Restore the last good losses, oldest first.

        The pending result of a discarded step is dropped.
        """
        self.losses = deque(losses)
        self._pending = None

    def _read(self, pending: tuple[int, Tensor, Any] | None) -> StepCheck:
        if pending is None:
            return StepCheck()
        step, copy, arrived = pending
        arrived.synchronize()  # host waits for the step before
        return self._evaluate(step, *copy.tolist())

    def _evaluate(
        self,
        step: int,
        loss: float,
        norm: float,
        stop_votes: float,
        out_of_step: float,
        targets: float = 1.0,
    ) -> StepCheck:
        """Return what becomes of a step: it stands, is skipped, or ends the run."""
        if out_of_step != 0:
            why = (
                "a rank made a collective call that the others did not make, and theirs were taken"
                " for it"
            )
            fix = (
                "look for a collective inside of `if rank == 0`; distributed.debug: detail shows"
                " which it was"
            )
            raise RunError(
                f"the ranks did not meet in step {step}", where=f"step {step}", why=why, fix=fix
            )
        if not targets >= 0:  # where the loss is computed on a GPU: elsewhere it is told before
            raise bad_count(targets, f"step {step}")
        what = self._problem(step, loss, norm)
        if targets == 0:
            self.without_targets += 1
            what = f"no sample of step {step} has a valid target"
        if what is None:
            self.consecutive = 0
            self.losses.append(loss)
            while len(self.losses) > self.config.window:
                self.losses.popleft()
            return StepCheck(stop_votes > 0)
        self.consecutive += 1
        return StepCheck(stop_votes > 0, Anomaly(step, what, loss, norm, no_targets=targets == 0))

    def _problem(self, step: int, loss: float, norm: float) -> str | None:
        """Return what is wrong with a step's loss or norm; None if nothing is."""
        if not math.isfinite(loss):
            return f"the loss of step {step} is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm of step {step} is {norm}"
        factor = self.config.spike_factor
        if factor is None or len(self.losses) < self.config.window:
            return None
        usual = median(self.losses)
        if loss > factor * usual > 0:
            return (
                f"the loss of step {step} is {loss:.6g}, more than {factor:g} times the median"
                f" {usual:.6g}"
            )
        return None


def wrongly_computed(
    anomaly: Anomaly,
    loss: float,
    losses: tuple[Sequence[float], Sequence[float]],
    own: Collection[int],
) -> str:
    """Return a sentence on a step that was bad at first and good when it was computed again.

    Every rank calls it.

    A step follows from its weights, its samples and keyed random numbers: a processor computed
    wrongly, which recomputing mostly undoes (arXiv:2604.00726). `loss` is the step's, the second
    time; `losses` are those of each micro-batch, both times; `own` the numbers of the micro-batches
    that this rank runs.
    """
    changed = [
        number
        for number, (one, other) in enumerate(zip(*losses, strict=True))
        if repr(one) != repr(other)
    ]
    mine = (socket.gethostname(), [number for number in changed if number in own])
    ranks: list[tuple[str, list[int]]] = [mine]
    if world_size() > 1:
        ranks *= world_size()
        dist.all_gather_object(ranks, mine)
    involved = [f"rank {rank} ({host})" for rank, (host, numbers) in enumerate(ranks) if numbers]
    where = (
        "no loss has changed: it was in a backward pass, and the sum over ranks does not tell in"
        " whose"
    )
    if involved:
        which = ", ".join(map(str, changed))
        where = f"the loss of micro-batch {which} has changed, which is run by {listed(involved)}"
    return (
        f"{anomaly.what}; computed again from the same weights and samples, its loss is {loss:.6g}:"
        f" {where}"
    )
