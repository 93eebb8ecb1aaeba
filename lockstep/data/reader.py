"""Reads micro-batches of a map-style dataset: what runs in the data workers.

A worker is asked for a whole micro-batch (`ReadRequest`) and returns it collated, or why it can't
(`ReadFailure`). The content of a sample is a function of (seed, epoch, dataset index), and a
collate function draws from (seed, step, micro-batch): before each of them the generators of Python,
NumPy and torch are seeded, and those that the data have of their own. Data that are known to draw
nothing are read without seeds, and at once where they can be.

Tests: tests/data/test_late_draws.py, tests/data/test_datasets.py, tests/data/test_loader.py
"""

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data import get_worker_info as worker_info

from lockstep.data.agreement import Probed
from lockstep.data.batches import CollatingDataset
from lockstep.data.fingerprint import summary
from lockstep.data.generators import generators_of, preserve, seed_generators
from lockstep.data.mistakes import advice, collate_by_default, users_line
from lockstep.errors import RunError
from lockstep.heartbeat.writer import recorder_of_work, went_forward
from lockstep.host_draws import HostGenerators, have_moved, host_generators, restore_host_generators
from lockstep.randomness import preserve_states, seed_from, seed_torch_from

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

    They are read where all samples are, since a dataset may open its files there.
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
        # the dataset's and the collate function's own, and the epoch in which they were looked for
        self._generators: dict[str, Any] = {}
        self._generators_of_epoch: int | None = None
        self._is_first = True  # in this process
        # whether one has drawn from Python's or NumPy's generator; None: no micro-batch was read
        self._drew_on_host: bool | None = None
        # Python's and NumPy's generators as they were seeded last, while draws are noted
        self._as_seeded: HostGenerators | None = None
        self._index: int | None = None  # of the sample that is being read, for an error's message
        # The index that each worker is reading, for the message if it dies: the training process
        # sees it, too.
        self.reading: Any = (
            multiprocessing.RawArray("q", [-1] * num_workers) if num_workers else None
        )

    def __getitem__(self, request: ReadRequest | ProbeRequest) -> Any:
        """Return a collated micro-batch, or `ReadFailure`; of a `ProbeRequest` the summaries."""
        if isinstance(request, ProbeRequest):
            probed = [self._probe(index) for index in request.indices]
            return [each for each in probed if each is not None]
        self._index = None
        try:
            batch = self._read(request)
        except RunError as error:
            return ReadFailure(error.what, error.where, error.why or "", None, error.fix)
        except Exception as error:
            return self._failure(request, error)
        return batch if worker_info() is None else InlineBatch(batch)

    def _failure(self, request: ReadRequest, error: Exception) -> ReadFailure:
        """Return what the user's code raised, with the sample that was being read."""
        what = f"dataset[{self._index}] failed"
        if self._index is None:
            indices = ", ".join(map(str, request.indices[:8]))
            if len(request.indices) > 8:
                indices += f", … {len(request.indices)} in all"
            what = f"reading or collating the samples [{indices}] failed"
        return ReadFailure(
            what,
            users_line(error),
            f"{type(error).__name__}: {error}",
            cause=error if worker_info() is None else None,
            fix=advice(error),
        )

    def _read(self, request: ReadRequest) -> Any:
        """Read one micro-batch, with the seeds that its epoch and its samples fix."""
        if self._collated is not None and not self._draws:
            return self._read_at_once(self._collated, request.indices)
        if not self._draws and not self._collate_draws:
            return self._collate_samples(self._samples(request), request)
        if self._generators_of_epoch != request.epoch:  # `set_epoch` may have made others
            self._generators = self.own_generators()
            self._generators_of_epoch = request.epoch
        if self._generators:
            with preserve(self._generators):
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
        if self._drew_on_host is False and not self._generators:
            before = host_generators()
            before_of_torch = torch.get_rng_state()
            try:
                batch = self._seed_and_read(request)
            except Exception:
                if not have_moved(before):
                    raise
            else:
                if not have_moved(before):
                    return batch
            finally:
                torch.set_rng_state(before_of_torch)
            restore_host_generators(before)
            self._drew_on_host = True
        with preserve_states():
            batch = self._seed_and_read(request)
            self._note_draws()
        self._drew_on_host = bool(self._drew_on_host)
        return batch

    def _seed_and_read(self, request: ReadRequest) -> Any:
        """Read and collate a micro-batch; the collate function has a seed of its own."""
        samples = self._samples(request)
        self._seed_all("collate", self._seed, request.step, request.micro_batch)
        return self._collate_samples(samples, request)

    def _note_draws(self) -> None:
        """Note whether Python's or NumPy's generator was used since it was seeded."""
        if self._as_seeded is not None and have_moved(self._as_seeded):
            self._drew_on_host = True
        self._as_seeded = None

    def _collate_samples(self, samples: list[Any], request: ReadRequest) -> Any:
        if self._collate_draws:
            return self._collate(samples)
        return collate_by_default(
            samples, lambda: [f"dataset[{index}]" for index in request.indices]
        )

    def _probe(self, index: int) -> Probed | None:
        """Return two summaries of a sample; None if it can't be read, which its step will say."""
        request = ReadRequest(0, 0, 0, [index])

        def read() -> Any:
            with preserve_states(), preserve(self._generators):
                return summary(self._samples(request))

        try:
            self._generators = self.own_generators()
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
        """Seed every generator that code of the data may draw from, by a key."""
        self._note_draws()
        if self._drew_on_host is False and not self._generators:
            seed_torch_from(*parts)
            return
        seed_from(*parts)
        if self._generators:
            seed_generators(self._generators, *parts)
        if self._drew_on_host is None:
            self._as_seeded = host_generators()

    def _samples(self, request: ReadRequest) -> list[Any]:
        """Read the samples one by one, or in one call where the data set offers `__getitems__`."""
        get_items = getattr(self.dataset, "__getitems__", None)
        if get_items is not None and not self._draws:
            samples: list[Any] = self._read_at_once(
                lambda indices: list(get_items(indices)), request.indices
            )
            return samples
        samples = []
        record_work = recorder_of_work()
        for index in request.indices:
            self._index = index
            if self.reading is not None:
                self._mark(index)
            if self._generators or self._draws:
                self._seed_all("sample", self._seed, request.epoch, index)
            samples.append(self.dataset[index])
            if self._is_first:
                samples[0] = self._read_again_if_new(request.epoch, index, samples[0])
            if record_work is not None:
                record_work()
        self._note_draws()
        self._index = None
        self._mark(-1)
        return samples

    def _read_again_if_new(self, epoch: int, index: int, sample: Any) -> Any:
        """Return the process's first sample.

        It is read again if reading it has made a generator: that was not seeded.
        """
        self._is_first = False
        if not self._draws:
            return sample
        generators = self.own_generators()
        if generators.keys() == self._generators.keys():
            return sample
        self._generators = generators
        self._seed_all("sample", self._seed, epoch, index)
        return self.dataset[index]

    def _read_at_once(self, read: Callable[[list[int]], Any], indices: list[int]) -> Any:
        """Call a function that reads all samples at once.

        If it fails, find the sample that does: a deterministic dataset fails again.
        """
        self._mark(indices[0])
        try:
            result = read(indices)
            went_forward()
            self._mark(-1)
            return result
        except Exception:
            for index in indices:
                self._index = index
                read([index])
            self._index = None
            raise

    def _mark(self, index: int) -> None:
        """Note in a worker which index it reads; -1: none."""
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

    def distance(name: str) -> int:
        """Return how far up the method resolution order a method is defined."""
        classes = type(dataset).__mro__
        return next(index for index, cls in enumerate(classes) if name in vars(cls))

    if isinstance(dataset, CollatingDataset) and distance("collated") <= distance("__getitem__"):
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
        is_plain = value.dtype in _NUMPY_DTYPES and not value.requires_grad and not value.is_neg()
        if is_plain and value.nbytes <= INLINE_LIMIT:
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented
