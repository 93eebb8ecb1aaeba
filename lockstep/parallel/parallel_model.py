"""`ParallelModel`: a model as a strategy has placed it on this rank, and all that the step knows about it.

A strategy decides where a micro-batch runs and where a parameter lies. It never decides what a step is: the samples,
the random numbers, the loss and its normalisation are the same for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.data.batches import MicroBatch
from lockstep.layout import Layout
from lockstep.models.protocol import Objective
from lockstep.parallel.gradient_hooks import GradientHooks
from lockstep.parallel.loss_accumulator import HostLossAccumulator, Loss, LossAccumulator, WorkersLossAccumulator
from lockstep.parallel.numbers import Number
from lockstep.randomness import RandomState

ForwardBackward = Callable[[Sequence[MicroBatch], LossAccumulator, float], None]
"""(this rank's micro-batches of a step, the step's accumulator, factor).

Adds `factor` × the gradient of the summed loss of the *whole* step to `.grad` of the placed parameters, reduced over
all ranks once `finish_gradients` has run.
"""

MicroStep = Callable[[MicroBatch, LossAccumulator, float, bool], Loss]
"""(micro-batch, accumulator, factor, last): runs forward and backward; `last` reduces the gradients over ranks."""

Evaluate = Callable[[Sequence[MicroBatch], LossAccumulator], None]
"""(this rank's micro-batches, accumulator): runs forward passes only."""


_NOTHING = nullcontext()  # one for all uses: making it is a call


def _always(_optimizer: Optimizer) -> AbstractContextManager[None]:
    return _NOTHING


@dataclass(frozen=True)
class Turn:
    """A model that is updated by itself: the only one, or under local updates each worker of this rank in turn.

    Attributes:
        to_mean: what its gradients are multiplied by to be those of its mean loss.
        norm: of that gradient, before clipping.
        gradients: as `ParallelModel.gradients` gives them; None: as they are once it is entered.
        entered: inside, its parameters and gradients are the placed ones, and the optimizer's state is its own.
    """

    to_mean: Number
    norm: Number
    gradients: list[Tensor] | None = None
    entered: Callable[[Optimizer], AbstractContextManager[None]] = _always


class Workers(Protocol):
    """Models that train by themselves and meet now and then (`lockstep.parallel.diloco`); every rank has some."""

    total: int
    consensus: dict[str, Tensor]

    def turns(self) -> list[Turn]:
        """The updates of this rank's workers in this step, once its backward passes are over."""

    def mean_norm(self, accumulator: LossAccumulator) -> Number:
        """Of all workers' gradients, after the accumulator's `totals`."""

    def advance(self, step: int, *, last: bool) -> None:
        """After each step: meet the others, if it is time."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of them."""

    def each(self, optimizer: Optimizer) -> Iterator[str]:
        """Worker by worker the prefix of its names in a checkpoint; its optimizer state is in place meanwhile."""

    def take_up(self) -> None:
        """Begin from the common model."""


@dataclass
class ParallelModel:
    """A model as a rank holds it.

    Attributes:
        layout: where ranks stand.
        parts: the modules that this rank holds, unwrapped: what has parameters.
        parameters: canonical name → parameter (a DTensor where it is sharded), of this rank.
        aliases: canonical name → further names of the same parameter (tied weights).
        buffers: canonical name → persistent buffer, of this rank.
        objective: how a batch becomes a loss.
        random_state: what the model's random numbers depend on.
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
        wants_data: whether this rank's micro-batches need their batches.
        log_lines: lines to be said at start.
        later_log_lines: lines that become known while it trains; who says them takes them out.
        state: tensors of the strategy's own that a checkpoint keeps (error feedback of a compression).
        workers: under local updates.
        reproducible: the step must be the same in every bit on any layout.
        gradient_hooks: hooks of the user's on parameters, to be called once a step.
        num_parameters: of the whole model, tied ones counted once.
    """

    layout: Layout
    parts: list[nn.Module]
    parameters: dict[str, nn.Parameter]
    objective: Objective
    random_state: RandomState
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
    log_lines: list[str] = field(default_factory=list)
    later_log_lines: list[str] = field(default_factory=list)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    workers: Workers | None = None
    reproducible: bool = False
    gradient_hooks: GradientHooks = field(default_factory=dict)
    num_parameters: int = 0

    def loss_accumulator(self, micro_batches_per_step: int) -> LossAccumulator:
        """Return an empty accumulator for a step, or for a window of an evaluation."""
        device, shared = self.random_state.device, self.layout.world_size > 1
        if self.workers is not None:
            return WorkersLossAccumulator(micro_batches_per_step, device, shared=shared, workers=self.workers.total)
        if device.type == "cpu":
            return HostLossAccumulator(micro_batches_per_step, shared=shared)
        return LossAccumulator(micro_batches_per_step, device, shared=shared)

    def kept(self) -> dict[str, Tensor]:
        """The model as it is evaluated, saved and compared over replicas: canonical name → parameter or buffer."""
        if self.workers is not None:
            return self.workers.consensus
        return {name: p.detach() for name, p in self.parameters.items()} | self.buffers

    def gradients(self) -> list[Tensor]:
        """The local pieces of all gradients that exist, in the parameters' order; writing to them changes `.grad`."""
        found = [p.grad for p in self.parameters.values() if p.grad is not None]
        return [local(grad) if isinstance(grad, DTensor) else grad for grad in found]  # in each step: no needless calls

    def counted_gradients(self) -> list[Tensor]:
        """Those whose squares add up, over the norm groups, to that of the whole gradient: each is counted once."""
        if self.counted is None:
            return self.gradients()
        return [local(p.grad) for name, p in self.parameters.items() if name in self.counted and p.grad is not None]

    def clear_gradients(self) -> None:
        """What `Optimizer.zero_grad` does, for all parameters, without what that tells torch's profiler."""
        for parameter in self.parameters.values():
            parameter.grad = None


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assign_contiguous(micro_batches: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
    """Runs of neighbours, as even as can be; a rank that is left with none runs one dummy."""
    first, last = (micro_batches * rank) // ranks, (micro_batches * (rank + 1)) // ranks
    return [(i, True) for i in range(first, last)] or [(0, False)]


def assign_strided(micro_batches: int, rank: int, ranks: int) -> list[tuple[int, bool]]:
    """Every `ranks`-th one, the same number on each rank: the short ones run a dummy at the end."""
    rounds = -(-micro_batches // ranks)
    indices = [rank + k * ranks for k in range(rounds)]
    return [(i, True) if i < micro_batches else (i % micro_batches, False) for i in indices]
