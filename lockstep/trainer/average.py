"""The average of a model's weights over its updates, kept beside the run: EMA and SWA.

Each rank averages what it holds of the parameters, element by element, so an average costs no traffic, is the same
under every strategy, and is saved and resumed with the run's checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import ParallelModel

_EXTRA = "average"  # the name in a checkpoint


class WeightAverage:
    """Averages the parameters after updates; hand it to `Trainer(…, after_update=…)`.

    Args:
        decay: of the exponential moving average: a ← decay · a + (1 − decay) · w. None: the mean of all averaged
            updates counts alike (stochastic weight averaging, Izmailov et al. 2018).
        start: the first update that is averaged; before it the average is the model itself.
        every: updates from one that is averaged to the next.

    Raises:
        UsageError: a number makes no sense.
    """

    def __init__(self, decay: float | None = 0.999, *, start: int = 1, every: int = 1) -> None:
        if start < 1 or every < 1 or not (decay is None or 0 <= decay < 1):
            raise UsageError(
                f"there is no average with decay={decay}, start={start}, every={every}",
                where="WeightAverage",
                fix="write a decay from 0 to below 1 or None, and start and every of 1 or more",
            )
        self._decay, self._start, self._every = decay, start, every
        self._placed: ParallelModel | None = None
        self._average: dict[str, Tensor] = {}

    def attach(self, placed: ParallelModel) -> None:
        """Begin with the values that a placed model has; its checkpoints keep the average from now on."""
        self._placed = placed
        self._average = {name: p.detach().clone() for name, p in placed.parameters.items()}
        placed.state[_EXTRA] = self._average

    @torch.no_grad()
    def __call__(self, updates: int) -> None:
        """Take the parameters of an update into the average.

        Args:
            updates: made so far; the first is number 1.
        """
        assert self._placed is not None
        averaged, rest = divmod(updates - self._start, self._every)
        if updates >= self._start and rest:
            return
        for name, parameter in self._placed.parameters.items():
            average = self._average[name]
            if averaged <= 0:  # up to its first update it is the model
                average.copy_(parameter)
            elif self._decay is None:
                average.add_((parameter - average) / (averaged + 1))
            else:
                average.mul_(self._decay).add_(parameter * (1 - self._decay))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the average's values inside, to evaluate or to save it; all ranks enter it together."""
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
