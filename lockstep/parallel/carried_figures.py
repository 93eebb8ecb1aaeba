"""Lets DDP's gradients carry a step's losses and counts to the other ranks.

A step's sums (`lockstep.parallel.loss_accumulator`) take an all-reduce of their own, which on two
ranks of gloo is a third of a step of 1 ms. A bucket of gradients has room: one more parameter, that
no optimizer knows, is put into it, and its "gradient" is what this rank has to say.

DDP divides float32 numbers by the number of ranks and adds them. Nothing is rounded on the way:
that number is a power of two, and each slot holds a float32 of one rank, beside zeros of the
others, or whole numbers whose sum is below 2^24. With two micro-batches (and room for two), rank 0
runs the first, of 5,000 tokens, and rank 1 the second, of 300 tokens, in step 7:

              losses      counts      what is left   tokens          votes   step
    rank 0    6.0, 0.0    3.0, 0.0    0.0, 0.0       904, 1, 0, 0    0       7, 0, 0, 0
    rank 1    0.0, 8.0    0.0, 4.0    0.0, 0.0       300, 0, 0, 0    1       7, 0, 0, 0
    sum       6.0, 8.0    3.0, 4.0    0.0, 0.0       1204, 1, 0, 0   1       14, 0, 0, 0

Tokens and steps are written in base 4096, lowest digit first: 904 + 4096 = 5000, and 1204 + 4096 =
5300. A count that is no float32 is the sum of two.

Tests: tests/parallel/test_carried_figures.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.loss_accumulator import HostLossAccumulator, Number
from lockstep.parallel.passes import AroundMicroBatch, MicroBatchPass

_ROOM = 64  # micro-batches of a step; of more, the sums take an all-reduce of their own
_BASE = 4096
_DIGITS = 4  # 2^48 tokens
_AFTER = 3 * _ROOM  # where the numbers of the whole step begin
_SLOTS = _AFTER + 2 * _DIGITS + 1
_NAME = "lockstep_figures"


class CarriedFigures(AroundMicroBatch):
    """One more parameter in DDP's buckets, whose gradient holds the figures of a step.

    Args:
        ranks: their number, a power of two.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parameter = nn.Parameter(torch.zeros(_SLOTS))
        self._nothing = torch.zeros(_SLOTS)
        self._figures = self._nothing

    @contextmanager
    def within(self, model: nn.Module) -> Iterator[None]:
        """Make the parameter the model's last one in the block, in which DDP looks for them."""
        holder = nn.Module()
        holder.register_parameter("figures", self._parameter)
        model.add_module(_NAME, holder)
        try:
            yield
        finally:
            delattr(model, _NAME)

    def load(self, losses: list[float], counts: list[float]) -> bool:
        """Take the figures of a step, to send them with its last backward pass.

        Return whether there is room for them.

        Args:
            losses: of each micro-batch, then the tokens and the votes to stop.
            counts: of each micro-batch, then nothing, and the step.
        """
        *own, tokens, votes = losses
        *targets, _, step = counts
        if len(own) > _ROOM:
            return False
        room = [0.0] * (_ROOM - len(own))
        nearest = [c_float(count).value for count in targets]
        left = [count - near for count, near in zip(targets, nearest, strict=True)]
        figures = [*own, *room, *nearest, *room, *left, *room]
        self._figures = torch.tensor([*figures, *_digits(tokens), *_digits(step), votes])
        return True

    def before_backward(self, run: MicroBatchPass) -> None:
        """Give the parameter its gradient, for which DDP waits."""
        if run.last:
            self._parameter.grad = None
            run.further_roots.append(_Carry.apply(self._parameter, self._figures))  # type: ignore[no-untyped-call]
            self._figures = self._nothing

    def take(self, micro_batches: int) -> tuple[list[float], list[float]]:
        """Return losses and counts as `load` takes them, of all ranks."""
        gradient = self._parameter.grad
        assert gradient is not None
        sums = (gradient.double() * self._ranks).tolist()
        losses, nearest, left = (sums[_ROOM * k :][:micro_batches] for k in range(3))
        tokens = _number(sums[_AFTER:][:_DIGITS])
        step = _number(sums[_AFTER + _DIGITS :][:_DIGITS])
        counts = [near + rest for near, rest in zip(nearest, left, strict=True)]
        return [*losses, tokens, sums[-1]], [*counts, 0.0, step]


class _Carry(torch.autograd.Function):
    """(parameter, figures) → 0, with the figures as the parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, figures: Tensor) -> Tensor:
        ctx.figures = figures
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.figures, None


def _digits(number: float) -> list[float]:
    whole = int(number)
    return [float(whole // _BASE**k % _BASE) for k in range(_DIGITS)]


def _number(digits: list[float]) -> float:
    return sum(digit * _BASE**k for k, digit in enumerate(digits))


class CarriedLossAccumulator(HostLossAccumulator):
    """Accumulates losses that other ranks get with the gradients, where there is room."""

    def __init__(
        self, micro_batches_per_step: int, *, carrier: CarriedFigures, adds: bool = True
    ) -> None:
        super().__init__(micro_batches_per_step, shared=True, adds=adds)
        self._carrier = carrier
        self._is_carried = False

    def before_last_backward(self) -> None:
        self._is_carried = self._carrier.load(self._losses, self._counts)
        if not self._is_carried:
            self.start_reduce()

    def totals(self) -> tuple[Number, Number]:
        if self._is_carried:
            self._losses, self._counts = self._carrier.take(self.micro_batches_per_step)
            self._is_carried = False
            self._shared = False  # nothing is left to exchange
        return super().totals()
