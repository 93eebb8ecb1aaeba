"""Loss sums and counts of a step's micro-batches, over all ranks.

Each rank enters what it ran into its own slots; one small all-reduce adds zeros to them, which changes no bit; the
slots are then summed in the order of the micro-batches. So the loss of a step is the same number on every topology.
One more column carries the ranks' votes to stop, and the step that each is in: no traffic of their own.
"""

from ctypes import c_float
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.numbers import Number, number


@dataclass(frozen=True)
class Share:
    """One micro-batch as a rank runs it.

    Attributes:
        index: its place in the step's global list of micro-batches.
        batch: the samples on this rank's device; None where this rank needs none of them (middle pipeline stages).
        real: False for a zero-weight dummy, which keeps a rank in step that is short of a micro-batch.
    """

    index: int
    batch: Any
    real: bool = True


class Loss(NamedTuple):
    """A micro-batch's summed loss, as the product of two factors.

    Attributes:
        value: 0-dim float32, with its graph.
        times: what it is multiplied by to be the sum: the number of valid targets where it is a mean, else 1.
        targets: how many are valid.
    """

    value: Tensor
    times: int
    targets: int | Tensor

    def summed(self) -> Tensor:
        """The sum, detached."""
        value = self.value.detach()
        return value if self.times == 1 else value * self.times


class Ledger:
    """One step's, kept on the device: nothing waits for it.

    Args:
        slots: micro-batches in the step, over all ranks.
        device: of the losses.
        shared: whether other ranks hold some of the slots.
    """

    def __init__(self, slots: int, device: torch.device, *, shared: bool) -> None:
        self.slots = slots
        self._shared = shared
        self._work: dist.Work | None = None
        self._closed = False
        self._begin(slots + 1, device)

    def _begin(self, columns: int, device: torch.device) -> None:
        self._table = torch.zeros(2, columns, dtype=torch.float64, device=device)

    def enter(self, share: Share, loss: Loss) -> None:
        """Write down one micro-batch; dummies count for nothing."""
        if share.real:
            self._table[0, share.index] = loss.summed()
            self._table[1, share.index] = loss.targets

    def vote_to_stop(self) -> None:
        """This rank was asked to stop after this step."""
        self._table[0, -1] = 1.0

    def stamp(self, step: int) -> None:
        """Write down which step this is, to notice ranks that meet in different ones."""
        self._table[1, -1] = step

    def close(self) -> None:
        """All of this rank's micro-batches are entered: start the all-reduce, to run beside the last backward."""
        if self._shared and not self._closed:
            # gloo's all-to-all takes two fifths of the time. But it pairs like calls only, and what one rank calls and
            # the others do not is an all-reduce most often: that one comes in here, and the stamps tell.
            self._work = dist.all_reduce(self._table, async_op=True)
        self._closed = True

    def totals(self) -> tuple[Number, Number]:
        """(loss sum, number of valid targets) of the step, float64, equal on all ranks."""
        self._finish()
        sums = self._table[:, :-1].sum(dim=1)
        return sums[0], sums[1]

    @property
    def stop_votes(self) -> Number:
        """How many ranks voted to stop, after `totals`; equal on all ranks."""
        return self._table[0, -1]

    @property
    def stamps(self) -> Number:
        """The sum of the ranks' stamps, after `totals`; equal on all ranks if they met."""
        return self._table[1, -1]

    def _finish(self) -> None:
        self.close()
        if self._work is not None:
            self._work.wait()
            self._work = None


class HostLedger(Ledger):
    """The same where losses are made on the CPU: a few Python numbers, and a tensor for what other ranks must know."""

    def __init__(self, slots: int, *, shared: bool) -> None:
        super().__init__(slots, torch.device("cpu"), shared=shared)

    def _begin(self, columns: int, device: torch.device) -> None:
        self._losses, self._counts = [0.0] * columns, [0.0] * columns

    def enter(self, share: Share, loss: Loss) -> None:
        if share.real:
            self._losses[share.index] = _product(loss.value.item(), loss.times)
            self._counts[share.index] = float(loss.targets)

    def vote_to_stop(self) -> None:
        self._losses[-1] = 1.0

    def stamp(self, step: int) -> None:
        self._counts[-1] = step

    def close(self) -> None:
        if self._shared and not self._closed:
            self._table = torch.tensor([self._losses, self._counts], dtype=torch.float64)
        super().close()

    def totals(self) -> tuple[Number, Number]:
        self._finish()
        if self._shared:
            self._losses, self._counts = self._table.tolist()
        return sum(self._losses[:-1]), sum(self._counts[:-1])

    @property
    def stop_votes(self) -> Number:
        return self._losses[-1]

    @property
    def stamps(self) -> Number:
        return self._counts[-1]


def _product(value: float, times: int) -> float:
    """Rounded as that of a float32 tensor is."""
    return value if times == 1 else c_float(value * times).value


class WorkersLedger(Ledger):
    """The same under local updates: each worker notes its gradient's norm, which is known after its backward pass.

    Args:
        workers: over all ranks.
    """

    def __init__(self, slots: int, device: torch.device, *, shared: bool, workers: int) -> None:
        super().__init__(slots + workers, device, shared=shared)
        self.slots = slots

    def note(self, worker: int, norm: Tensor) -> None:
        """A worker's gradient has this norm."""
        self._table[0, self.slots + worker] = norm
        self._table[1, self.slots + worker] = 1.0

    def close(self) -> None:
        """Norms are still to come: the all-reduce starts with `totals`."""

    def totals(self) -> tuple[Number, Number]:
        super().close()
        self._finish()
        sums = self._table[:, : self.slots].sum(dim=1)
        return number(sums[0]), number(sums[1])

    @property
    def mean_norm(self) -> Number:
        """Of the workers' gradients, after `totals`; equal on all ranks."""
        norms, noted = self._table[:, self.slots : -1].sum(dim=1)
        return number(norms / noted.clamp(min=1))

    @property
    def stop_votes(self) -> Number:
        return number(self._table[0, -1])

    @property
    def stamps(self) -> Number:
        return number(self._table[1, -1])
