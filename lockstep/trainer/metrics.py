"""Computes metrics of an evaluation: functions of a micro-batch, and objects with a state.

Rank 0 receives outputs in the order of the micro-batches, so that a metric's value is that of one
process.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint import Ranks
from lockstep.data import batch_length, move
from lockstep.errors import RunError, UsageError, only_user_code
from lockstep.models.batch_parts import logits_of, targets_of
from lockstep.models.loss_arguments import FurtherArguments
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.trainer.evaluation import OutputCollector, on_cpu


class MetricObject(Protocol):
    """A metric with a state, such as those of torchmetrics."""

    def update(self, outputs: Any, targets: Any) -> Any:
        """Add a micro-batch."""

    def compute(self) -> Any:
        """Return the value over all of them."""


Metric = Callable[[Any, Any], Any] | MetricObject
"""An object, or a function (outputs, targets) → values, whose mean is the metric.

What else a function takes are members of the batch by their names. The values are a tensor, or a
micro-batch's mean.
"""
Metrics = Mapping[str, Metric] | MetricObject
"""Metrics by name, or an object whose `compute` returns them by name.

An example of such an object is torchmetrics' `MetricCollection`.
"""


class MetricSet:
    """Computes metrics over one pass through the data."""

    def __init__(self, metrics: Metrics, placed: ParallelModel) -> None:
        self._several = _is_object(metrics)
        by_name: Mapping[str, Any] = {"": metrics} if self._several else metrics  # type: ignore[assignment]
        for name, metric in by_name.items():
            if not (callable(metric) or _is_object(metric)):
                fix = (
                    "pass a function (outputs, targets) -> values, or an object with update and"
                    " compute, such as torchmetrics has them"
                )
                raise UsageError(
                    f"the metric {name!r} is a {type(metric).__name__}", where="metrics", fix=fix
                )
        self._objects = {name: metric for name, metric in by_name.items() if _is_object(metric)}
        self._functions = {
            name: metric for name, metric in by_name.items() if name not in self._objects
        }
        self._further = {
            name: FurtherArguments(each, "metric", "metrics")
            for name, each in self._functions.items()
        }
        self._names = list(by_name)
        self._sums = dict.fromkeys(self._functions, (0.0, 0.0))
        self._reset_objects()
        self.collector = OutputCollector(
            placed, self._keep, self._receive, "the metrics could not be computed"
        )

    def _reset_objects(self) -> None:
        for metric in self._objects.values():
            if reset := getattr(metric, "reset", None):
                reset()

    def _keep(self, outputs: Any, batch: Any) -> tuple[dict[str, tuple[float, float]], Any]:
        outputs = logits_of(outputs)
        targets = targets_of(batch, default=None)
        means = {}
        for name, function in self._functions.items():
            more = self._further[name].of(batch)
            values = call_metric(name, partial(function, **more), outputs, targets)
            means[name] = mean_of_values(name, values, outputs, targets, batch_length(batch))
        return means, on_cpu((outputs, targets)) if self._objects else None

    def _receive(self, row: tuple[dict[str, tuple[float, float]], Any]) -> None:
        means, pair = row
        for name, (total, count) in means.items():
            self._sums[name] = self._sums[name][0] + total, self._sums[name][1] + count
        for name, metric in self._objects.items():
            device = getattr(metric, "device", None)
            outputs, targets = move(pair, device) if isinstance(device, torch.device) else pair
            call_metric(name or type(metric).__name__, metric.update, outputs, targets)

    def results(self) -> dict[str, Any]:
        """Return the values by name, the same on every rank; all ranks call it together, once.

        One number is a float; anything else is as the metric returns it, on the CPU.
        """

        def computed() -> dict[str, Any]:
            """Compute the values on rank 0, in the order in which the metrics were given."""
            values = {
                name: total / count if count else float("nan")
                for name, (total, count) in self._sums.items()
            }
            for name, metric in self._objects.items():
                with _without_sync(metric):
                    value = on_cpu(metric.compute())
                if self._several and not isinstance(value, Mapping):
                    what = (
                        f"metrics is {type(metric).__name__}(…), which returns one result, without"
                        " a name"
                    )
                    raise UsageError(
                        what, where="metrics", fix=f'write metrics={{"{type(metric).__name__}": …}}'
                    )
                values |= value if self._several else {name: value}
            self._reset_objects()
            order = list(values) if self._several else self._names
            numbers = {
                name
                for name, value in values.items()
                if isinstance(value, Tensor) and value.numel() == 1
            }
            return {
                name: float(values[name]) if name in numbers else values[name] for name in order
            }

        return Ranks().broadcast(self.collector.failure, computed)


def _is_object(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


@contextmanager
def _without_sync(metric: Any) -> Iterator[None]:
    """Keep a metric of torchmetrics from gathering over all ranks in the block.

    Only rank 0 computes it.
    """
    parts: list[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else []
    before = [
        (part, part.distributed_available_fn)
        for part in parts
        if hasattr(part, "distributed_available_fn")
    ]
    for part, _ in before:
        part.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for part, available in before:
            part.distributed_available_fn = available


_NEEDED = (
    "a metric takes (outputs, targets): of a model's outputs their `logits`, if they have any, and"
    " of a batch its targets (`targets`, `labels`, or the second of a pair)"
)


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
    """Return the sum and the number of a metric's values.

    They are of the single values, or of a mean over so many `samples`.

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
