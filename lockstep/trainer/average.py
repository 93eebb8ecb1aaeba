"""Averages a model's weights over its updates: EMA and SWA.

Each rank averages its own parameters, element by element: no communication, the same under every
strategy.

Tests: tests/trainer/test_updates.py, tests/trainer/test_loops.py
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import ParallelModel

AVERAGE = "average"  # name in a checkpoint


class WeightAverage:
    """Averages the parameters after updates; pass it to `Trainer(…, after_update=…)`.

    Args:
        decay: of the exponential moving average: a ← decay · a + (1 − decay) · w. None: the mean of
            all averaged updates (stochastic weight averaging, Izmailov et al. 2018).
        start: the first update that is averaged; before it the average is the model itself.
        every: number of updates from one averaged update to the next.
        evaluate: let evaluations and predictions of the trainer use the average.

    Raises:
        UsageError: a number is out of its range.
    """

    def __init__(
        self, decay: float | None = 0.999, *, start: int = 1, every: int = 1, evaluate: bool = False
    ) -> None:
        if start < 1 or every < 1 or not (decay is None or 0 <= decay < 1):
            what = f"there is no average with decay={decay}, start={start}, every={every}"
            fix = "write a decay from 0 to below 1 or None, and start and every of 1 or more"
            raise UsageError(what, where="WeightAverage", fix=fix)
        self._decay = decay
        self._start = start
        self._every = every
        self.evaluates = evaluate
        self._placed: ParallelModel | None = None
        self._average: dict[str, Tensor] = {}

    def attach(self, placed: ParallelModel) -> None:
        """Start with the values of a placed model, and add the average to its checkpoints."""
        self._placed = placed
        self._average = {name: p.detach().clone() for name, p in placed.parameters.items()}
        placed.state[AVERAGE] = self._average

    @torch.no_grad()
    def __call__(self, updates: int) -> None:
        """Add the parameters to the average after update number `updates`, counted from 1."""
        assert self._placed is not None
        averaged, rest = divmod(updates - self._start, self._every)
        if updates >= self._start and rest:
            return
        for name, parameter in self._placed.parameters.items():
            average = self._average[name]
            if averaged <= 0:  # until its first update the average is the model
                average.copy_(parameter)
            elif self._decay is None:
                average.add_((parameter - average) / (averaged + 1))
            else:
                average.mul_(self._decay).add_(parameter * (1 - self._decay))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average's values in the block, to evaluate or save it.

        All ranks enter it together.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        assert self._placed is not None, "hand the average to Trainer(…, after_update=…) first"
        for name, parameter in self._placed.parameters.items():
            value = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name].copy_(value)
