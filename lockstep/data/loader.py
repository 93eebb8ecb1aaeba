"""Makes steps of a map-style dataset, with torch's DataLoader.

One DataLoader lives as long as the loader: its sampler goes through this rank's micro-batches from `start_step` on,
over the ends of epochs, so that workers are started once and prefetch across steps and epochs. A worker reads a whole
micro-batch (`ReadRequest`) and returns it collated. A rank reads only the samples that it runs.
"""

import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.batches import Assign, MicroBatch, StepBatches, move
from lockstep.data.order import Order, StepSamples
from lockstep.data.reader import Collate, Reader, ReadFailure, ReadRequest
from lockstep.errors import RunError
from lockstep.torch_compat.data_workers import end_workers, workers_of

_Plan = tuple[StepSamples, list[tuple[int, bool]]]  # a step, and this rank's part of it


class StepLoader:
    """Iterates over the steps `start_step` … `stop_step` − 1, each with this rank's micro-batches on the device.

    Args:
        dataset: anything with `__getitem__`. With an attribute `deterministic = True` (it draws no random numbers) it
            is read without seeding, and in one call per micro-batch if it has `__getitems__`.
        order: which samples make up a step.
        assign: M → this rank's micro-batches, in running order.
        start_step: the first step.
        stop_step: the first step not taken; None: no limit.
        seed: of the run.
        device: where batches go.
        num_workers, prefetch_factor, persistent_workers: as in torch's DataLoader. Workers live as long as one
            iteration over any number of epochs; `persistent_workers` keeps them for the next. `prefetch_factor` unset:
            at least one step ahead.
        pin_memory: copy batches to page-locked memory, for devices that profit (not the CPU).
        collate_fn: list of samples → batch; unset: torch's `default_collate`.
        wanted: False on a rank that needs no data (the middle of a pipeline): `batch` is None, nothing is read.
        worker_init_fn, multiprocessing_context, timeout: as in torch's DataLoader.
        epochs: how many epochs to take at most, counted from step 0; None: no limit.
        notice: a line to log at the start, besides the order's.

    Raises:
        RunError: while iterating: the dataset raised, or a worker died; names the dataset index.
    """

    def __init__(
        self, dataset: Dataset[Any], order: Order, assign: Assign, *, start_step: int, stop_step: int | None,
        seed: int, device: torch.device | str, num_workers: int = 0, prefetch_factor: int | None = None,
        pin_memory: bool = False, persistent_workers: bool = False, collate_fn: Collate | None = None,
        wanted: bool = True, worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None, timeout: float = 0, epochs: int | None = None, notice: str | None = None,
    ) -> None:  # fmt: skip
        self.order = order
        self.device = torch.device(device)
        self._assign = assign
        self._start, self._stop, self._epochs = start_step, stop_step, epochs
        self._notice = notice
        self._wanted = wanted
        self._persistent = persistent_workers and num_workers > 0
        self._plans: dict[int, _Plan] = {}  # of steps in progress
        self._running: Any = None  # the DataLoader's iterator
        self._reader = Reader(dataset, collate_fn, seed, num_workers)
        pins = pin_memory and self.device.type != "cpu"
        # Without workers a batch is read directly: torch's DataLoader would only add to the time.
        self._reads_here = num_workers == 0 and not pins
        if num_workers and prefetch_factor is None:
            prefetch_factor = self._one_step_ahead(num_workers)
        workers: dict[str, Any] = {}
        if num_workers:
            workers = {"prefetch_factor": prefetch_factor, "multiprocessing_context": multiprocessing_context}
        self._loader: DataLoader[Any] = DataLoader(
            self._reader,
            batch_size=None,
            sampler=_Requests(self),
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=pins,
            persistent_workers=self._persistent,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            generator=torch.Generator(),  # else it would draw from the training's generator
            **workers,
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None if unknown."""
        return self.order.steps_per_epoch

    @property
    def notice(self) -> str | None:
        """A line to log at the start, if any."""
        return "; ".join(text for text in (self._notice, getattr(self.order, "notice", None)) if text) or None

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data of a step follow from its number."""
        return {}

    def __iter__(self) -> Iterator[StepBatches]:
        self._running = iter(self._loader) if self._wanted and not self._reads_here else None
        try:
            for window, assigned in self._planned():
                mine = [MicroBatch(index, self._next(window, index), real) for index, real in assigned]
                self._plans.pop(window.step, None)
                count = len(window.micro_batches)
                yield StepBatches(window.step, window.epoch, count, window.num_samples, window.last_of_epoch, mine)
        finally:
            if not self._persistent:
                self.close()

    def close(self) -> None:
        """End the workers, if any run; a later iteration starts new ones."""
        running, self._running = self._running, None
        self._plans.clear()
        end_workers(self._loader, running)

    def explain(self, error: RuntimeError) -> RunError | None:
        """Return a message for torch's error about a dead worker, which it raises wherever the main thread is.

        The result is None if `error` is about something else.
        """
        text = str(error)
        if not text.startswith("DataLoader worker") and "DataLoader timed out" not in text:
            return None
        workers = workers_of(self._running)
        dead = [number for number, worker in enumerate(workers) if worker.exitcode is not None]
        reading = ", ".join(self._reader.being_read(number) for number in dead or range(len(workers)))
        return RunError(
            "a data worker died" if dead else "a data worker gave no answer",
            where=f"while it read {reading}" if reading else None,
            why=", ".join(_end_of(workers[number]) for number in dead) or text.splitlines()[0],
            fix="set data.num_workers: 0 to see the dataset's own error; a killed worker was often out of memory",
        )

    def _planned(self) -> Iterator[_Plan]:
        for step in itertools.count(self._start) if self._stop is None else range(self._start, self._stop):
            window, assigned = self._plan(step)
            if self._epochs is not None and window.epoch >= self._epochs:  # started at the end
                return
            yield window, assigned
            if self._epochs is not None and window.epoch == self._epochs - 1 and window.last_of_epoch:
                return

    def _plan(self, step: int) -> _Plan:
        # The sampler runs ahead of the steps, perhaps into the next epoch, so its plans are kept: the order holds one
        # epoch's permutation only.
        if step not in self._plans:
            window = self.order.window(step)
            self._plans[step] = (window, self._assign(len(window.micro_batches)))
        return self._plans[step]

    def _one_step_ahead(self, num_workers: int) -> int:
        if self._stop is not None and self._stop <= self._start:
            return 2
        _, assigned = self._plan(self._start)
        return max(2, -(-len(assigned) // num_workers) + 1)

    def _next(self, window: StepSamples, index: int) -> Any:
        if not self._wanted:
            return None
        if self._reads_here:
            batch = self._reader[ReadRequest(window.step, window.epoch, index, window.micro_batches[index])]
        else:
            batch = self._from_workers()
        if isinstance(batch, ReadFailure):
            raise RunError(batch.what, where=batch.where, why=batch.why) from batch.cause
        return batch if self.device.type == "cpu" else move(batch, self.device)

    def _from_workers(self) -> Any:
        try:
            return next(self._running)
        except RuntimeError as error:
            raise (self.explain(error) or error) from None


class _Requests(Sampler[ReadRequest]):
    """Yields this rank's micro-batches in running order."""

    def __init__(self, loader: StepLoader) -> None:
        self._of = loader

    def __iter__(self) -> Iterator[ReadRequest]:
        for window, assigned in self._of._planned():
            for index, _ in assigned:
                yield ReadRequest(window.step, window.epoch, index, window.micro_batches[index])


def _end_of(worker: Any) -> str:
    code = worker.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"process {worker.pid} {how}"


def _identity(batch: Any) -> Any:
    return batch
