"""Makes steps of a map-style dataset, with torch's DataLoader.

Its workers are started once and prefetch across epochs. A worker reads a whole micro-batch
(`ReadRequest`) and returns it collated; a rank reads only the samples that it runs. The content of
a sample is a function of (seed, epoch, dataset index), and a collate function draws from (seed,
step, micro-batch): see `order`.

Tests: tests/data/test_loader.py, tests/data/test_late_draws.py
"""

import itertools
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data import get_worker_info as worker_info

from lockstep import accelerator
from lockstep.data.agreement import (
    DataEvidence,
    Probed,
    known,
    order_checksum,
    remember,
    require_same_data,
)
from lockstep.data.batches import (
    Assign,
    CollatingDataset,
    MicroBatch,
    StepBatches,
    known_length,
    move,
    num_tokens,
)
from lockstep.data.fingerprint import summary
from lockstep.data.generators import can_be_seeded, generators_of, preserve, seed_generators
from lockstep.data.mistakes import advice, collate_by_default, users_line, workers_not_started
from lockstep.data.order import Order, StepSamples
from lockstep.data.permutation import KeyedOrder
from lockstep.division import ceil_div
from lockstep.errors import RunError, UsageError, listed
from lockstep.heartbeat.writer import recorder_of_work, went_forward
from lockstep.randomness import (
    HostGenerators,
    have_moved,
    host_generators,
    preserve_states,
    restore_host_generators,
    seed_from,
    seed_torch_from,
)
from lockstep.torch_compat.data_workers import end_workers, workers_of

INLINE_LIMIT = 256 * 1024  # bytes; above about this size shared memory is faster
_NUMPY_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
}
Collate = Callable[[list[Any]], Any]


class ReadRequest(NamedTuple):
    """A micro-batch to read."""

    step: int
    epoch: int
    micro_batch: int
    indices: list[int]


class ProbeRequest(NamedTuple):
    """Samples to summarise, twice.

    Read where samples are read, since a dataset may open its files there.
    """

    indices: list[int]


class ReadFailure(NamedTuple):
    """The result in place of a batch if the user's code raised."""

    what: str
    where: str | None
    why: str
    cause: BaseException | None  # only within the same process
    fix: str | None = None


class Reader(Dataset[Any]):
    """Reads micro-batches of the user's dataset; lives in the workers."""

    def __init__(
        self, dataset: Dataset[Any], collate_fn: Collate | None, seed: int, num_workers: int
    ) -> None:
        self.dataset = dataset
        self._collate: Collate = collate_fn or default_collate
        self._draws = not draws_nothing(dataset)
        self._collate_draws = collate_fn not in (None, default_collate)
        self._collated = None if self._collate_draws else collated_of(dataset)
        self._seed = seed
        self._own: dict[str, Any] = {}  # generators of the dataset and of the collate function
        self._own_of_epoch: int | None = None  # when they were looked for
        self._is_first = True  # in this process
        # whether one has drawn from Python's or NumPy's generator; None: no micro-batch was read
        self._drew_on_host: bool | None = None
        self._keyed: HostGenerators | None = None  # as they were seeded last, while draws are noted
        self._at: int | None = None
        # The index that each worker is reading, for the message if it dies.
        self.reading: Any = (
            multiprocessing.RawArray("q", [-1] * num_workers) if num_workers else None
        )

    def __getitem__(self, request: ReadRequest | ProbeRequest) -> Any:
        if isinstance(request, ProbeRequest):
            return [
                probed for index in request.indices if (probed := self._probe(index)) is not None
            ]
        self._at = None
        try:
            batch = self._read(request)
        except RunError as error:
            return ReadFailure(error.what, error.where, error.why or "", None, error.fix)
        except Exception as error:
            what = f"dataset[{self._at}] failed"
            if self._at is None:
                indices = ", ".join(map(str, request.indices[:8]))
                rest = f", … {len(request.indices)} in all" if len(request.indices) > 8 else ""
                what = f"reading or collating the samples [{indices}{rest}] failed"
            cause = error if worker_info() is None else None
            return ReadFailure(
                what, users_line(error), f"{type(error).__name__}: {error}", cause, advice(error)
            )
        return batch if worker_info() is None else InlineBatch(batch)

    def _read(self, request: ReadRequest) -> Any:
        """Read one micro-batch, with the seeds that its epoch and its samples fix."""
        if self._collated is not None and not self._draws:
            return self._together(self._collated, request.indices)
        if not self._draws and not self._collate_draws:
            return self._put_together(self._samples(request), request)
        if self._own_of_epoch != request.epoch:  # `set_epoch` may have made others
            self._own = self.own_generators()
            self._own_of_epoch = request.epoch
        if self._own:
            with preserve(self._own):
                return self._read_seeded(request)
        return self._read_seeded(request)

    def _read_seeded(self, request: ReadRequest) -> Any:
        """Read one micro-batch, each sample with the seeds that are its own.

        Seeding Python's and NumPy's generators and restoring them takes 10 µs a sample and 70 µs a
        micro-batch, and most data draw from neither. If the first micro-batch of this process has
        not, they are left alone, until a micro-batch has drawn from one after all: it is read
        again, with seeds, as all that follow. torch's generator is always seeded: it costs little,
        and `torch.initial_seed()` shows to code of the data what it was seeded with.
        """
        if self._drew_on_host is False and not self._own:
            before = host_generators()
            of_torch = torch.get_rng_state()
            try:
                batch = self._seed_and_read(request)
            except Exception:
                if not have_moved(before):
                    raise
            else:
                if not have_moved(before):
                    return batch
            finally:
                torch.set_rng_state(of_torch)
            restore_host_generators(before)
            self._drew_on_host = True
        with preserve_states():
            batch = self._seed_and_read(request)
            self._note_draws()
        self._drew_on_host = bool(self._drew_on_host)
        return batch

    def _seed_and_read(self, request: ReadRequest) -> Any:
        samples = self._samples(request)
        self._seed_all("collate", self._seed, request.step, request.micro_batch)
        return self._put_together(samples, request)

    def _note_draws(self) -> None:
        """Note whether Python's or NumPy's generator was used since it was seeded."""
        if self._keyed is not None and have_moved(self._keyed):
            self._drew_on_host = True
        self._keyed = None

    def _put_together(self, samples: list[Any], request: ReadRequest) -> Any:
        if self._collate_draws:
            return self._collate(samples)
        return collate_by_default(
            samples, lambda: [f"dataset[{index}]" for index in request.indices]
        )

    def _probe(self, index: int) -> Probed | None:
        """Return two summaries of a sample; None if it can't be read, which its step will say."""
        request = ReadRequest(0, 0, 0, [index])

        def read() -> Any:
            with preserve_states(), preserve(self._own):
                return summary(self._samples(request))

        try:
            self._own = self.own_generators()
            self._drew_on_host = None
            first = read()
            return Probed(index, first, read() if self._draws else first)
        except Exception:
            return None

    def own_generators(self) -> dict[str, Any]:
        """Return the dataset's and the collate function's own generators, by name."""
        roots = {"dataset": self.dataset if self._draws else None, "collate_fn": self._collate}
        return generators_of(roots)

    def _seed_all(self, *parts: object) -> None:
        self._note_draws()
        if self._drew_on_host is False and not self._own:
            seed_torch_from(*parts)
            return
        seed_from(*parts)
        if self._own:
            seed_generators(self._own, *parts)
        if self._drew_on_host is None:
            self._keyed = host_generators()

    def _samples(self, request: ReadRequest) -> list[Any]:
        """Read the samples one by one, or in one call where the data set offers `__getitems__`."""
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None and not self._draws:
            samples: list[Any] = self._together(
                lambda indices: list(together(indices)), request.indices
            )
            return samples
        samples = []
        record_work = recorder_of_work()
        for self._at in request.indices:  # kept in `_at` for the message if it fails
            if self.reading is not None:
                self._mark(self._at)
            if self._own or self._draws:
                self._seed_all("sample", self._seed, request.epoch, self._at)
            samples.append(self.dataset[self._at])
            if self._is_first:
                samples[0] = self._read_again_if_new(request.epoch, self._at, samples[0])
            if record_work is not None:
                record_work()
        self._note_draws()
        self._at = None
        self._mark(-1)
        return samples

    def _read_again_if_new(self, epoch: int, index: int, sample: Any) -> Any:
        """Return the process's first sample.

        Read again if reading it has made a generator, which was not seeded.
        """
        self._is_first = False
        if not self._draws:
            return sample
        found = self.own_generators()
        if found.keys() == self._own.keys():
            return sample

        self._own = found
        self._seed_all("sample", self._seed, epoch, index)
        return self.dataset[index]

    def _together(self, read: Callable[[list[int]], Any], indices: list[int]) -> Any:
        """Call a function that reads all samples at once.

        If it fails, find the sample that does.
        """
        self._mark(indices[0])
        try:
            result = read(indices)
            went_forward()
            self._mark(-1)
            return result
        except Exception:
            for self._at in indices:  # find the one that fails: a deterministic dataset fails again
                read([self._at])
            self._at = None
            raise

    def _mark(self, index: int) -> None:
        info = worker_info() if self.reading is not None else None
        if info is not None:
            self.reading[info.id] = index


def draws_nothing(dataset: Any) -> bool:
    """Return whether the dataset is known to draw no random numbers."""
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


def collated_of(dataset: Any) -> Collate | None:
    """Return the function that makes a micro-batch in one call.

    None if a subclass overrides how samples are read.
    """

    def defined(name: str) -> int:
        return next(index for index, kind in enumerate(type(dataset).__mro__) if name in vars(kind))

    if isinstance(dataset, CollatingDataset) and defined("collated") <= defined("__getitem__"):
        return dataset.collated
    return None


class InlineBatch:
    """Sends a batch from a worker to the training process, where it arrives as `batch` itself.

    Small tensors are faster inside the message, as NumPy arrays, than through shared memory, as
    torch sends them.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (bytes(_Pickler.dumps(self.batch)),)


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        """Send small plain tensors of the CPU as NumPy arrays, and all others as torch does.

        torch moves each tensor through shared memory of its own, which is slower for small ones.
        """
        if (
            type(value) is not torch.Tensor
            or value.device.type != "cpu"
            or value.layout is not torch.strided
        ):
            return NotImplemented  # torch's way
        plain = value.dtype in _NUMPY_DTYPES and not value.requires_grad and not value.is_neg()
        return (
            (torch.from_numpy, (value.numpy(),))
            if plain and value.nbytes <= INLINE_LIMIT
            else NotImplemented
        )


_Plan = tuple[StepSamples, list[tuple[int, bool]]]  # a step, and this rank's part of it


class StepLoader:
    """Iterates over the steps `start_step` … `stop_step` − 1.

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
        reproducible: bool = False,
        compares: bool = False,
    ) -> None:
        self.order = order
        self._assign = assign
        self.device = torch.device(device)
        self._start = start_step
        self._stop = stop_step
        self._epochs = epochs
        self._wanted = wanted
        self.notice = (
            "; ".join(text for text in (notice, getattr(order, "notice", None)) if text) or None
        )
        self._persistent = persistent_workers and num_workers > 0
        self._plans: dict[int, _Plan] = {}  # of steps in progress
        self._running: Any = None  # the DataLoader's iterator
        self._dataset = dataset
        self._reproducible = reproducible
        self._compares = compares
        self._probes: ProbeRequest | None = None  # to be read before the first step
        self._reader = Reader(dataset, collate_fn, seed, num_workers)
        self._tell_own_generators(reproducible)
        pins = pin_memory and accelerator.pins_memory(self.device)
        # Without workers a batch is read directly: torch's DataLoader would only add to the time.
        self._reads_here = num_workers == 0 and not pins
        workers: dict[str, Any] = {}
        if num_workers:
            if prefetch_factor is None:  # one step ahead
                ended = self._stop is not None and self._stop <= self._start
                assigned = [] if ended else self._plan(self._start)[1]
                prefetch_factor = max(2, ceil_div(len(assigned), num_workers) + 1)
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

    def _tell_own_generators(self, reproducible: bool) -> None:
        """Add to the notice which of the dataset's own generators are seeded.

        One that can't be seeded is named.
        """
        found = self._reader.own_generators()
        if not found:
            return
        if unkeyed := [name for name, generator in found.items() if not can_be_seeded(generator)]:
            what = f"the data draw from {listed(unkeyed)}, which can't be seeded"
            fix = (
                "draw with random.random(), numpy.random or torch.rand: these are seeded for each"
                " sample"
            )
            if reproducible:
                raise UsageError(
                    what, where="distributed.reproducible", why="no run repeats another", fix=fix
                )
            text = f"warning: {what}: no run repeats another"
        else:
            text = (
                f"generators of the data's own ({listed(sorted(found))}) are seeded for each sample"
            )
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
            for window, assigned in self._planned():
                mine = [self._micro_batch(window, index, real) for index, real in assigned]
                self._plans.pop(window.step, None)
                count = len(window.micro_batches)
                yield StepBatches(
                    window.step, window.epoch, count, window.num_samples, window.last_of_epoch, mine
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
        ended = self._stop is not None and self._stop <= self._start
        evidence = DataEvidence(
            known_length(self._dataset),
            None if ended else order_checksum(self._plan(self._start)[0].micro_batches),
            probed,
        )
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
        indices = [self._reader.reading[number] for number in dead or range(len(workers))]
        nothing = "nothing (it was collating or waiting)"
        reading = ", ".join(f"dataset[{index}]" if index >= 0 else nothing for index in indices)

        def end_of(worker: Any) -> str:
            code = worker.exitcode
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
            return f"process {worker.pid} {how}"

        what = "a data worker died" if dead else "a data worker gave no answer"
        why = ", ".join(end_of(workers[number]) for number in dead) or text.splitlines()[0]
        fix = (
            "set data.num_workers: 0 to see the dataset's own error; a killed worker was often out"
            " of memory"
        )
        return RunError(
            what, where=f"while it read {reading}" if reading else None, why=why, fix=fix
        )

    def _planned(self) -> Iterator[_Plan]:
        """Yield the plan of each step that is left, up to the end of the run."""
        for step in (
            itertools.count(self._start) if self._stop is None else range(self._start, self._stop)
        ):
            window, assigned = self._plan(step)
            if self._epochs is not None and window.epoch >= self._epochs:  # started at the end
                return
            yield window, assigned
            if (
                self._epochs is not None
                and window.epoch == self._epochs - 1
                and window.last_of_epoch
            ):
                return

    def _plan(self, step: int) -> _Plan:
        # The sampler runs ahead of the steps, perhaps into the next epoch, so its plans are kept:
        # the order holds one epoch's samples only.
        if step not in self._plans:
            window = self.order.window(step)
            self._plans[step] = (window, self._assign(len(window.micro_batches)))
        return self._plans[step]

    def _received(self) -> Any:
        """Return what a worker sends next."""
        try:
            return next(self._running)
        except RuntimeError as error:
            raise (self.explain(error) or error) from None

    def _micro_batch(self, window: StepSamples, index: int, real: bool) -> MicroBatch:
        """Return a micro-batch of a step on the device: read here, or the next that is sent."""
        if not self._wanted:
            return MicroBatch(index, None, real)
        if self._reads_here:
            batch = self._reader[
                ReadRequest(window.step, window.epoch, index, window.micro_batches[index])
            ]
        else:
            batch = self._received()
        if isinstance(batch, ReadFailure):
            raise RunError(
                batch.what, where=batch.where, why=batch.why, fix=batch.fix
            ) from batch.cause
        placed = batch if self.device.type == "cpu" else move(batch, self.device)
        return MicroBatch(index, placed, real, num_tokens(batch))


class _Requests(Sampler[ReadRequest | ProbeRequest]):
    def __init__(self, loader: StepLoader) -> None:
        self._of = loader

    def __iter__(self) -> Iterator[ReadRequest | ProbeRequest]:
        if self._of._probes is not None:
            yield self._of._probes
        for window, assigned in self._of._planned():
            for index, _ in assigned:
                yield ReadRequest(window.step, window.epoch, index, window.micro_batches[index])


def _identity(batch: Any) -> Any:
    return batch
