"""Evaluates a run's model: when it is due, and over which data; its predictions, too.

Tests: tests/trainer/test_metrics.py
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import Ranks
from lockstep.data import BatchSizes, SourceSettings, StepSource, adopt
from lockstep.division import ceil_div
from lockstep.models.batch_parts import logits_of
from lockstep.run_directory.records import read_lines
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten
from lockstep.trainer.evaluation import (
    WINDOW,
    EvaluationStoppedError,
    OutputCollector,
    evaluate,
    on_cpu,
)
from lockstep.trainer.metrics import Metrics, MetricSet
from lockstep.trainer.run_state import RunState


class Evaluator:
    """Evaluates a run's model; every rank has one, and calls it at the same steps.

    An evaluation ends early if a rank is asked to stop: the run is saved at once, and evaluates
    when it resumes.
    """

    def __init__(self, run: RunState, data: Any, metrics: Metrics | None) -> None:
        self._run = run
        self._data = data
        self._metrics = metrics
        self._evaluated: int | None = None  # the step that was evaluated last

    def is_due(self, *, last_of_epoch: bool) -> bool:
        """Return whether to evaluate after the run's current step."""
        step = self._run.step.progress.step
        training = self._run.config.training
        if self._data is None or step == 0:
            return False
        if training.eval_strategy == "epoch":
            return last_of_epoch
        if last_of_epoch and self._follows_epochs:
            return True
        return training.eval_steps is not None and step % training.eval_steps == 0

    @property
    def _follows_epochs(self) -> bool:
        """Return whether short epochs end with an evaluation.

        They do if something follows the evaluations, and no key says when to evaluate.
        """
        run = self._run
        eval_steps = self._run.config.training.eval_steps
        is_open = not run.asked & {"training.eval_steps", "training.eval_strategy"}
        is_short = run.steps_per_epoch is not None and run.steps_per_epoch < (eval_steps or 0)
        return is_open and is_short and run.results.are_followed

    def too_few(self, total: int | None) -> list[str]:
        """Return a line if a run of `total` steps has too few evaluations to stop early."""
        training = self._run.config.training
        by_epoch = training.eval_strategy == "epoch" or self._follows_epochs
        every = self._run.steps_per_epoch if by_epoch else training.eval_steps
        stopping = training.early_stopping
        if stopping is None or self._data is None or total is None or every is None:
            return []
        evaluations = ceil_div(total, every)
        if evaluations > stopping.patience:
            return []
        line = (
            f"warning: early_stopping can't stop this run: it waits for {stopping.patience}"
            f" evaluations after the best one, and {total} steps have {evaluations}. Set"
            " eval_steps, or eval_strategy: epoch and more epochs, or a smaller patience"
        )
        return [line]

    @property
    def is_due_at_end(self) -> bool:
        """Return whether to evaluate after the last step."""
        return self._data is not None and self._evaluated != self._run.step.progress.step

    def was_stopped(self) -> bool:
        """Return whether the run has saved the current step without its evaluation.

        All ranks call it.
        """
        run = self._run
        directory = self._run.output.directory
        step = run.step.progress.step
        due = self.is_due(last_of_epoch=run.ended_epoch) or step == run.step.total
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
        step = self._run.step
        try:
            values = evaluated(self._run, self._data, self._metrics, asked=lambda: step.stop_asked)
        except EvaluationStoppedError:
            return None
        self._evaluated = step.progress.step
        return {
            f"eval_{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }


def evaluated(
    run: RunState,
    data: Any,
    metrics: Metrics | None = None,
    *,
    asked: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Return `loss` and the metrics over some data; all ranks call it together.

    Args:
        run: whose model is evaluated, over `training.eval_batches` micro-batches.
        asked: whether this rank was asked to stop: then all of them raise an
            EvaluationStoppedError.
    """
    limit = run.config.training.eval_batches
    placed = run.step.placed
    computes = None if metrics is None else MetricSet(metrics, placed)
    collector = None if computes is None else computes.collector
    with evaluated_weights(run):
        loss = evaluate(
            placed,
            validation_source(run, data, limit),
            limit=limit,
            asked=asked,
            collector=collector,
        )
    return {"loss": loss, **({} if computes is None else computes.results())}


def evaluated_weights(run: RunState) -> AbstractContextManager[None]:
    """Give the model the weights that are evaluated: an average's, if it says so."""
    run.modes.eval()
    average = run.evaluated_average
    return nullcontext() if average is None else average.applied()


def validation_source(run: RunState, data: Any, limit: int | None) -> StepSource:
    """Return an epoch of `data` in its own order, up to the window with micro-batch `limit`."""
    training = run.config.training
    placed = run.step.placed
    size = training.eval_batch_size or training.batch_size
    window = min(WINDOW, limit or WINDOW)
    settings = SourceSettings(
        start_step=0,
        stop_step=None if limit is None else ceil_div(limit, window),
        seed=training.seed,
        device=run.cluster.device,
        epochs=1,
        wanted=placed.wants_data,
        reproducible=placed.reproducible,
    )
    return adopt(
        data,
        BatchSizes(size, size * window),
        placed.assign,
        settings,
        run.config.data.model_copy(update={"shuffle": False}),
        for_evaluation=True,
    )


def predicted(run: RunState, data: Any, transform: Callable[[Any], Any] | None) -> Any:
    """Return the outputs for each sample on every rank. See `Trainer.predict`."""
    parts: list[Any] = []

    def keep(outputs: Any, _batch: Any) -> Any:
        outputs = logits_of(outputs)
        return on_cpu(outputs if transform is None else transform(outputs))

    failure = "the predictions could not be collected"
    placed = run.step.placed
    collector = OutputCollector(placed, keep, parts.append, failure, skips_loss=True)
    with evaluated_weights(run):
        evaluate(placed, validation_source(run, data, None), collector=collector)
    return Ranks().broadcast(failure, lambda: _joined(parts))


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
