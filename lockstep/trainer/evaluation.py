"""Evaluation: every sample once, the mean over valid targets, the same number on every rank and every topology."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from lockstep.data import StepBatches, StepSource, adopt
from lockstep.monitor import Monitor
from lockstep.parallel import Placed, Share
from lockstep.parallel.numbers import Number, at_least

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

WINDOW = 16  # micro-batches whose losses travel in one all-reduce; fixed, so that the order of the sum is


class Validation:
    """The evaluations of a run; every rank has one, and calls it at the same steps.

    Args:
        trainer: whose model is evaluated.
        data: on which; None: on nothing.
        monitor: is told what came out.
    """

    def __init__(self, trainer: "Trainer", data: Any, monitor: Monitor) -> None:
        self._trainer, self._data, self._monitor = trainer, data, monitor
        self._evaluated: int | None = None  # after which step

    def after_step(self, *, last: bool) -> None:
        """Evaluate if it is time, and at the end."""
        trainer = self._trainer
        step, every = trainer.step.progress.step, trainer.config.training.eval_steps
        due = last or (every is not None and step % every == 0)
        if self._data is None or not due or self._evaluated == step:
            return
        self._evaluated = step
        with trainer.step.clock.during("evaluation"):
            loss = trainer.evaluate(self._data)
        trainer.metrics["eval_loss"] = loss
        trainer.best["eval_loss"] = min(loss, trainer.best.get("eval_loss", loss))
        self._monitor.on_eval({"step": step, "eval_loss": loss})


def validation_source(trainer: "Trainer", data: Any) -> StepSource:
    """One epoch of `data`, in its own order, as `evaluate` takes it; a DataLoader's own batch size stands."""
    config, training = trainer.config, trainer.config.training
    size = training.eval_batch_size or training.batch_size
    return adopt(
        data, config.data.model_copy(update={"shuffle": False}), batch_size=size,
        global_batch_size=size * WINDOW, assign=trainer.placed.assign, epochs=1, seed=training.seed,
        device=trainer.device, wanted=trainer.placed.wants_data, for_evaluation=True,
    )  # fmt: skip


@contextmanager
def evaluating(placed: Placed) -> Iterator[None]:
    """Inside, the parts are in evaluation mode; then they are as they were.

    Parameters that FSDP2 has gathered for a forward pass are let go of again: an update, or a checkpoint that is taken
    up, writes to the shards, and the next forward pass has to gather what was written.
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


def evaluate(placed: Placed, source: StepSource | Generator[StepBatches, None, None]) -> float:
    """The mean loss over all of the source.

    Args:
        source: one epoch, in windows of `WINDOW` micro-batches, shared out by `placed.assign`.
    """
    loss_sum: Number = 0.0
    count: Number = 0.0
    try:
        with evaluating(placed):
            for batches in source:
                ledger = placed.ledger(batches.num_micro_batches)
                with placed.cursor.running("eval", batches.step):
                    placed.evaluate([Share(m.index, m.batch, m.real) for m in batches.mine], ledger)
                some_loss, some_count = ledger.totals()
                loss_sum, count = loss_sum + some_loss, count + some_count
    finally:
        source.close()
    return float(loss_sum / at_least(count, 1.0))


def sample_from(placed: Placed) -> Callable[[torch.Tensor], Any]:
    """The placed model as a function of its inputs, in evaluation mode; all ranks call it together."""

    def forward(*inputs: torch.Tensor) -> Any:
        with evaluating(placed), placed.cursor.running("sample", 0):
            placed.cursor.at(0)
            return placed.forward(*inputs)

    return forward
