"""Compares the losses of two scripts that are meant to differ, A and B, step by step.

B is given A's samples and random numbers, so that what is left of the difference is what the
scripts do:

    loss of A        2.31   2.12   2.05
    loss of B        2.30   2.10   2.02
    B minus A       -0.01  -0.02  -0.03      mean -0.02, and its standard error

Tests: tests/verify/test_pair.py
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass
class PairedLosses:
    """Losses of two runs on the same samples and random numbers, step by step."""

    b: list[float]  # of B
    a: list[float]  # of A

    @property
    def difference(self) -> float:
        """The mean of B's loss minus A's."""
        return fmean(self.differences)

    @property
    def differences(self) -> list[float]:
        """B's loss minus A's, of each step."""
        return [b - a for b, a in zip(self.b, self.a, strict=True)]

    @property
    def error(self) -> float:
        """The standard error of the mean difference."""
        return _standard_error(self.differences)

    @property
    def unpaired_error(self) -> float:
        """The standard error if the steps of the runs had nothing in common."""
        return math.hypot(_standard_error(self.b), _standard_error(self.a))


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
