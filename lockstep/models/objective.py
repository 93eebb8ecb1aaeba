"""The way from a batch to a loss, which each micro-batch takes.

    inputs     the batch → the arguments of forward
    loss       outputs and batch → a number: by a loss function, by the model, or in its outputs
    count      the batch → the number of valid targets

An `Objective` has all three. Losses become sums over valid targets, beside their counts, so that
micro-batches and ranks can be added up: the step divides once, by the count of all. It is given
functions, and no model. Those are made in `forward_arguments.py` (inputs) and `loss_reductions.py`
(a loss function, or the loss in a model's outputs); which of them a model has is read in
`protocol.py`.

Tests: tests/models/test_offers.py, tests/models/test_builders.py, tests/models/test_documented.py
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.batch_parts import IGNORED_TARGET, num_samples, targets_of
from lockstep.models.chain import LOSS_TARGETS
from lockstep.models.forward_arguments import Inputs, outputs_of
from lockstep.models.left_out import refuse_uneven, stop_gradients_unless, sum_of_outputs
from lockstep.models.observed import LossCalls
from lockstep.models.out_of_range import warn_of_odd_targets
from lockstep.torch_compat.fake_tensors import FakeTensor


@dataclass
class Observed:
    """Observations about a loss when it was last computed."""

    # whether torch's loss functions showed its divisor; None: not computed in this process
    told: bool | None = None
    accumulates: bool = False  # whether the step that runs has several micro-batches
    has_odd_targets: bool = False  # some are not probabilities, and a warning has said so
    # whether to look for auxiliary terms and divisors, while losses are compared
    looks: bool = False
    # whether terms depend on how a batch is divided: the load balancing of experts
    auxiliary: bool = False
    divisors: tuple[float, ...] = ()  # of its terms, and the count that was used; empty if unknown

    def begin_step(self, micro_batches_per_step: int) -> None:
        """Say into how many micro-batches the samples are cut that follow."""
        self.accumulates = micro_batches_per_step > 1

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look for auxiliary terms and divisors in the block, where losses are compared."""
        self.looks = True
        try:
            yield
        finally:
            self.looks = False


TakeOutputs = Callable[[Any, Any], tuple[Tensor, int, int | Tensor] | None]
"""Maps (outputs, batch) to (loss, times, count) in place of the objective's own factors.

See `Objective.factors`. A result of None leaves them to the objective.
"""


@dataclass
class Tap:
    """Shows the model's outputs for each micro-batch to metrics and predictions."""

    # called before the loss is computed, where the outputs are; None: nobody asks
    take: TakeOutputs | None = None

    @contextmanager
    def opened(self, take: TakeOutputs) -> Iterator[None]:
        """Call `take` for each micro-batch in the block."""
        before = self.take
        self.take = take
        try:
            yield
        finally:
            self.take = before


@dataclass(frozen=True)
class Objective:
    """The way from a batch to a loss."""

    inputs: Inputs
    # (outputs, batch) → 0-dim float32 tensor, the sum over the batch's valid targets, or their mean
    loss: Callable[[Any, Any], Tensor]
    # batch → number of valid targets, an int or a 0-dim tensor; not used where the loss is observed
    # and shows it
    count: Callable[[Any], int | Tensor]
    is_mean: bool = False  # whether `loss` is a mean
    in_outputs: bool = False  # the loss is computed by the model's forward pass
    observed: Observed | None = None  # observations of a mean without a declared count
    # reject an unknown divisor, unless a comparison shows a mean over samples
    must_be_told: bool = False
    of_model: bool = False  # whether `loss` is the model's own method
    # the loss function, if it is one, whose weights train with the model's
    module: nn.Module | None = None
    function: str | None = None  # the name of the loss function, if it is a plain one
    tap: Tap = field(default_factory=Tap)
    # outputs of this rank → outputs for the whole batch, where ranks share its sequences
    gather_outputs: Callable[[Any], Any] = lambda outputs: outputs

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward pass, which returns outputs where somebody asks."""
        args, kwargs = self.inputs(batch)
        if self.tap.take is not None:
            kwargs.pop(LOSS_TARGETS, None)
        return args, kwargs

    def of(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, int, int | Tensor]:
        """Run one forward pass: (loss, times, number of valid targets), as in `factors`."""
        args, kwargs = self.arguments(batch)
        if self.observed is None or not self.in_outputs:
            outputs = outputs_of(model, args, kwargs, batch, has_loss=not self.in_outputs)
            return self.factors(outputs, batch)
        with LossCalls() as calls:
            outputs = outputs_of(model, args, kwargs, batch, has_loss=False)
        return self.factors(outputs, batch, calls)

    def summed(self, outputs: Any, batch: Any) -> Tensor:
        """Return the sum over the batch's valid targets, a 0-dim float32 tensor."""
        loss, times, _count = self.factors(outputs, batch)
        return loss if times == 1 else loss * times

    def factors(
        self, outputs: Any, batch: Any, calls: LossCalls | None = None
    ) -> tuple[Tensor, int, int | Tensor]:
        """Return (loss, times, number of valid targets): the summed loss is loss × times.

        A mean therefore needs no multiplication in the graph: the initial gradient of backward is
        multiplied instead. `calls` are those of torch's loss functions in the forward pass, if the
        loss was computed there.

        A mean of 2.5 over 4 valid targets is (2.5, 4, 4), and a sum of 10 over them (10, 1, 4). On
        a GPU the count is not read: the sum is computed there, (2.5 × count, 1, count).
        """
        if self.tap.take is not None:
            of_tap = self.tap.take(self.gather_outputs(outputs), batch)
            if of_tap is not None:
                return of_tap
        if self.observed is None:
            loss = self.loss(outputs, batch)
            count = self.count(batch)
        else:
            loss, count = self._observe(self.observed, outputs, batch, calls)
        if not self.is_mean:
            return loss, 1, count
        if isinstance(count, int) and count > 0:
            return loss, count, count
        n = torch.as_tensor(count, device=loss.device)
        # A batch without a valid target has the mean 0/0: its sum is 0, and so are its gradients,
        # which torch's own loss functions see to; those of a mean that is written by hand are not
        # numbers. In `lockstep plan`, where nothing has values, it has some.
        if n.device.type != "cpu" or not (isinstance(n, FakeTensor) or n > 0):
            if not self.in_outputs:
                stop_gradients_unless(n > 0, outputs)
            elif n.device.type == "cpu" and (self.observed is None or not self.observed.told):
                loss = sum_of_outputs(outputs, loss)
        return torch.where(n > 0, loss * n, 0.0), 1, count

    def _observe(
        self, observed: Observed, outputs: Any, batch: Any, calls: LossCalls | None
    ) -> tuple[Tensor, int | Tensor]:
        """Return the loss and its divisor.

        The divisor is the one that torch's loss functions show, or else the declared count.
        """
        with LossCalls() if calls is None else nullcontext(calls) as loss_calls:
            loss = self.loss(outputs, batch)
        shown = loss_calls.count(batch, num_samples)
        count = self.count(batch) if shown is None else shown
        observed.told = shown is not None
        if loss_calls.odd_targets is not None and not observed.has_odd_targets:
            observed.has_odd_targets = True
            warn_of_odd_targets(loss_calls.odd_targets, batch)
        if observed.accumulates and loss_calls.uneven:
            refuse_uneven(loss_calls.uneven)
        if observed.looks:
            observed.auxiliary = _has_auxiliary_losses(outputs)
            divisors = loss_calls.divisors()
            observed.divisors = (*divisors, float(count)) if divisors else ()
        return loss, count

    def estimate(self, batch: Any) -> int | Tensor:
        """Estimate the number of valid targets before the forward pass.

        It is the provisional divisor of the backward pass.

        A batch without a valid target says nothing about the others, so its samples are counted.
        """
        # host waits for the device, as the caller does
        return self._estimate(batch) or num_samples(batch)

    def _estimate(self, batch: Any) -> int | Tensor:
        targets = targets_of(batch, default=None) if self.observed is not None else None
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            valid: Tensor = targets != IGNORED_TARGET
            return valid.sum()
        return self.count(batch)


def _has_auxiliary_losses(outputs: Any) -> bool:
    """Return whether outputs hold losses that balance experts, by the library's names for them."""
    if not isinstance(outputs, Mapping):
        return False
    endings = ("aux_loss", "aux_losses", "z_loss", "z_losses")
    return any(str(key).endswith(endings) and value is not None for key, value in outputs.items())
