"""What stands around a pass of a micro-batch, and the types of what runs passes.

A micro-batch goes through a stage twice, and under some schedules three times: forward (F), then
backward either at once (B), or first the gradients of inputs (I) and later those of weights (W).
Around each of them stands one list of objects for each stage, which is entered in order and left in
reverse:

    F          before → forward → after_forward
    B, I, W    before_backward → backward → after_backward
    B, W       → after: the gradients of weights are in `.grad`
    at last    after_step, once a step

Between the forward and the backward pass of one micro-batch, those of others run under a pipeline.
`Executor` (`lockstep.parallel.execution.executor`) calls the objects; `around_micro_batches`
(`lockstep.parallel.placement`) and `around_stage` (`lockstep.parallel.pipeline.placing`) make the
lists.

Tests: tests/parallel/execution/test_executor.py
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.data.batches import MicroBatch
from lockstep.parallel.execution.backward import SecondHalf
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator

ForwardBackward = Callable[[Sequence[MicroBatch], LossAccumulator, float], None]
"""(this rank's micro-batches of a step, the step's accumulator, factor).

Adds `factor` × the gradient of the summed loss of the *whole* step to `.grad` of the placed
parameters, reduced over all ranks once `finish_gradients` has run.
"""

# (what runs the passes, micro-batches, accumulator, factor): calls the first with the others, and
# does more around it.
AroundPasses = Callable[[ForwardBackward, Sequence[MicroBatch], LossAccumulator, float], None]

# (micro-batch, accumulator, factor, last): runs forward and backward; `last` reduces the gradients
# over ranks.
RunMicroBatch = Callable[[MicroBatch, LossAccumulator, float, bool], Loss]
Evaluate = Callable[[Sequence[MicroBatch], LossAccumulator], None]  # runs forward passes only
# → a clearer error for one of torch's; None: it knows none
Explain = Callable[[BaseException], Exception | None]


@dataclass
class MicroBatchPass:
    """A micro-batch's way through a stage: one object for its forward and its backward pass."""

    micro_batch: MicroBatch  # what runs
    micro_batches_per_step: int  # their number over all ranks
    factor: float  # what the summed loss is multiplied by before backward
    last: bool  # whether it is this rank's last of the step, whose gradients are reduced over ranks
    # Tensors that the backward pass begins at beside the loss, each with its gradient, for the
    # messages inside of it.
    further_roots: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stage: int = 0  # of the pipeline
    position: int = 0  # of the micro-batch in the run of the schedule
    # What one pass leaves for the next one of the same micro-batch; the executor's.
    inputs: tuple[Tensor, ...] = ()  # activations of the stage before
    outputs: tuple[Tensor, ...] = ()  # activations; of the last stage, the loss
    gradient: Tensor | None = None  # of the loss, which is its weight
    second_half: SecondHalf | None = None  # the gradients of weights, from I to W


class AroundMicroBatch:
    """The work before and after each pass; subclasses override what they need.

    One that may stand around the stages of a pipeline undoes in `after_forward` what it has changed
    in `before`, and in `after_backward` what it has changed in `before_backward`: other
    micro-batches run in between.
    """

    def before(self, passing: MicroBatchPass) -> None:
        """Prepare for the forward pass."""

    def after_forward(self, passing: MicroBatchPass) -> None:
        """Act on what the forward pass has done."""

    def before_backward(self, passing: MicroBatchPass) -> None:
        """Prepare for the backward pass, or for each of its halves."""

    def after_backward(self, passing: MicroBatchPass) -> None:
        """Act on what the backward pass, or one of its halves, has done."""

    def after(self, passing: MicroBatchPass) -> None:
        """Act on the gradients of weights, once they are there."""

    def after_step(self, micro_batches_per_step: int) -> None:
        """Act once a step, after this rank's last pass.

        All ranks call this, so collectives have their place here.
        """

    def failed(self, error: BaseException) -> Exception | None:
        """Clean up after a pass that raised.

        Return a clearer error to raise in its place, if there is one.
        """
        return None


def within(
    block: Callable[[], AbstractContextManager[None]], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that makes this call inside of a block, which is made anew each time."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with block():
            return call(*args, **kwargs)

    return called


@dataclass
class Explains(AroundMicroBatch):
    """A clearer error in place of one of torch's."""

    explain: Explain

    def failed(self, error: BaseException) -> Exception | None:
        return self.explain(error)


@contextmanager
def explained(explanations: Sequence[Explain]) -> Iterator[None]:
    """Raise the first explanation that there is of an error inside of the block."""
    try:
        yield
    except RuntimeError as error:
        attempts = (explain(error) for explain in explanations)
        clearer = next((each for each in attempts if each is not None), None)
        if clearer is None:
            raise
        raise clearer from error
