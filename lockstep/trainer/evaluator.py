"""Evaluates: every sample once, the mean over valid targets, the same number on every rank and every topology."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from lockstep.checkpoint import Ranks
from lockstep.data import MicroBatch, StepBatches, StepSource, adopt
from lockstep.parallel.loss_accumulator import Number, at_least
from lockstep.parallel.parallel_model import ParallelModel

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
    """

    def __init__(self, trainer: "Trainer", data: Any) -> None:
        self._trainer, self._data = trainer, data

    @property
    def is_due(self) -> bool:
        """Return whether to evaluate after the run's current step."""
        step, every = self._trainer.step.progress.step, self._trainer.config.training.eval_steps
        return self._data is not None and every is not None and step > 0 and step % every == 0

    @property
    def is_due_at_end(self) -> bool:
        """Return whether to evaluate after the last step."""
        return self._data is not None

    def was_stopped(self) -> bool:
        """Return whether the evaluation of the run's current step was stopped; all ranks call it.

        Rank 0 finds out: the run directory's run has saved the step and has not recorded its evaluation.
        """
        trainer = self._trainer
        step, directory = trainer.step.progress.step, trainer.run_directory
        if self._data is None or directory is None or not (self.is_due or step == trainer.step.total):
            return False

        def stopped() -> bool:
            saved = any(event["kind"] == "save" and event["step"] == step for event in directory.read_events())
            return saved and not any("eval_loss" in row for row in directory.read_metrics() if row["step"] == step)

        return Ranks().broadcast("the metrics of the run could not be read", stopped)

    def run(self) -> float | None:
        """Return the mean loss over the data; None if a rank was asked to stop meanwhile."""
        trainer = self._trainer
        source = validation_source(trainer, self._data)
        limit = trainer.config.training.eval_batches
        try:
            return evaluate(trainer.placed, source, limit=limit, asked=lambda: trainer.step.stop_asked)
        except EvaluationStoppedError:
            return None


def validation_source(trainer: "Trainer", data: Any) -> StepSource:
    """Return one epoch of `data`, in its own order, for `evaluate`; a DataLoader keeps its own batch size.

    With `training.eval_batches` it ends with the window that holds the last of them.
    """
    config, training = trainer.config, trainer.config.training
    size, limit = training.eval_batch_size or training.batch_size, training.eval_batches
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
    asked: Callable[[], bool] = lambda: False,
) -> float:  # fmt: skip
    """Return the mean loss over the source, or over its first micro-batches.

    Args:
        source: one epoch, in windows of at most `WINDOW` micro-batches, assigned by `placed.assign`.
        limit: number of micro-batches that count, over all ranks; None: all of them.
        asked: whether this rank was asked to stop; called after each window.

    Raises:
        EvaluationStoppedError: some rank was asked; on every rank, after the same window.
    """
    loss_sum: Number = 0.0
    count: Number = 0.0
    try:
        with evaluating(placed):
            for batches in source:
                accumulator = placed.loss_accumulator(batches.num_micro_batches)
                with placed.random_state.running("eval", batches.step):
                    placed.evaluate([_counted(m, batches, limit) for m in batches.mine], accumulator)
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


def sample_from(placed: ParallelModel) -> Callable[[torch.Tensor], Any]:
    """Return the placed model as a function of its inputs, in evaluation mode; all ranks call it together."""

    def forward(*inputs: torch.Tensor) -> Any:
        with evaluating(placed), placed.random_state.running("sample", 0):
            placed.random_state.at(0)
            return placed.forward(*inputs)

    return forward
