"""Collects what a model returns over a whole data set, from all ranks: metrics and predictions.

The outputs of each micro-batch are read where they are: on the last stage of a pipeline, once where several ranks run
the same micro-batch. Rank 0 receives what is kept of them in the order of the micro-batches. So a metric sees the same
samples in the same order on every topology, each once, and its value is that of one process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.checkpoint import Ranks
from lockstep.data import MicroBatch, batch_length, move
from lockstep.errors import UsageError
from lockstep.models.protocol import logits_of, targets_of
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_compat.pytree import tree_flatten, tree_map, tree_unflatten


class MetricObject(Protocol):
    """A metric with a state, such as those of torchmetrics."""

    def update(self, outputs: Any, targets: Any) -> Any:
        """Add a micro-batch."""

    def compute(self) -> Any:
        """Return the value over all of them."""


Metric = Callable[[Any, Any], Any] | MetricObject
"""An object, or (outputs, targets) → values, whose mean over the data is the metric.

The values are a tensor, for instance with a number for each sample or token; or one number, the mean over the samples
of the micro-batch.
"""
Metrics = Mapping[str, Metric] | MetricObject
"""Metrics by name, or an object whose `compute` returns them by name (torchmetrics' `MetricCollection`)."""


@dataclass
class OutputCollector:
    """Sends what is kept of a model's outputs to rank 0; every rank has one.

    Attributes:
        placed: the model.
        keep: (outputs, batch) → what is sent.
        receive: called on rank 0 with each of these, in the order of the micro-batches.
        failure: the error message if one of these raises.
        skips_loss: leave the loss out; data then need no targets.
    """

    placed: ParallelModel
    keep: Callable[[Any, Any], Any]
    receive: Callable[[Any], None]
    failure: str
    skips_loss: bool = False

    @contextmanager
    def window(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Collect from the forward passes in the block, which run these micro-batches; all ranks enter it together.

        Raises:
            RunError: `keep` failed on some rank, or `receive` on rank 0; on every rank.
        """
        kept: list[tuple[int, Any]] = []
        failed: list[Exception] = []

        def take(outputs: Any, batch: Any) -> tuple[Tensor, int, int] | None:
            micro_batch = next(one for one in micro_batches if one.batch is batch)
            if micro_batch.real and self.placed.adds_losses and not failed:
                try:
                    kept.append((micro_batch.index, self.keep(outputs, batch)))
                except Exception as error:  # of the user's code; the other ranks wait below
                    failed.append(error)
            return (torch.zeros((), device=self.placed.random_state.device), 1, 1) if self.skips_loss else None

        with self.placed.objective.tap.opened(take):
            yield

        def sent() -> list[tuple[int, Any]]:
            if failed:
                raise failed[0]
            return kept

        def combine(rows: list[list[tuple[int, Any]]]) -> None:
            for _, row in sorted(chain.from_iterable(rows), key=lambda pair: pair[0]):
                self.receive(row)

        Ranks().all_reduce(self.failure, sent, combine)


def on_cpu(outputs: Any) -> Any:
    """Return outputs with their tensors detached and on the CPU."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, outputs)


# ---- metrics ----


class MetricSet:
    """Computes metrics over one pass through the data.

    Args:
        metrics: by name, or an object that computes several.
        placed: the model.

    Raises:
        UsageError: one of them is neither a function nor an object with `update` and `compute`.
    """

    def __init__(self, metrics: Metrics, placed: ParallelModel) -> None:
        self._several = _is_object(metrics)
        by_name: Mapping[str, Any] = {"": metrics} if self._several else metrics  # type: ignore[assignment]
        for name, metric in by_name.items():
            if not (callable(metric) or _is_object(metric)):
                raise UsageError(
                    f"the metric {name!r} is a {type(metric).__name__}",
                    where="metrics",
                    fix="pass a function (outputs, targets) -> values, or an object with update and compute, such as "
                    "torchmetrics has them",
                )
        self._objects = {name: metric for name, metric in by_name.items() if _is_object(metric)}
        self._functions = {name: metric for name, metric in by_name.items() if name not in self._objects}
        self._names = list(by_name)
        self._sums = dict.fromkeys(self._functions, (0.0, 0.0))
        self._reset()
        self.collector = OutputCollector(placed, self._keep, self._receive, "the metrics could not be computed")

    def _reset(self) -> None:
        for metric in self._objects.values():
            if reset := getattr(metric, "reset", None):
                reset()

    def _keep(self, outputs: Any, batch: Any) -> tuple[dict[str, tuple[float, float]], Any]:
        outputs, targets = logits_of(outputs), targets_of(batch, default=None)
        means = {}
        for name, function in self._functions.items():
            values = function(outputs, targets)
            if isinstance(values, Tensor) and values.ndim:
                means[name] = float(values.double().sum()), float(values.numel())  # host waits for the device
            else:
                samples = float(batch_length(batch))
                means[name] = float(values) * samples, samples  # host waits for the device
        return means, on_cpu((outputs, targets)) if self._objects else None

    def _receive(self, row: tuple[dict[str, tuple[float, float]], Any]) -> None:
        means, pair = row
        for name, (total, count) in means.items():
            self._sums[name] = self._sums[name][0] + total, self._sums[name][1] + count
        for metric in self._objects.values():
            device = getattr(metric, "device", None)
            metric.update(*(move(pair, device) if isinstance(device, torch.device) else pair))

    def results(self) -> dict[str, Any]:
        """Return the values by name, the same on every rank; all ranks call it together, once.

        One number is a float; anything else is as the metric returns it, on the CPU.
        """

        def computed() -> dict[str, Any]:
            found = {name: total / count if count else float("nan") for name, (total, count) in self._sums.items()}
            for name, metric in self._objects.items():
                with _without_sync(metric):
                    value = on_cpu(metric.compute())
                found |= value if self._several else {name: value}
            self._reset()
            order = list(found) if self._several else self._names
            return {name: _number(found[name]) for name in order}

        return Ranks().broadcast(self.collector.failure, computed)


def _is_object(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


@contextmanager
def _without_sync(metric: Any) -> Iterator[None]:
    """Keep a metric of torchmetrics from gathering over all ranks in the block: rank 0 alone computes it."""
    parts: list[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else []
    before = [(part, part.distributed_available_fn) for part in parts if hasattr(part, "distributed_available_fn")]
    for part, _ in before:
        part.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for part, available in before:
            part.distributed_available_fn = available


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


# ---- predictions ----


class Predictions:
    """Collects the outputs for each sample, in the order of the data.

    Args:
        placed: the model.
        transform: applied to a micro-batch's outputs before they are sent; None: as they are.
    """

    def __init__(self, placed: ParallelModel, transform: Callable[[Any], Any] | None) -> None:
        self._parts: list[Any] = []
        self._transform = transform
        self.collector = OutputCollector(
            placed, self._keep, self._parts.append, "the predictions could not be collected", skips_loss=True
        )

    def _keep(self, outputs: Any, batch: Any) -> Any:
        outputs = logits_of(outputs)
        return on_cpu(outputs if self._transform is None else self._transform(outputs))

    def results(self) -> Any:
        """Return the outputs on every rank; all ranks call it together, once."""
        return Ranks().broadcast(self.collector.failure, lambda: joined(self._parts))


def joined(parts: list[Any]) -> Any:
    """Return the outputs of all samples in the structure of one micro-batch's.

    Tensors are put together along their first dim; if their other dims differ, as for texts of different lengths, the
    result is a list with a tensor for each sample.
    """
    if not parts:
        return []
    structure = tree_flatten(parts[0])[1]
    columns = zip(*(tree_flatten(part)[0] for part in parts), strict=True)
    return tree_unflatten([_joined(column) for column in columns], structure)


def _joined(column: tuple[Any, ...]) -> Any:
    if not all(isinstance(value, Tensor) and value.ndim for value in column):
        return torch.stack(column) if all(isinstance(value, Tensor) for value in column) else list(column)
    if len({value.shape[1:] for value in column}) == 1:
        return torch.cat(column)
    return [sample for value in column for sample in value]
