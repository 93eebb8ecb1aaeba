"""Steps of a map-style dataset, on torch's DataLoader.

One DataLoader lives as long as the loader: its sampler goes through this rank's micro-batches from `start_step` on,
over the ends of epochs, so that workers are started once and prefetch across steps and epochs. A worker is asked for a
whole micro-batch (`Request`) and sends it back collated. Nothing is read that this rank does not run.

What a sample holds is a function of (seed, epoch, dataset index): see `seeding`.
"""

import itertools
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate
from torch.utils.data import get_worker_info as worker_info

from lockstep.data.batches import Assign, MicroBatch, StepBatches, move
from lockstep.data.order import Order, Window
from lockstep.data.parcel import Parcel
from lockstep.data.seeding import outer_states_kept, seed_from
from lockstep.errors import RunError

Collate = Callable[[list[Any]], Any]
_Plan = tuple[Window, list[tuple[int, bool]]]  # a step, and this rank's part of it


class Request(NamedTuple):
    """A micro-batch to be read."""

    step: int
    epoch: int
    micro_batch: int
    indices: list[int]


class Failure(NamedTuple):
    """What comes back instead of a batch when the user's code raised."""

    what: str
    where: str | None
    why: str
    cause: BaseException | None  # only within the process


class StepLoader:
    """Iterate over the steps `start_step` … `stop_step` − 1, each with this rank's micro-batches on the device.

    Args:
        dataset: anything with `__getitem__`. With an attribute `deterministic = True` (it draws no random numbers) it
            is read without seeding, and in one call a micro-batch if it has `__getitems__`.
        order: which samples make up a step.
        assign: M → this rank's micro-batches, in running order.
        stop_step: the first step not taken; None: go on for ever.
        epochs: how many epochs to take at most, counted from step 0; None: as many as it takes.
        seed: of the run.
        num_workers, prefetch_factor, persistent_workers: as torch's DataLoader has them. Workers live as long as one
            iteration, whatever epochs it spans; `persistent_workers` keeps them for the next. `prefetch_factor` unset:
            at least one step ahead.
        pin_memory: copy batches to page-locked memory, for devices that gain by it (not for the CPU).
        collate_fn: list of samples → batch; unset: torch's `default_collate`.
        wanted: False where a rank only follows along (the middle of a pipeline): `batch` is None, nothing is read.
        worker_init_fn, multiprocessing_context, timeout: as torch's DataLoader has them.
        notice: something about the data to be said at start, besides what the order has to say.

    Raises:
        RunError: while iterating: the dataset raised, or a worker died; names the dataset index.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        assign: Assign,
        *,
        start_step: int,
        stop_step: int | None,
        seed: int,
        device: torch.device | str,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        collate_fn: Collate | None = None,
        wanted: bool = True,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
        epochs: int | None = None,
        notice: str | None = None,
    ) -> None:
        self.order = order
        self.device = torch.device(device)
        self._assign = assign
        self._start, self._stop, self._epochs = start_step, stop_step, epochs
        self._notice = notice
        self._wanted = wanted
        self._persistent = persistent_workers and num_workers > 0
        self._plans: dict[int, _Plan] = {}  # of steps that are under way
        self._running: Any = None  # the DataLoader's iterator
        self._reader = _Reader(dataset, collate_fn, seed, num_workers)
        if num_workers and prefetch_factor is None:
            prefetch_factor = self._one_step_ahead(num_workers)
        workers: dict[str, Any] = {}
        if num_workers:
            workers = {"prefetch_factor": prefetch_factor, "multiprocessing_context": multiprocessing_context}
        self._loader: DataLoader[Any] = DataLoader(
            self._reader,
            batch_size=None,
            sampler=_Requests(self),
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory and self.device.type != "cpu",
            persistent_workers=self._persistent,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            generator=torch.Generator(),  # or it would draw from the training's
            **workers,
        )

    @property
    def steps_per_epoch(self) -> int | None:
        return self.order.steps_per_epoch

    @property
    def notice(self) -> str | None:
        return "; ".join(said for said in (self._notice, getattr(self.order, "notice", None)) if said) or None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data of a step follow from its number."""
        return {}

    def __iter__(self) -> Iterator[StepBatches]:
        self._running = iter(self._loader) if self._wanted else None
        try:
            for window, assigned in self._planned():
                mine = [MicroBatch(index, self._next(), real) for index, real in assigned]
                self._plans.pop(window.step, None)
                count = len(window.micro_batches)
                yield StepBatches(window.step, window.epoch, count, window.num_samples, window.last_of_epoch, mine)
        finally:
            if not self._persistent:
                self.close()

    def close(self) -> None:
        """End the workers, if any run. A later iteration starts new ones."""
        running, self._running = self._running, None
        self._plans.clear()
        if hasattr(running, "_shutdown_workers"):
            running._shutdown_workers()
        self._loader._iterator = None

    def explain(self, error: RuntimeError) -> RunError | None:
        """The message for the error that torch raises, wherever the main thread is, when a worker dies.

        None if `error` is about something else.
        """
        text = str(error)
        if not text.startswith("DataLoader worker") and "DataLoader timed out" not in text:
            return None
        workers = list(getattr(self._running, "_workers", ()))
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
        # The sampler runs ahead of the steps, perhaps into the next epoch, so what it planned is kept: the order
        # holds one epoch's permutation only.
        if step not in self._plans:
            window = self.order.window(step)
            self._plans[step] = (window, self._assign(len(window.micro_batches)))
        return self._plans[step]

    def _one_step_ahead(self, num_workers: int) -> int:
        if self._stop is not None and self._stop <= self._start:
            return 2
        _, assigned = self._plan(self._start)
        return max(2, -(-len(assigned) // num_workers) + 1)

    def _next(self) -> Any:
        if not self._wanted:
            return None
        try:
            batch = next(self._running)
        except RuntimeError as error:
            raise (self.explain(error) or error) from None
        if isinstance(batch, Failure):
            raise RunError(batch.what, where=batch.where, why=batch.why) from batch.cause
        return batch if self.device.type == "cpu" else move(batch, self.device)


class _Requests(Sampler[Request]):
    """This rank's micro-batches in running order."""

    def __init__(self, loader: StepLoader) -> None:
        self._of = loader

    def __iter__(self) -> Iterator[Request]:
        for window, assigned in self._of._planned():
            for index, _ in assigned:
                yield Request(window.step, window.epoch, index, window.micro_batches[index])


class _Reader(Dataset[Any]):
    """The user's dataset, asked for micro-batches; lives in the workers."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate | None, seed: int, num_workers: int) -> None:
        self.dataset = dataset
        self._collate: Collate = collate_fn or default_collate
        self._draws = not draws_nothing(dataset)
        self._collate_draws = collate_fn is not None
        self._seed = seed
        self._at: int | None = None
        # What each worker is reading now, for the message when it dies.
        self._reading: Any = multiprocessing.RawArray("q", [-1] * num_workers) if num_workers else None

    def __getitem__(self, request: Request) -> Any:
        self._at = None
        try:
            batch = self._read(request)
        except Exception as error:
            return self._failure(error, request)
        return batch if worker_info() is None else Parcel(batch)

    def _read(self, request: Request) -> Any:
        if not self._draws and not self._collate_draws:
            return self._collate(self._samples(request))
        with outer_states_kept():
            samples = self._samples(request)
            seed_from("collate", self._seed, request.step, request.micro_batch)
            return self._collate(samples)

    def being_read(self, worker: int) -> str:
        """What the worker was reading when last heard of."""
        index = self._reading[worker]
        return f"dataset[{index}]" if index >= 0 else "nothing (it was collating or waiting)"

    def _samples(self, request: Request) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None and not self._draws:
            samples = self._together(together, request.indices)
        else:
            samples = [self._sample(request.epoch, index) for index in request.indices]
        self._at = None
        self._mark(-1)
        return samples

    def _together(self, read: Callable[[list[int]], Sequence[Any]], indices: list[int]) -> list[Any]:
        self._mark(indices[0])
        try:
            return list(read(indices))
        except Exception:
            for self._at in indices:  # which one was it? A dataset that draws nothing fails again
                read([self._at])
            self._at = None
            raise

    def _sample(self, epoch: int, index: int) -> Any:
        self._at = index
        self._mark(index)
        if self._draws:
            seed_from("sample", self._seed, epoch, index)
        return self.dataset[index]

    def _mark(self, index: int) -> None:
        info = worker_info() if self._reading is not None else None
        if info is not None:
            self._reading[info.id] = index

    def _failure(self, error: Exception, request: Request) -> Failure:
        if self._at is not None:
            what = f"dataset[{self._at}] failed"
        else:
            what = f"reading or collating the samples {_short(request.indices)} failed"
        cause = error if worker_info() is None else None
        return Failure(what, users_line(error), f"{type(error).__name__}: {error}", cause)


def draws_nothing(dataset: Any) -> bool:
    """Whether it is known that the dataset draws no random numbers."""
    declared = getattr(dataset, "deterministic", None)
    if declared is not None:
        return bool(declared)
    if isinstance(dataset, TensorDataset):
        return True
    if isinstance(dataset, Subset):
        return draws_nothing(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(draws_nothing(part) for part in dataset.datasets)
    if type(dataset).__module__.startswith("datasets."):  # Hugging Face; a transform may draw
        return bool(dataset.format["type"] != "custom")
    return False


def users_line(error: BaseException) -> str | None:
    """The deepest line of the traceback that is neither ours nor an installed package's: file:line, function, text."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    if not (own or frames):
        return None
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def _end_of(worker: Any) -> str:
    code = worker.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"process {worker.pid} {how}"


def _short(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"[{shown}, … {len(indices)} in all]" if len(indices) > 8 else f"[{shown}]"


def _as_it_is(batch: Any) -> Any:
    return batch
