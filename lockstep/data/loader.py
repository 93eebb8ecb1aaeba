"""Makes steps of a map-style dataset, with torch's DataLoader.

For each step that is left the sampler (`_Requests`) asks for this rank's micro-batches, each by one
`ReadRequest`; the `Reader` (reader.py) reads them, in workers or here; the loader brings them to
the device in the same order. Workers are started once and prefetch across epochs; a rank reads only
the samples that it runs.

Tests: tests/data/test_loader.py, tests/data/test_late_draws.py
"""

import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.agreement import (
    DataEvidence,
    known,
    order_checksum,
    remember,
    require_same_data,
)
from lockstep.data.batches import (
    Assign,
    MicroBatch,
    SourceSettings,
    StepBatches,
    known_length,
    move,
    num_tokens,
)
from lockstep.data.generators import can_be_seeded
from lockstep.data.mistakes import workers_not_started
from lockstep.data.order import Order, StepSamples
from lockstep.data.permutation import KeyedOrder
from lockstep.data.reader import Collate, ProbeRequest, Reader, ReadFailure, ReadRequest
from lockstep.division import ceil_div
from lockstep.errors import RunError, UsageError, listed
from lockstep.machine import accelerator
from lockstep.torch_compat.data_workers import end_workers, workers_of


class _PlannedStep(NamedTuple):
    """The samples of a step, and which of its micro-batches this rank runs."""

    samples: StepSamples
    assigned: list[tuple[int, bool]]  # (index of a micro-batch, whether it counts)

    def request(self, index: int) -> ReadRequest:
        """Return the request for one of its micro-batches."""
        samples = self.samples
        return ReadRequest(samples.step, samples.epoch, index, samples.micro_batches[index])


class StepLoader:
    """Iterates over the steps that the settings name.

    Each has this rank's micro-batches, on the device.

    A `dataset` is anything with `__getitem__`. With an attribute `deterministic = True` (it draws
    no random numbers) it is read without seeding, and in one call per micro-batch if it has
    `__getitems__`. Other arguments are as in torch's DataLoader, or in `adopt`. Workers live as
    long as one iteration over any number of epochs, or longer (`persistent_workers`).
    `prefetch_factor` unset: at least one step ahead. While iterating, a RunError names the dataset
    index at which the dataset raised, or a worker died.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        assign: Assign,
        settings: SourceSettings,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        collate_fn: Collate | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        timeout: float = 0,
    ) -> None:
        self.order = order
        self._assign = assign
        self.device = torch.device(settings.device)
        self._start = settings.start_step
        self._stop = settings.stop_step
        self._epochs = settings.epochs
        self._wanted = settings.wanted
        notices = (settings.notice, getattr(order, "notice", None))
        self.notice = "; ".join(filter(None, notices)) or None  # a line to log at the start
        self._persistent = persistent_workers and num_workers > 0
        self._plans: dict[int, _PlannedStep] = {}  # of steps in progress
        self._running: Any = None  # the DataLoader's iterator
        self._dataset = dataset
        self._reproducible = settings.reproducible
        self._compares = settings.compares
        self._probes: ProbeRequest | None = None  # to be read before the first step
        self._reader = Reader(dataset, collate_fn, settings.seed, num_workers)
        self._tell_own_generators(settings.reproducible)
        pins = pin_memory and accelerator.pins_memory(self.device)
        # Without workers a batch is read directly: torch's DataLoader would only add to the time.
        self._reads_here = num_workers == 0 and not pins
        workers: dict[str, Any] = {}
        if num_workers:
            if prefetch_factor is None:
                prefetch_factor = self._one_step_ahead(num_workers)
            workers = {
                "prefetch_factor": prefetch_factor,
                "multiprocessing_context": multiprocessing_context,
            }
        # The generator: else it would draw from the training's.
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
            generator=torch.Generator(),
            **workers,
        )

    @property
    def _has_ended(self) -> bool:
        """True if no step is left."""
        return self._stop is not None and self._stop <= self._start

    def _one_step_ahead(self, num_workers: int) -> int:
        """Return the micro-batches that each worker reads ahead: a step's, by all of them."""
        assigned = [] if self._has_ended else self._plan(self._start).assigned
        return max(2, ceil_div(len(assigned), num_workers) + 1)

    def _tell_own_generators(self, reproducible: bool) -> None:
        """Add to the notice which of the dataset's own generators are seeded.

        One that can't be seeded is named.
        """
        generators = self._reader.own_generators()
        if not generators:
            return
        unseeded = [name for name, generator in generators.items() if not can_be_seeded(generator)]
        text = (
            f"generators of the data's own ({listed(sorted(generators))}) are seeded for each"
            " sample"
        )
        if unseeded:
            what = f"the data draw from {listed(unseeded)}, which can't be seeded"
            if reproducible:
                raise UsageError(
                    what,
                    where="distributed.reproducible",
                    why="no run repeats another",
                    fix=(
                        "draw with random.random(), numpy.random or torch.rand: these are seeded"
                        " for each sample"
                    ),
                )
            text = f"warning: {what}: no run repeats another"
        self.notice = "; ".join(filter(None, (self.notice, text)))

    @property
    def steps_per_epoch(self) -> int | None:
        return self.order.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the order, by which the data of a step follow from its number.

        The list is what a checkpoint means that names none.
        """
        epochs = getattr(self.order, "epochs", None)
        return {"order": epochs.name} if isinstance(epochs, KeyedOrder) else {}

    def __iter__(self) -> Iterator[StepBatches]:
        if self._compares and self._wanted and known(self._dataset) is None:
            size = len(self._dataset)  # type: ignore[arg-type]
            self._probes = ProbeRequest(sorted({0, size // 2, size - 1}))
        self._running = self._started() if self._wanted and not self._reads_here else None
        try:
            if self._compares:
                self._compare()
            for planned in self._planned():
                mine = [self._micro_batch(planned, index, real) for index, real in planned.assigned]
                samples = planned.samples
                self._plans.pop(samples.step, None)
                yield StepBatches(
                    samples.step,
                    samples.epoch,
                    len(samples.micro_batches),
                    samples.num_samples,
                    samples.last_of_epoch,
                    mine,
                )
        finally:
            if not self._persistent:
                self.close()

    def _started(self) -> Any:
        """Start the workers, or take those that are kept, and return what they will send."""
        try:
            return iter(self._loader)
        except OSError as error:
            raise workers_not_started(error) from error

    def _compare(self) -> None:
        """Compare the data with those of the other ranks, or raise a UsageError.

        All ranks call it together.
        """
        probed = known(self._dataset) or []
        if self._probes is not None:
            probed = self._reader[self._probes] if self._reads_here else self._received()
            remember(self._dataset, probed)
            self._probes = None
        checksum = None
        if not self._has_ended:
            checksum = order_checksum(self._plan(self._start).samples.micro_batches)
        evidence = DataEvidence(known_length(self._dataset), checksum, probed)
        sampler = getattr(self.order, "sampler", None)
        require_same_data(self._dataset, evidence, sampler=sampler, reproducible=self._reproducible)

    def close(self) -> None:
        running = self._running
        self._running = None
        self._plans.clear()
        end_workers(self._loader, running)

    def explain(self, error: RuntimeError) -> RunError | None:
        """Return a message for torch's error about a dead worker.

        None if it is about something else.
        """
        text = str(error)
        if not text.startswith("DataLoader worker") and "DataLoader timed out" not in text:
            return None
        workers = workers_of(self._running)
        dead = [number for number, worker in enumerate(workers) if worker.exitcode is not None]
        reading = [
            f"dataset[{index}]" if index >= 0 else "nothing (it was collating or waiting)"
            for index in (self._reader.reading[number] for number in dead or range(len(workers)))
        ]
        ends = [_end_of(workers[number]) for number in dead]
        return RunError(
            "a data worker died" if dead else "a data worker gave no answer",
            where=f"while it read {', '.join(reading)}" if reading else None,
            why=", ".join(ends) or text.splitlines()[0],
            fix=(
                "set data.num_workers: 0 to see the dataset's own error; a killed worker was often"
                " out of memory"
            ),
        )

    def _planned(self) -> Iterator[_PlannedStep]:
        """Yield the plan of each step that is left, up to the end of the run."""
        steps = (
            itertools.count(self._start) if self._stop is None else range(self._start, self._stop)
        )
        for step in steps:
            planned = self._plan(step)
            samples = planned.samples
            if self._epochs is not None and samples.epoch >= self._epochs:  # started at the end
                return
            yield planned
            is_last_epoch = self._epochs is not None and samples.epoch == self._epochs - 1
            if is_last_epoch and samples.last_of_epoch:
                return

    def _plan(self, step: int) -> _PlannedStep:
        # The sampler runs ahead of the steps, perhaps into the next epoch, so its plans are kept:
        # the order holds one epoch's samples only.
        if step not in self._plans:
            samples = self.order.samples_of(step)
            assigned = self._assign(len(samples.micro_batches))
            self._plans[step] = _PlannedStep(samples, assigned)
        return self._plans[step]

    def _received(self) -> Any:
        """Return what a worker sends next."""
        try:
            return next(self._running)
        except RuntimeError as error:
            raise (self.explain(error) or error) from None

    def _micro_batch(self, planned: _PlannedStep, index: int, real: bool) -> MicroBatch:
        """Return a micro-batch of a step on the device: read here, or the next that is sent."""
        if not self._wanted:
            return MicroBatch(index, None, real)
        batch = self._reader[planned.request(index)] if self._reads_here else self._received()
        if isinstance(batch, ReadFailure):
            raise RunError(
                batch.what, where=batch.where, why=batch.why, fix=batch.fix
            ) from batch.cause
        placed = batch if self.device.type == "cpu" else move(batch, self.device)
        return MicroBatch(index, placed, real, num_tokens(batch))


class _Requests(Sampler[ReadRequest | ProbeRequest]):
    """Yields what a loader's workers are to read: probes, then each step's micro-batches."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[ReadRequest | ProbeRequest]:
        if self._loader._probes is not None:
            yield self._loader._probes
        for planned in self._loader._planned():
            for index, _ in planned.assigned:
                yield planned.request(index)


def _end_of(worker: Any) -> str:
    """Return how a worker has ended: `process 4711 was killed by SIGKILL`."""
    code = worker.exitcode
    if code < 0:
        return f"process {worker.pid} was killed by {signal.Signals(-code).name}"
    return f"process {worker.pid} exited with code {code}"


def _identity(batch: Any) -> Any:
    return batch
