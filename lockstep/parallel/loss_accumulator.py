"""Sums the losses and valid targets of a step's micro-batches over all ranks.

One small all-reduce adds zeros to what each rank wrote, which changes no bit; micro-batches are
then summed in order, so the loss is the same number on every topology. Two more columns carry the
number of token ids that were read, votes to stop, and the step that a rank is in.

Step 7 has three micro-batches of four tokens. Rank 0 runs 0 and 2, rank 1 runs 1 and votes to stop:

                 losses of 0, 1, 2   tokens   votes       valid targets      marks
    rank 0      [6.0, 0.0, 1.0,       8.0,     0.0]      [3.0, 0.0, 1.0,     0.0, 7.0]
    rank 1      [0.0, 8.0, 0.0,       4.0,     1.0]      [0.0, 4.0, 0.0,     0.0, 7.0]
    all ranks   [6.0, 8.0, 1.0,       12.0,    1.0]      [3.0, 4.0, 1.0,     0.0, 14.0]

The loss is (6 + 8 + 1) / (3 + 4 + 1) = 1.875; 14 is twice 7, so both ranks are in one step.

Where DDP adds up gradients on the CPU, the sums travel with these (`CarriedFigures`): an all-reduce
of their own is a third of a step of 1 ms.

Tests: tests/parallel/test_loss_accumulator.py, tests/parallel/test_carried_figures.py,
    tests/parallel/test_worked_examples.py
"""

import math
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_float
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.errors import RunError

# Numbers of a step are tensors where reading them would wait for the device, plain floats on the
# CPU: a 0-dim tensor costs ten to fifty times what a float does. The functions below calculate with
# both.
Number = float | Tensor


def number(tensor: Tensor) -> Number:
    """Return a 0-dim tensor as a float if it is on the CPU, else unchanged."""
    return tensor.item() if tensor.device.type == "cpu" else tensor


def at_most(value: Number, bound: float) -> Number:
    """Return the smaller of the two."""
    return value.clamp(max=bound) if isinstance(value, Tensor) else min(value, bound)


def mean_of(total: Number, count: Number) -> Number:
    """Return total / count; nan for 0/0, as torch's losses do where every target is ignored."""
    return total / count if isinstance(count, Tensor) or count else math.nan


def divisor_of(count: Number) -> Number:
    """Return the number to divide sums by: the count, or 1 where nothing counts.

    Sums are zero there, and a gradient of 0/0 would not be a number. A count below 1 stays: it is a
    sum of small weights.
    """
    if isinstance(count, Tensor):
        return torch.where(count == 0, 1.0, count)
    return count or 1.0


def inverse(value: Number) -> Number:
    """Return 1 / `value`; infinity where it is 0."""
    if isinstance(value, Tensor):
        return value.reciprocal()
    return 1.0 / value if value else math.inf


def exceeds(value: Number, bound: float) -> Number:
    """Return 1 where `value` > `bound`, else 0."""
    return (value > bound).float() if isinstance(value, Tensor) else float(value > bound)


def tensor_of(value: Number) -> Tensor:
    """Return a 0-dim float32 tensor on the device that the number came from."""
    return (
        value.float()
        if isinstance(value, Tensor)
        else torch.scalar_tensor(value, dtype=torch.float32)
    )


def bad_count(count: float, where: str) -> RunError:
    """Return the error about a count of valid targets, or a sum of weights, that is not a count."""
    return RunError(
        f"the number of valid targets, or the sum of their weights, is {count}",
        where=where,
        why="the loss of a step is divided by it, and a sample's part in it is its weight",
        fix="let weights be finite and 0 or more; count(batch) returns their sum",
    )


class Loss(NamedTuple):
    """The summed loss of a micro-batch, as the product of two factors."""

    value: Tensor  # 0-dim float32, with its graph
    # what it is multiplied by to be the sum: the number of valid targets where it is a mean, else 1
    times: int
    targets: int | Tensor  # how many are valid

    def summed(self) -> Tensor:
        value = self.value.detach()
        return value if self.times == 1 else value * self.times


class LossAccumulator:
    """Accumulates the losses and target counts of one step on the device.

    The host does not wait for it.

    `shared`: other ranks run some of the micro-batches. `adds`: this rank's count; else another
    runs the same ones.
    """

    def __init__(
        self, micro_batches_per_step: int, device: torch.device, *, shared: bool, adds: bool = True
    ) -> None:
        self._adds = adds
        self.micro_batches_per_step = micro_batches_per_step
        self._shared = shared
        self._work: dist.Work | None = None
        self._started = False
        self._begin(micro_batches_per_step + 2, device)

    def _begin(self, columns: int, device: torch.device) -> None:
        # float64 holds sums of float32 losses, and whole numbers up to 2⁵³, as they are.
        self._table = torch.zeros(2, columns, dtype=torch.float64, device=device)

    def add(self, micro_batch: MicroBatch, loss: Loss) -> None:
        """Add the loss and the targets of one micro-batch; dummies count for nothing."""
        if micro_batch.real and self._adds:
            self._table[0, micro_batch.index] = loss.summed()
            self._table[1, micro_batch.index] = loss.targets
            if micro_batch.tokens:
                self._table[0, -2] += micro_batch.tokens

    def watch(self, watcher: Callable[[MicroBatch, Loss], None]) -> None:
        """Call `watcher` with each loss, before it is added."""
        add = self.add

        def watched_add(micro_batch: MicroBatch, loss: Loss) -> None:
            watcher(micro_batch, loss)
            add(micro_batch, loss)

        self.add = watched_add  # type: ignore[method-assign]

    def vote_to_stop(self) -> None:
        """Tell all ranks, with the next reduction, that this rank wants to stop after this step."""
        self._table[0, -1] = 1.0

    def mark_step(self, step: int) -> None:
        """Write down which step this is, to detect ranks that reduce in different steps."""
        self._table[1, -1] = step

    def before_last_backward(self) -> list[tuple[Tensor, Tensor]]:
        """Let the sums go to the other ranks, beside the step's last backward pass here.

        All micro-batches of this rank are added. Return tensors at which that pass is to begin
        beside the loss, each with its gradient.
        """
        self.start_reduce()
        return []

    def start_reduce(self) -> None:
        """Start the all-reduce."""
        if self._shared and not self._started:
            # gloo's all-to-all takes two fifths of the time, but gloo pairs like calls only. A
            # stray collective of one rank is an all-reduce most often: it would pair with this one,
            # and the step marks detect it.
            self._work = dist.all_reduce(self._table, async_op=True)
        self._started = True

    def totals(self) -> tuple[Number, Number]:
        """Return (loss sum, number of valid targets) of the step, float64, equal on all ranks."""
        self._finish()
        sums = self._table[:, :-2].sum(dim=1)
        return sums[0], sums[1]

    def losses(self) -> list[float]:
        """Return the summed loss of each micro-batch of the step, after `totals`.

        Equal on all ranks.
        """
        return self._table[0, :-2].tolist()  # host waits for the device

    def without_targets(self) -> list[int]:
        """Return the micro-batches without a valid target, after `totals`.

        None where the host would have to wait.
        """
        return []

    @property
    def tokens_read(self) -> Number:
        """Number of token ids in the step, after `totals`; equal on all ranks."""
        return number(self._table[0, -2])

    @property
    def stop_votes(self) -> Number:
        """Number of ranks that voted to stop; known after `totals`, equal on all ranks."""
        return number(self._table[0, -1])

    @property
    def step_marks(self) -> Number:
        """Sum of the steps that the ranks are in, after `totals`.

        Equal on all ranks if they reduced together.
        """
        return number(self._table[1, -1])

    def _finish(self) -> None:
        self.start_reduce()
        if self._work is not None:
            self._work.wait()
            self._work = None


class HostLossAccumulator(LossAccumulator):
    """Accumulates in Python numbers where losses are computed on the CPU.

    The all-reduce alone needs a tensor.
    """

    def __init__(self, micro_batches_per_step: int, *, shared: bool, adds: bool = True) -> None:
        super().__init__(micro_batches_per_step, torch.device("cpu"), shared=shared, adds=adds)

    def _begin(self, columns: int, device: torch.device) -> None:
        self._losses = [0.0] * columns
        self._counts = [0.0] * columns

    def add(self, micro_batch: MicroBatch, loss: Loss) -> None:
        if micro_batch.real and self._adds:
            value = loss.value.item()
            count = float(loss.targets)
            if not count >= 0:
                raise bad_count(count, f"micro-batch {micro_batch.index} of the step")
            # Rounded as the product of a float32 tensor is.
            self._losses[micro_batch.index] = (
                value if loss.times == 1 else c_float(value * loss.times).value
            )
            self._counts[micro_batch.index] = count
            self._losses[-2] += micro_batch.tokens

    def vote_to_stop(self) -> None:
        self._losses[-1] = 1.0

    def mark_step(self, step: int) -> None:
        self._counts[-1] = step

    def start_reduce(self) -> None:
        if self._shared and not self._started:
            self._table = torch.tensor([self._losses, self._counts], dtype=torch.float64)
        super().start_reduce()

    def totals(self) -> tuple[Number, Number]:
        self._finish()
        if self._shared:
            self._losses, self._counts = self._table.tolist()
        return sum(self._losses[:-2]), sum(self._counts[:-2])

    def losses(self) -> list[float]:
        return self._losses[:-2]

    def without_targets(self) -> list[int]:
        return [index for index, count in enumerate(self._counts[:-2]) if count == 0]

    @property
    def tokens_read(self) -> Number:
        return self._losses[-2]

    @property
    def stop_votes(self) -> Number:
        return self._losses[-1]

    @property
    def step_marks(self) -> Number:
        return self._counts[-1]


_ROOM = 64  # micro-batches of a step; of more, the sums take an all-reduce of their own


class CarriedFigures(nn.Module):
    """One more parameter in DDP's buckets, whose gradient holds the figures of a step.

    No optimizer knows it. DDP divides gradients by the number of ranks and adds them, in float32.
    Nothing is rounded on the way: that number is a power of two, and each figure has a place of its
    own, in which all ranks but one have a zero. It is written as the sum of two float32 numbers.

        losses of 0, 1, …    targets of 0, 1, …    tokens, votes, step of rank 0    of rank 1 …

    Args:
        rank: the number of this one.
        ranks: how many there are, a power of two.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._own = 2 * _ROOM + 3 * rank  # place of what is this rank's
        self._places = 2 * _ROOM + 3 * ranks
        self.figures = nn.Parameter(torch.zeros(2 * self._places))
        # One tensor for all steps, and its memory as NumPy sees it: NumPy's calls take a third of
        # the time of torch's.
        self._gradient = torch.zeros(2 * self._places)
        self._near, self._rest = self._gradient.numpy().reshape(2, self._places)

    def send(self, losses: list[float], counts: list[float]) -> tuple[bool, Tensor, Tensor]:
        """Prepare figures of this rank for the backward pass that comes next.

        Return whether there is room for them; and a tensor at which that pass has to begin, beside
        the loss, and its gradient: DDP waits for them in any case. The lists are those of
        `HostLossAccumulator`.
        """
        micro_batches = len(losses) - 2
        has_room = micro_batches <= _ROOM
        self._gradient.zero_()
        if has_room:
            near = array("f", [*losses, *counts])  # rounds to float32
            self._write(self._near, near, micro_batches)
            rest = [
                exact - rounded for exact, rounded in zip((*losses, *counts), near, strict=True)
            ]
            if any(rest):
                # of what is not a number, nothing is left
                finite = [each if math.isfinite(each) else 0.0 for each in rest]
                self._write(self._rest, finite, micro_batches)
        self.figures.grad = None
        # the way in which every gradient comes to DDP
        root = self.figures.view_as(self.figures)
        return has_room, root, self._gradient

    def _write(self, row: Any, figures: Sequence[float], micro_batches: int) -> None:
        """Write losses, tokens, votes; counts, nothing, the step, each into its place of a row."""
        tokens, votes = figures[micro_batches : micro_batches + 2]
        row[:micro_batches] = figures[:micro_batches]
        row[_ROOM : _ROOM + micro_batches] = figures[micro_batches + 2 : -2]
        row[self._own : self._own + 3] = tokens, votes, figures[-1]

    def received(self, micro_batches: int) -> tuple[list[float], list[float]]:
        """Return the lists that `send` takes, summed over all ranks, after the backward pass."""
        gradient = self.figures.grad
        assert gradient is not None
        near, rest = gradient.numpy().reshape(2, self._places)
        if rest.any():
            near = near.astype(np.float64) + rest
        # DDP has divided by the number of ranks
        losses = [each * self._ranks for each in near[:micro_batches].tolist()]
        counts = [each * self._ranks for each in near[_ROOM : _ROOM + micro_batches].tolist()]
        of_ranks = near[2 * _ROOM :].tolist()
        tokens, votes, steps = (self._ranks * sum(of_ranks[kind::3]) for kind in range(3))
        return [*losses, tokens, votes], [*counts, 0.0, steps]


class CarriedLossAccumulator(HostLossAccumulator):
    """Accumulates losses that other ranks get with the gradients, where there is room."""

    def __init__(
        self, micro_batches_per_step: int, *, carrier: CarriedFigures, adds: bool = True
    ) -> None:
        super().__init__(micro_batches_per_step, shared=True, adds=adds)
        self._carrier = carrier
        self._is_carried = False

    def before_last_backward(self) -> list[tuple[Tensor, Tensor]]:
        self._is_carried, root, gradient = self._carrier.send(self._losses, self._counts)
        if not self._is_carried:
            self.start_reduce()
        return [(root, gradient)]

    def totals(self) -> tuple[Number, Number]:
        if self._is_carried:
            self._losses, self._counts = self._carrier.received(self.micro_batches_per_step)
            self._is_carried = False
            self._shared = False  # nothing is left to exchange
        return super().totals()
