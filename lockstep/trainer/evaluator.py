"""Evaluates: every sample once, the mean over valid targets, the same number on every rank and every topology.

Rank 0 receives outputs in the order of the micro-batches, so that a metric's value is that of one
process.

Tests: tests/trainer/test_metrics.py
"""

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.bad_numbers import ALL_IGNORED
from lockstep.checkpoint import Ranks
from lockstep.collectives import is_main_process
from lockstep.data import MicroBatch, StepBatches, StepSource, adopt, batch_length, move
from lockstep.errors import UsageError
from lockstep.models.protocol import logits_of, targets_of
from lockstep.parallel.buffers import restored
from lockstep.parallel.loss_accumulator import Number, mean_of
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.records import read_lines
from lockstep.torch_compat.pytree import tree_flatten, tree_map, tree_unflatten
from lockstep.trainer.metric_values import call_metric, mean_of_values

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


class MetricObject(Protocol):
    """A metric with a state, such as those of torchmetrics."""

    def update(self, outputs: Any, targets: Any) -> Any:
        """Add a micro-batch."""

    def compute(self) -> Any:
        """Return the value over all of them."""


Metric = Callable[[Any, Any], Any] | MetricObject
"""An object, or (outputs, targets) → values (a tensor, or a micro-batch's mean), whose mean is the metric."""
Metrics = Mapping[str, Metric] | MetricObject
"""Metrics by name, or an object whose `compute` returns them by name (torchmetrics' `MetricCollection`)."""


WINDOW = 16  # micro-batches per all-reduce of losses; constant, so that the order of the sum is


class EvaluationStoppedError(Exception):
    """Raised on all ranks, after the same micro-batches, if one of them was asked to stop."""


class Evaluator:
    """Evaluates a run's model; every rank has one, and calls it at the same steps.

    An evaluation ends early if a rank is asked to stop: the run is saved at once, and evaluates
    when it resumes.
    """

    def __init__(self, trainer: "Trainer", data: Any, metrics: Metrics | None) -> None:
        self._trainer, self._data, self._metrics = trainer, data, metrics
        self._done: int | None = None  # the step that was evaluated last

    def is_due(self, *, last_of_epoch: bool) -> bool:
        """Return whether to evaluate after the run's current step."""
        step, training = self._trainer.step.progress.step, self._trainer.config.training
        if self._data is None or step == 0:
            return False
        if training.eval_strategy == "epoch":
            return last_of_epoch
        if last_of_epoch and self._follows_epochs:
            return True
        return training.eval_steps is not None and step % training.eval_steps == 0

    @property
    def _follows_epochs(self) -> bool:
        """Return whether short epochs end with an evaluation, since something follows it, and no key says when."""
        state, training = self._trainer.state, self._trainer.config.training
        is_open = not self._trainer.asked & {"training.eval_steps", "training.eval_strategy"}
        is_short = state.steps_per_epoch is not None and state.steps_per_epoch < (
            training.eval_steps or 0
        )
        return is_open and is_short and state.follows_evaluations

    def too_few(self, total: int | None) -> str | None:
        """Return a line if a run of `total` steps has too few evaluations for its early stopping to stop it."""
        state, training = self._trainer.state, self._trainer.config.training
        by_epoch = training.eval_strategy == "epoch" or self._follows_epochs
        every = state.steps_per_epoch if by_epoch else training.eval_steps
        stopping = training.early_stopping
        if stopping is None or self._data is None or total is None or every is None:
            return None
        evaluations = -(-total // every)
        if evaluations > stopping.patience:
            return None
        return (
            f"warning: early_stopping can't stop this run: it waits for {stopping.patience}"
            f" evaluations after the best one, and {total} steps have {evaluations}. Set"
            " eval_steps, or eval_strategy: epoch and more epochs, or a smaller patience"
        )

    @property
    def is_due_at_end(self) -> bool:
        """Return whether to evaluate after the last step."""
        return self._data is not None and self._done != self._trainer.step.progress.step

    def was_stopped(self) -> bool:
        """Return whether the run has saved the current step without its evaluation.

        All ranks call it.
        """
        trainer = self._trainer
        step, directory = trainer.step.progress.step, trainer.run_directory
        due = self.is_due(last_of_epoch=trainer.state.ended_epoch) or step == trainer.step.total
        if self._data is None or directory is None or not due:
            return False

        def stopped() -> bool:
            saved = any(
                event["kind"] == "save" and event["step"] == step
                for event in directory.read_events()
            )
            rows = (row for row in read_lines(directory.metrics) if row.get("step") == step)
            return saved and not any("eval_loss" in row for row in rows)

        return Ranks().broadcast("the metrics of the run could not be read", stopped)

    def run(self) -> dict[str, Any] | None:
        """Return `eval_loss` and the metrics that are numbers, as `eval_NAME`.

        None if a rank was asked to stop.
        """
        trainer = self._trainer
        try:
            found = evaluated(
                trainer, self._data, self._metrics, asked=lambda: trainer.step.stop_asked
            )
        except EvaluationStoppedError:
            return None
        self._done = trainer.step.progress.step
        return {
            f"eval_{name}": value for name, value in found.items() if isinstance(value, int | float)
        }


def evaluated(
    trainer: "Trainer",
    data: Any,
    metrics: Metrics | None = None,
    *,
    asked: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Return `loss` and the metrics over a trainer's data; all ranks call it together.

    See `evaluate`.
    """
    limit, placed = trainer.config.training.eval_batches, trainer.placed
    computes = None if metrics is None else MetricSet(metrics, placed)
    collector = None if computes is None else computes.collector
    with evaluated_weights(trainer):
        loss = evaluate(
            placed,
            validation_source(trainer, data, limit),
            limit=limit,
            asked=asked,
            collector=collector,
        )
    return {"loss": loss, **({} if computes is None else computes.results())}


def evaluated_weights(trainer: "Trainer") -> AbstractContextManager[None]:
    """Give the model the weights that are evaluated: an average's, if it says so."""
    trainer.modes.eval()
    averages = [call for call in trainer.step.after_update if getattr(call, "evaluates", False)]
    return averages[0].applied() if averages else nullcontext()  # type: ignore[attr-defined]


def validation_source(trainer: "Trainer", data: Any, limit: int | None) -> StepSource:
    """Return an epoch of `data` in its own order, up to the window with micro-batch `limit`."""
    config, training = trainer.config, trainer.config.training
    size = training.eval_batch_size or training.batch_size
    window = min(WINDOW, limit or WINDOW)
    return adopt(
        data,
        config.data.model_copy(update={"shuffle": False}),
        batch_size=size,
        global_batch_size=size * window,
        assign=trainer.placed.assign,
        epochs=1,
        seed=training.seed,
        stop_step=None if limit is None else -(-limit // window),
        device=trainer.device,
        wanted=trainer.placed.wants_data,
        for_evaluation=True,
        reproducible=trainer.placed.reproducible,
    )


@contextmanager
def evaluating(placed: ParallelModel) -> Iterator[None]:
    """Put the model into evaluation mode for the block.

    What FSDP2 has gathered is freed: shards may be written.
    """
    before = [(module, module.training) for part in placed.modules for module in part.modules()]
    for part in placed.modules:
        part.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
            if isinstance(module, FSDPModule):
                module.reshard()


def restored_buffers(placed: ParallelModel) -> AbstractContextManager[None]:
    """Return a context that restores the buffers, such as running statistics, after the forward passes in it."""
    further: list[Tensor] = []
    # under local updates the common model is evaluated, with its own buffers
    if placed.local_training is not None:
        further = [value for name, value in placed.kept().items() if name not in placed.parameters]
    return restored(placed.modules, further)


def evaluate(
    placed: ParallelModel,
    source: StepSource | Generator[StepBatches, None, None],
    *,
    limit: int | None = None,
    asked: Callable[[], bool] = lambda: False,
    collector: "OutputCollector | None" = None,
) -> float:
    """Return the mean loss over an epoch, in windows of at most `WINDOW` micro-batches, or over its first `limit` ones.

    EvaluationStoppedError: some rank was `asked` to stop; on every rank, after the same window.
    """
    # micro-batches of an evaluation are weighed by the mean of their terms' targets
    placed.objective.begin_step(1)
    loss_sum: Number = 0.0
    count: Number = 0.0
    try:
        with evaluating(placed):
            for batches in source:
                accumulator = placed.loss_accumulator(batches.num_micro_batches)
                left = math.inf if limit is None else limit - batches.step * WINDOW
                # Those beyond the limit are dummies, since all ranks run the same number.
                mine = [
                    MicroBatch(m.index, m.batch, m.real and m.index < left) for m in batches.mine
                ]
                collecting = nullcontext() if collector is None else collector.window(mine)
                with placed.random_state.running("eval", batches.step), collecting:
                    placed.evaluate(mine, accumulator)
                if asked():
                    accumulator.vote_to_stop()
                some_loss, some_count = accumulator.totals()
                loss_sum, count = loss_sum + some_loss, count + some_count
                if float(accumulator.stop_votes):  # host waits for the device
                    raise EvaluationStoppedError
    finally:
        source.close()
    if float(count) == 0 and is_main_process():  # host waits for the device
        what = "no sample of the evaluation has a valid target, so its loss is nan"
        warnings.warn(
            f"{what}\n  why: {ALL_IGNORED}\n  do: look at the targets of the validation data",
            stacklevel=2,
        )
    return float(mean_of(loss_sum, count))  # host waits for the device


def predicted(trainer: "Trainer", data: Any, transform: Callable[[Any], Any] | None) -> Any:
    """Return the outputs for each sample on every rank. See `Trainer.predict`."""
    parts: list[Any] = []

    def keep(outputs: Any, _batch: Any) -> Any:
        outputs = logits_of(outputs)
        return on_cpu(outputs if transform is None else transform(outputs))

    failure = "the predictions could not be collected"
    collector = OutputCollector(trainer.placed, keep, parts.append, failure, skips_loss=True)
    with evaluated_weights(trainer):
        evaluate(trainer.placed, validation_source(trainer, data, None), collector=collector)
    return Ranks().broadcast(failure, lambda: _joined(parts))


def sample(placed: ParallelModel, step: int, /, *inputs: Any, **more: Any) -> Any:
    """Return the model's outputs in evaluation mode; random numbers follow from `step`.

    All ranks call it together.
    """
    with evaluating(placed), placed.random_state.running("sample", step):
        placed.random_state.at(0)
        return placed.forward(*inputs, **more)


@dataclass
class OutputCollector:
    """Sends what is kept of a model's outputs to rank 0; every rank has one."""

    placed: ParallelModel
    keep: Callable[[Any, Any], Any]  # (outputs, batch) → what is sent
    # called on rank 0 with each of these, in the order of the micro-batches
    receive: Callable[[Any], None]
    failure: str  # the error message if one of these raises
    skips_loss: bool = False  # data then need no targets

    @contextmanager
    def window(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Collect from the forward passes in the block, which run these micro-batches.

        All ranks enter it together.
        """
        kept: list[tuple[int, Any]] = []
        failed: list[Exception] = []

        def take(outputs: Any, batch: Any) -> tuple[Tensor, int, int] | None:
            micro_batch = micro_batch_of(batch, micro_batches)
            if micro_batch.real and self.placed.adds_losses and not failed:
                try:
                    kept.append((micro_batch.index, self.keep(outputs, batch)))
                except Exception as error:  # of the user's code; the other ranks wait below
                    failed.append(error)
            return (
                (torch.zeros((), device=self.placed.random_state.device), 1, 1)
                if self.skips_loss
                else None
            )

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


def micro_batch_of(batch: Any, micro_batches: Sequence[MicroBatch]) -> MicroBatch:
    """Return the micro-batch that holds this very batch."""
    return next(one for one in micro_batches if one.batch is batch)


def on_cpu(outputs: Any) -> Any:
    """Return outputs with their tensors detached and on the CPU."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, outputs)


class MetricSet:
    """Computes metrics over one pass through the data."""

    def __init__(self, metrics: Metrics, placed: ParallelModel) -> None:
        self._several = _is_object(metrics)
        by_name: Mapping[str, Any] = {"": metrics} if self._several else metrics  # type: ignore[assignment]
        for name, metric in by_name.items():
            if not (callable(metric) or _is_object(metric)):
                fix = (
                    "pass a function (outputs, targets) -> values, or an object with update and"
                    " compute, such as "
                )
                fix += "torchmetrics has them"
                raise UsageError(
                    f"the metric {name!r} is a {type(metric).__name__}", where="metrics", fix=fix
                )
        self._objects = {name: metric for name, metric in by_name.items() if _is_object(metric)}
        self._functions = {
            name: metric for name, metric in by_name.items() if name not in self._objects
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
        outputs, targets = logits_of(outputs), targets_of(batch, default=None)
        means = {}
        for name, function in self._functions.items():
            values = call_metric(name, function, outputs, targets)
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
            found = {
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
                found |= value if self._several else {name: value}
            self._reset_objects()
            order = list(found) if self._several else self._names
            numbers = {
                name
                for name, value in found.items()
                if isinstance(value, Tensor) and value.numel() == 1
            }
            return {name: float(found[name]) if name in numbers else found[name] for name in order}

        return Ranks().broadcast(self.collector.failure, computed)


def _is_object(metric: Any) -> bool:
    return hasattr(metric, "update") and hasattr(metric, "compute")


@contextmanager
def _without_sync(metric: Any) -> Iterator[None]:
    """Keep a metric of torchmetrics from gathering over all ranks in the block: rank 0 alone computes it."""
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


def _joined(parts: list[Any]) -> Any:
    """Return the outputs of all samples in the structure of one micro-batch's.

    A list if their other dims differ.
    """
    if not parts:
        return []
    structure = tree_flatten(parts[0])[1]
    leaves: list[Any] = []
    for column in zip(*(tree_flatten(part)[0] for part in parts), strict=True):
        if not all(isinstance(value, Tensor) for value in column):
            leaves.append(list(column))
        elif not all(value.ndim for value in column):
            leaves.append(torch.stack(column))
        elif len({value.shape[1:] for value in column}) == 1:
            leaves.append(torch.cat(column))
        else:
            leaves.append([sample for value in column for sample in value])
    return tree_unflatten(leaves, structure)
