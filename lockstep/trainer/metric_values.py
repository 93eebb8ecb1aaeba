"""Calls a user's metric on one micro-batch, and says what it was given if it fails.

Tests: tests/trainer/test_metrics.py
"""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import RunError, only_user_code

_NEEDED = (
    "a metric takes (outputs, targets): of a model's outputs their `logits`, if they have any, and"
    " of a batch its "
)
_NEEDED += "targets (`targets`, `labels`, or the second of a pair)"


def call_metric(name: str, metric: Callable[..., Any], outputs: Any, targets: Any) -> Any:
    """Return what a metric makes of a micro-batch. Raises RunError: it raised an exception."""
    try:
        return metric(outputs, targets)
    except Exception as error:  # of the user's code
        frame = traceback.extract_tb(only_user_code(error.__traceback__))[-1]
        where = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        raise _failed(
            name, f"raised {type(error).__name__}: {error}", outputs, targets, where
        ) from error


def mean_of_values(
    name: str, values: Any, outputs: Any, targets: Any, samples: int
) -> tuple[float, float]:
    """Return the sum and the number of a metric's values: of each of them, or of a mean over so many samples.

    Raises RunError: they are not numbers.
    """
    try:
        if isinstance(values, list | tuple | np.ndarray):
            values = torch.as_tensor(values, dtype=torch.float64)
        if isinstance(values, Tensor) and values.ndim:
            return float(values.double().sum()), float(values.numel())  # host waits for the device
        return float(values) * samples, float(samples)  # host waits for the device
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"returned a {type(values).__name__}, which is not a number or several"
        raise _failed(name, what, outputs, targets) from error


def _failed(name: str, what: str, outputs: Any, targets: Any, where: str | None = None) -> RunError:
    given = (
        f"it was given outputs = {_described(outputs)} and targets = {_described(targets)};"
        f" {_NEEDED}"
    )
    fix = (
        f'write a function of these two, such as {{"{name}": lambda outputs, targets:'
        " outputs.argmax(-1) == targets}"
    )
    return RunError(f"the metric {name!r} {what}", where=where, why=given, fix=fix)


def _described(value: Any) -> str:
    """Return a value's type and shape in a few words."""
    if isinstance(value, Tensor):
        return f"Tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(_described(inside) for inside in value[:3])}"
    return type(value).__name__
