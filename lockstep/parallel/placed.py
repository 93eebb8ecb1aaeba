"""`Placed`: what a strategy makes of a model, and all that the step knows about it.

A strategy decides where a micro-batch runs and where a parameter lies. It never decides what a step is: the samples,
the random numbers, the loss and its normalisation are the same for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.mesh import Layout
from lockstep.models.protocol import Objective
from lockstep.randomness import Cursor


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


class Ledger:
    """Loss sums and counts of a step's micro-batches, over all ranks.

    Each rank enters what it ran into its own slots; one small all-reduce adds zeros to them, which changes no bit; the
    slots are then summed in the order of the micro-batches. So the loss of a step is the same number on every topology.

    Args:
        slots: micro-batches in the step.
        device: of the losses.
        shared: whether other ranks hold some of the slots.
    """

    def __init__(self, slots: int, device: torch.device, *, shared: bool) -> None:
        # One more column carries the ranks' votes to stop, and the step that each is in: no traffic of their own.
        self._table = torch.zeros(2, slots + 1, dtype=torch.float64, device=device)
        self._shared = shared
        self._work: dist.Work | None = None
        self._closed = False

    @property
    def slots(self) -> int:
        """Micro-batches in the step, over all ranks."""
        return self._table.shape[1] - 1

    def enter(self, share: Share, loss_sum: Tensor, count: int | Tensor) -> None:
        """Write down one micro-batch; dummies count for nothing."""
        if share.real:
            self._table[0, share.index] = loss_sum.detach()
            self._table[1, share.index] = count

    def vote_to_stop(self) -> None:
        """This rank was asked to stop after this step."""
        self._table[0, -1] = 1.0

    def stamp(self, step: int) -> None:
        """Write down which step this is, to notice ranks that meet in different ones."""
        self._table[1, -1] = step

    def close(self) -> None:
        """All of this rank's micro-batches are entered: start the all-reduce, to run beside the last backward."""
        if self._shared and not self._closed:
            self._work = dist.all_reduce(self._table, async_op=True)
        self._closed = True

    def totals(self) -> tuple[Tensor, Tensor]:
        """(loss sum, number of valid targets) of the step, 0-dim float64 on the device, equal on all ranks."""
        self.close()
        if self._work is not None:
            self._work.wait()
            self._work = None
        sums = self._table[:, :-1].sum(dim=1)
        return sums[0], sums[1]

    @property
    def stop_votes(self) -> Tensor:
        """How many ranks voted to stop, after `totals`; 0-dim float64, equal on all ranks."""
        return self._table[0, -1]

    @property
    def stamps(self) -> Tensor:
        """The sum of the ranks' stamps, after `totals`; 0-dim float64, equal on all ranks if they met."""
        return self._table[1, -1]


ForwardBackward = Callable[[Sequence[Share], Ledger, float], None]
"""(this rank's shares of a step, the step's ledger, factor).

Adds `factor` × the gradient of the summed loss of the *whole* step to `.grad` of the placed parameters, reduced over
all ranks once `finish_gradients` has run.
"""

MicroStep = Callable[[Share, Ledger, float, bool], tuple[Tensor, int | Tensor]]
"""(share, ledger, factor, last): forward and backward of one micro-batch; `last` reduces the gradients over ranks.

Returns its summed loss, detached, and its number of valid targets.
"""

Evaluate = Callable[[Sequence[Share], Ledger], None]
"""(this rank's shares, ledger): forward passes only."""


@dataclass
class Placed:
    """A model as a rank holds it.

    Attributes:
        layout: where ranks stand.
        parts: the modules that this rank holds, unwrapped: what has parameters.
        parameters: canonical name → parameter (a DTensor where it is sharded), of this rank.
        aliases: canonical name → further names of the same parameter (tied weights).
        buffers: canonical name → persistent buffer, of this rank.
        objective: how a batch becomes a loss.
        cursor: what the model's random numbers depend on.
        assign: micro-batches in a step → (index, real) of those that this rank runs, in running order.
        forward_backward: see `ForwardBackward`.
        evaluate: see `Evaluate`.
        forward: the model's forward pass outside of the step, for sampling from it.
        micro_step: see `MicroStep`; None where micro-batches can't be run one at a time (pipelines).
        finish_gradients: what is left to do to `.grad` after the last backward.
        settle: told after each update whether it was skipped.
        check: told after each step how many were made; finds replicas that drift apart.
        norm_groups: process groups over which squared norms of the local gradients add up.
        counted: names whose gradients this rank counts in a norm; None: all. Of what several ranks of a norm group hold
            whole, one counts it.
        wants_data: whether this rank's shares need their batches.
        notices: lines to be said at start.
        said_later: lines that become known while it trains; who says them takes them out.
        state: tensors of the strategy's own that a checkpoint keeps (error feedback of a compression).
        reproducible: the step must be the same in every bit on any layout.
        num_parameters: of the whole model, tied ones counted once.
    """

    layout: Layout
    parts: list[nn.Module]
    parameters: dict[str, nn.Parameter]
    objective: Objective
    cursor: Cursor
    assign: Callable[[int], list[tuple[int, bool]]]
    forward_backward: ForwardBackward
    evaluate: Evaluate
    forward: Callable[..., Any]
    micro_step: MicroStep | None = None
    aliases: dict[str, list[str]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    finish_gradients: Callable[[], None] = lambda: None
    settle: Callable[[bool], None] = lambda _skipped: None
    check: Callable[[int], None] = lambda _steps: None
    norm_groups: list[dist.ProcessGroup] = field(default_factory=list)
    counted: set[str] | None = None
    wants_data: bool = True
    notices: list[str] = field(default_factory=list)
    said_later: list[str] = field(default_factory=list)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    reproducible: bool = False
    num_parameters: int = 0

    def ledger(self, slots: int) -> Ledger:
        """An empty ledger for a step (or a window of evaluation) of `slots` micro-batches."""
        return Ledger(slots, self.cursor.device, shared=self.layout.world_size > 1)

    def gradients(self) -> list[Tensor]:
        """The local pieces of all gradients that exist, in the parameters' order; writing to them changes `.grad`."""
        return [local(p.grad) for p in self.parameters.values() if p.grad is not None]

    def counted_gradients(self) -> list[Tensor]:
        """Those whose squares add up, over the norm groups, to that of the whole gradient: each is counted once."""
        counted = self.parameters if self.counted is None else self.counted
        return [local(p.grad) for name, p in self.parameters.items() if name in counted and p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def contiguous_shares(micro_batches: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
    """Runs of neighbours, as even as can be; a rank that is left with none runs one dummy."""
    first, last = (micro_batches * rank) // ranks, (micro_batches * (rank + 1)) // ranks
    return [(i, True) for i in range(first, last)] or [(0, False)]


def strided_shares(micro_batches: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
    """Every `ranks`-th one, the same number on each rank: the short ones run a dummy at the end."""
    rounds = -(-micro_batches // ranks)
    indices = [rank + k * ranks for k in range(rounds)]
    return [(i, True) if i < micro_batches else (i % micro_batches, False) for i in indices]
