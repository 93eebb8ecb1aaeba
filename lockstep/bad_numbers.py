"""Numbers on which the loop decides, read without waiting: a loss that is no number, a spike, a vote to stop.

Assumes that loss, norm and votes are equal on all ranks, so that every rank decides the same at the same step.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lockstep.config import BadNumbersConfig
from lockstep.errors import RunError
from lockstep.parallel.numbers import Number


@dataclass(frozen=True)
class Anomaly:
    """A step whose loss or gradient norm is not usable.

    Attributes:
        step: counted from 1, as in a `StepRecord`.
        what: a sentence without a full stop.
    """

    step: int
    what: str
    loss: float
    grad_norm: float


class BadNumbersError(RunError):
    """Raised for an anomaly that is not simply skipped: the run stops, or goes back."""

    def __init__(self, anomaly: Anomaly, *, goes_back: bool = False, in_order: int = 1) -> None:
        self.anomaly, self.goes_back, self.in_order = anomaly, goes_back, in_order
        often = f", the last of {in_order} bad steps in order" if in_order > 1 else ""
        super().__init__(
            f"{anomaly.what}{often}",
            where=f"step {anomaly.step}",
            why="the loss overflowed, or a batch holds values that are no numbers",
            fix="lower training.learning_rate, lengthen training.warmup_steps, or look at that step's samples, which "
            "events.jsonl lists; training.bad_numbers.action: skip or rollback goes on without them",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), goes_back=self.goes_back, in_order=self.in_order), (self.anomaly,)


@dataclass
class Numbers:
    """What the host knows of a step (on a GPU: of the one before)."""

    stop: bool = False
    anomaly: Anomaly | None = None


def _device_of(numbers: Iterable[Number]) -> torch.device | None:
    """Of the first that is a tensor."""
    for value in numbers:  # a loop, for this is called in each step, and generators are slower
        if isinstance(value, Tensor):
            return value.device
    return None


@dataclass
class AnomalyDetector:
    """Reads each step's numbers and finds the bad ones.

    On the CPU they are read at once. On a GPU they are copied behind the step's work and read one step later, when the
    copy has long arrived, so that nothing waits; under `action: skip` the host waits for them, since the update does.

    Attributes:
        losses: the last good losses, oldest first; part of a run's state, since they decide about spikes.
        in_order: bad steps since the last good one.
    """

    config: BadNumbersConfig = field(default_factory=BadNumbersConfig)
    losses: deque[float] = field(default_factory=deque)
    in_order: int = 0
    _pending: tuple[int, Tensor, Any] | None = None

    @property
    def skips(self) -> bool:
        """Whether a bad step makes no update."""
        return self.config.action == "skip"

    def check(self, step: int, loss: Number, norm: Number, stop_votes: Number, out_of_step: Number) -> Numbers:
        """Take the numbers of `step`, after its gradients and before its update; return what is known by now.

        Args:
            out_of_step: 0 if all ranks reduced in this step.

        Raises:
            RunError: the ranks did not meet in this step.
        """
        given = (loss, norm, stop_votes, out_of_step)
        device = _device_of(given)
        if device is None or device.type == "cpu" or self.skips:
            return self._judge(step, *map(float, given))  # on a GPU the host waits for the device
        numbers = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in given])
        copy = numbers.to("cpu", non_blocking=True)
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        earlier, self._pending = self._pending, (step, copy, arrived)
        return self._read(earlier)

    def flush(self) -> Numbers:
        """Return what is still pending, before a checkpoint is made; the host waits for the device."""
        earlier, self._pending = self._pending, None
        return self._read(earlier)

    def restart(self, losses: Iterable[float]) -> None:
        """Go on from a checkpoint: take up its last good losses, and drop what is pending of steps that do not count.

        Args:
            losses: oldest first.
        """
        self.losses, self._pending = deque(losses), None

    def _read(self, pending: tuple[int, Tensor, Any] | None) -> Numbers:
        if pending is None:
            return Numbers()
        step, copy, arrived = pending
        arrived.synchronize()
        return self._judge(step, *copy.tolist())

    def _judge(self, step: int, loss: float, norm: float, stop_votes: float, out_of_step: float) -> Numbers:
        if out_of_step != 0:
            raise RunError(
                f"the ranks did not meet in step {step}",
                where=f"step {step}",
                why="a rank made a collective call that the others did not make, and theirs were taken for it",
                fix="look for a collective inside of `if rank == 0`; distributed.debug: detail shows which it was",
            )
        what = self._fault(step, loss, norm)
        if what is None:
            self.in_order = 0
            self.losses.append(loss)
            while len(self.losses) > self.config.window:
                self.losses.popleft()
            return Numbers(stop_votes > 0)
        self.in_order += 1
        return Numbers(stop_votes > 0, Anomaly(step, what, loss, norm))

    def _fault(self, step: int, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss of step {step} is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm of step {step} is {norm}"
        factor = self.config.spike_factor
        if factor is None or len(self.losses) < self.config.window:
            return None
        usual = median(self.losses)
        if loss > factor * usual > 0:
            return f"the loss of step {step} is {loss:.6g}, more than {factor:g} times the median {usual:.6g}"
        return None
