"""Evaluates a placed model on every sample once.

The result is the mean over valid targets, and is the same number on every topology.

Tests: tests/trainer/test_metrics.py
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lockstep.bad_numbers import ALL_IGNORED
from lockstep.checkpoint import Ranks
from lockstep.data import MicroBatch, StepBatches, StepSource
from lockstep.errors import warn_at_caller
from lockstep.models.out_of_range import explain_index
from lockstep.parallel.forward_effects.buffers import restored
from lockstep.parallel.loss_accumulator import Number, mean_of
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.process_group.collectives import is_main_process
from lockstep.torch_compat.pytree import tree_map

WINDOW = 16  # micro-batches per all-reduce of losses; constant, so that the order of the sum is


class EvaluationStoppedError(Exception):
    """Raised on all ranks, after the same micro-batches, if one of them was asked to stop."""


@contextmanager
def evaluating(placed: ParallelModel) -> Iterator[None]:
    """Put the model into evaluation mode for the block.

    What FSDP2 has gathered is freed: shards may be written.
    """
    # A pipeline's stages lack the model's own modules, such as one that computes the loss.
    parts = placed.modules if placed.root is None else [placed.root, *placed.modules]
    modules = dict.fromkeys(module for part in parts for module in part.modules())
    before = [(module, module.training) for module in modules]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
            if isinstance(module, FSDPModule):
                module.reshard()


def restored_buffers(placed: ParallelModel) -> AbstractContextManager[None]:
    """Return a context that restores the buffers, such as running statistics, at its end.

    Forward passes inside it change them.
    """
    further: list[Tensor] = []
    # under local updates the common model is evaluated, with its own buffers
    if placed.local_training is not None:
        further = [value for name, value in placed.kept().items() if name not in placed.parameters]
    return restored(placed.modules, further)


@contextmanager
def _bad_index_explained(
    micro_batches: Sequence[MicroBatch], step: int, source: Any
) -> Iterator[None]:
    """Name the sample behind an index that a layer of the evaluated model does not have."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        explain_bad_index(error, micro_batches, step, source, training=False)
        raise


def evaluate(
    placed: ParallelModel,
    source: StepSource | Generator[StepBatches, None, None],
    *,
    limit: int | None = None,
    asked: Callable[[], bool] = lambda: False,
    collector: "OutputCollector | None" = None,
) -> float:
    """Return the mean loss over an epoch, or over its first `limit` micro-batches.

    They are evaluated in windows of at most `WINDOW` micro-batches.

    EvaluationStoppedError: some rank was `asked` to stop; on every rank, after the same window.
    """
    # micro-batches of an evaluation are weighed by the mean of their terms' targets
    if placed.objective.observed is not None:
        placed.objective.observed.begin_step(1)
    loss_sum: Number = 0.0
    count: Number = 0.0
    try:
        with evaluating(placed):
            for batches in source:
                accumulator = placed.loss_accumulator(batches.num_micro_batches)
                remaining = math.inf if limit is None else limit - batches.step * WINDOW
                # Those beyond the limit are dummies, since all ranks run the same number.
                mine = [
                    MicroBatch(m.index, m.batch, m.real and m.index < remaining)
                    for m in batches.mine
                ]
                with (
                    _bad_index_explained(mine, batches.step, source),
                    placed.random_state.running("eval", batches.step),
                    nullcontext() if collector is None else collector.window(mine),
                ):
                    placed.evaluate(mine, accumulator)
                if asked():
                    accumulator.vote_to_stop()
                some_loss, some_count = accumulator.totals()
                loss_sum = loss_sum + some_loss
                count = count + some_count
                if float(accumulator.stop_votes):  # host waits for the device
                    raise EvaluationStoppedError
    finally:
        source.close()
    if float(count) == 0 and is_main_process():  # host waits for the device
        what = "no sample of the evaluation has a valid target, so its loss is nan"
        warn_at_caller(
            f"{what}\n  why: {ALL_IGNORED}\n  do: look at the targets of the validation data",
        )
    return float(mean_of(loss_sum, count))  # host waits for the device


def explain_bad_index(
    error: IndexError | RuntimeError,
    micro_batches: Sequence[MicroBatch],
    step: int,
    source: Any = None,
    *,
    training: bool = True,
) -> None:
    """Raise an error that names the sample whose target or token id the model has no place for.

    Return if `error` is about something else.

    Args:
        error: of a forward pass of these micro-batches.
        micro_batches: of this rank.
        step: of the training or of the evaluation, counted from 0.
        source: where they came from, which may number the samples.
        training: whether they are of a training.
    """
    order = getattr(source, "order", None)
    samples = None if order is None else order.samples_of(step).micro_batches
    batches = [(each.index, each.batch) for each in micro_batches]
    explained = explain_index(error, batches, step=step + 1 if training else None, samples=samples)
    if explained is not None:
        raise explained from error


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
            """Keep a micro-batch's outputs; an error of the user's code waits for all ranks."""
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
    return next(each for each in micro_batches if each.batch is batch)


def on_cpu(outputs: Any) -> Any:
    """Return outputs with their tensors detached and on the CPU."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, outputs)
