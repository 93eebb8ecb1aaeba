"""Evaluates: every sample once, the mean over valid targets, the same number on every rank and every topology."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from lockstep.checkpoint import Ranks
from lockstep.data import MicroBatch, StepBatches, StepSource, adopt
from lockstep.parallel.loss_accumulator import Number, at_least
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.trainer.outputs import Metrics, MetricSet, OutputCollector, Predictions

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

WINDOW = 16  # micro-batches per all-reduce of losses; constant, so that the order of the sum is


class EvaluationStoppedError(Exception):
    """Raised on all ranks, after the same micro-batches, if one of them was asked to stop."""


class Evaluator:
    """Evaluates a run's model; every rank has one, and calls it at the same steps.

    An evaluation ends early if a rank is asked to stop: the run is saved at once, and evaluates when it resumes.

    Args:
        trainer: the model's trainer; it is only read.
        data: the data; None: none.
        metrics: to compute besides the loss.
    """

    def __init__(self, trainer: "Trainer", data: Any, metrics: Metrics | None = None) -> None:
        self._trainer, self._data, self._metrics = trainer, data, metrics
        self._done: int | None = None  # the step that was evaluated last

    def is_due(self, *, last_of_epoch: bool) -> bool:
        """Return whether to evaluate after the run's current step."""
        step, training = self._trainer.step.progress.step, self._trainer.config.training
        if self._data is None or step == 0:
            return False
        if training.eval_strategy == "epoch":
            return last_of_epoch
        return training.eval_steps is not None and step % training.eval_steps == 0

    @property
    def is_due_at_end(self) -> bool:
        """Return whether to evaluate after the last step."""
        return self._data is not None and self._done != self._trainer.step.progress.step

    def was_stopped(self) -> bool:
        """Return whether the evaluation of the run's current step was stopped; all ranks call it.

        Rank 0 finds out: the run directory's run has saved the step and has not recorded its evaluation.
        """
        trainer = self._trainer
        step, directory = trainer.step.progress.step, trainer.run_directory
        due = self.is_due(last_of_epoch=trainer.state.ended_epoch) or step == trainer.step.total
        if self._data is None or directory is None or not due:
            return False

        def stopped() -> bool:
            saved = any(event["kind"] == "save" and event["step"] == step for event in directory.read_events())
            return saved and not any("eval_loss" in row for row in directory.read_metrics() if row["step"] == step)

        return Ranks().broadcast("the metrics of the run could not be read", stopped)

    def run(self) -> dict[str, Any] | None:
        """Return `eval_loss` and the metrics that are numbers, as `eval_NAME`.

        The result is None if a rank was asked to stop meanwhile.
        """
        trainer = self._trainer
        try:
            found = evaluated(trainer, self._data, self._metrics, asked=lambda: trainer.step.stop_asked)
        except EvaluationStoppedError:
            return None
        self._done = trainer.step.progress.step
        return {f"eval_{name}": value for name, value in found.items() if isinstance(value, int | float)}


def evaluated(
    trainer: "Trainer", data: Any, metrics: Metrics | None = None, *, asked: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Return `loss` and the metrics over a trainer's data; all ranks call it together. See `evaluate`."""
    limit, placed = trainer.config.training.eval_batches, trainer.placed
    computes = None if metrics is None else MetricSet(metrics, placed)
    collector = None if computes is None else computes.collector
    with _evaluated_weights(trainer):
        loss = evaluate(placed, validation_source(trainer, data, limit), limit=limit, asked=asked, collector=collector)
    return {"loss": loss, **({} if computes is None else computes.results())}


def _evaluated_weights(trainer: "Trainer") -> AbstractContextManager[None]:
    """Return a context in which the model has the weights that are evaluated: an average's, if it says so."""
    averages = [call for call in trainer.step.after_update if getattr(call, "evaluates", False)]
    return averages[0].applied() if averages else nullcontext()  # type: ignore[attr-defined]


def validation_source(trainer: "Trainer", data: Any, limit: int | None) -> StepSource:
    """Return one epoch of `data`, in its own order, for `evaluate`; a DataLoader keeps its own batch size.

    Args:
        trainer: whose model will see them.
        data: the data.
        limit: micro-batches that count; it ends with the window that holds the last of them. None: all.
    """
    config, training = trainer.config, trainer.config.training
    size = training.eval_batch_size or training.batch_size
    window = min(WINDOW, limit or WINDOW)
    return adopt(
        data, config.data.model_copy(update={"shuffle": False}), batch_size=size,
        global_batch_size=size * window, assign=trainer.placed.assign, epochs=1, seed=training.seed,
        stop_step=None if limit is None else -(-limit // window),
        device=trainer.device, wanted=trainer.placed.wants_data, for_evaluation=True,
    )  # fmt: skip


@contextmanager
def evaluating(placed: ParallelModel) -> Iterator[None]:
    """Put the model into evaluation mode for the length of the block.

    Parameters that FSDP2 has gathered for a forward pass are freed: an update, or loading a checkpoint, writes to the
    shards, and the next forward pass has to gather the new values.
    """
    before = [(module, module.training) for part in placed.parts for module in part.modules()]
    for part in placed.parts:
        part.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
            if isinstance(module, FSDPModule):
                module.reshard()


def evaluate(
    placed: ParallelModel, source: StepSource | Generator[StepBatches, None, None], *, limit: int | None = None,
    asked: Callable[[], bool] = lambda: False, collector: OutputCollector | None = None,
) -> float:  # fmt: skip
    """Return the mean loss over the source, or over its first micro-batches.

    Args:
        source: one epoch, in windows of at most `WINDOW` micro-batches, assigned by `placed.assign`.
        limit: number of micro-batches that count, over all ranks; None: all of them.
        asked: whether this rank was asked to stop; called after each window.
        collector: receives the outputs.

    Raises:
        EvaluationStoppedError: some rank was asked; on every rank, after the same window.
    """
    loss_sum: Number = 0.0
    count: Number = 0.0
    try:
        with evaluating(placed):
            for batches in source:
                accumulator = placed.loss_accumulator(batches.num_micro_batches)
                mine = [_counted(m, batches, limit) for m in batches.mine]
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
    return float(loss_sum / at_least(count, 1.0))  # host waits for the device


def _counted(micro_batch: MicroBatch, batches: StepBatches, limit: int | None) -> MicroBatch:
    """Return the micro-batch, as a dummy if it is beyond the limit: all ranks run the same number."""
    place = batches.step * WINDOW + micro_batch.index
    return MicroBatch(micro_batch.index, micro_batch.batch, micro_batch.real and (limit is None or place < limit))


def predicted(trainer: "Trainer", data: Any, transform: Callable[[Any], Any] | None) -> Any:
    """Return the outputs for each sample on every rank. See `Trainer.predict`."""
    predictions = Predictions(trainer.placed, transform)
    with _evaluated_weights(trainer):
        evaluate(trainer.placed, validation_source(trainer, data, None), collector=predictions.collector)
    return predictions.results()


def sample_from(placed: ParallelModel) -> Callable[..., Any]:
    """Return the placed model as a function of its inputs, in evaluation mode; all ranks call it together."""

    def forward(*inputs: Any, **more: Any) -> Any:
        with evaluating(placed), placed.random_state.running("sample", 0):
            placed.random_state.at(0)
            return placed.forward(*inputs, **more)

    return forward
