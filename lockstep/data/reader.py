"""Reads a micro-batch of a dataset, in the training process or a worker.

The content of a sample is a function of (seed, epoch, dataset index), and a collate function draws from (seed, step,
micro-batch): see `seeding`. An error of the user's code is returned as a `ReadFailure`, short enough for one message.
"""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data import get_worker_info as worker_info

from lockstep.data.dataset import CollatingDataset
from lockstep.data.seeding import preserve_states, seed_from

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


class ReadFailure(NamedTuple):
    """The result in place of a batch if the user's code raised."""

    what: str
    where: str | None
    why: str
    cause: BaseException | None  # only within the same process


class Reader(Dataset[Any]):
    """Reads micro-batches of the user's dataset; lives in the workers."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate | None, seed: int, num_workers: int) -> None:
        self.dataset = dataset
        self._collate: Collate = collate_fn or default_collate
        self._draws = not draws_nothing(dataset)
        self._collate_draws = collate_fn not in (None, default_collate)
        self._collated = None if collate_fn not in (None, default_collate) else collated_of(dataset)
        self._seed = seed
        self._at: int | None = None
        # The index that each worker is reading, for the message if it dies.
        self._reading: Any = multiprocessing.RawArray("q", [-1] * num_workers) if num_workers else None

    def __getitem__(self, request: ReadRequest) -> Any:
        self._at = None
        try:
            batch = self._read(request)
        except Exception as error:
            return self._failure(error, request)
        return batch if worker_info() is None else InlineBatch(batch)

    def _read(self, request: ReadRequest) -> Any:
        if self._collated is not None and not self._draws:
            return self._together(self._collated, request.indices)
        if not self._draws and not self._collate_draws:
            return self._collate(self._samples(request))
        with preserve_states():
            samples = self._samples(request)
            seed_from("collate", self._seed, request.step, request.micro_batch)
            return self._collate(samples)

    def being_read(self, worker: int) -> str:
        """Return what the worker was reading last."""
        index = self._reading[worker]
        return f"dataset[{index}]" if index >= 0 else "nothing (it was collating or waiting)"

    def _samples(self, request: ReadRequest) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None and not self._draws:
            samples: list[Any] = self._together(lambda indices: list(together(indices)), request.indices)
            return samples
        if self._draws or self._reading is not None:
            samples = [self._sample(request.epoch, index) for index in request.indices]
        else:
            samples = []
            for self._at in request.indices:  # kept in `_at` for the message if it fails
                samples.append(self.dataset[self._at])
        self._at = None
        self._mark(-1)
        return samples

    def _together(self, read: Callable[[list[int]], Any], indices: list[int]) -> Any:
        """Read all of them in one call."""
        self._mark(indices[0])
        try:
            result = read(indices)
            self._mark(-1)
            return result
        except Exception:
            for self._at in indices:  # find the one that fails: a deterministic dataset fails again
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

    def _failure(self, error: Exception, request: ReadRequest) -> ReadFailure:
        if self._at is not None:
            what = f"dataset[{self._at}] failed"
        else:
            what = f"reading or collating the samples {_short(request.indices)} failed"
        cause = error if worker_info() is None else None
        return ReadFailure(what, users_line(error), f"{type(error).__name__}: {error}", cause)


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
    """Return the function that makes a micro-batch in one call; None if a subclass overrides how samples are read."""

    def defined(name: str) -> int:
        return next(place for place, kind in enumerate(type(dataset).__mro__) if name in vars(kind))

    if isinstance(dataset, CollatingDataset) and defined("collated") <= defined("__getitem__"):
        return dataset.collated
    return None


def users_line(error: BaseException) -> str | None:
    """Return the deepest line of the traceback in the user's own code: file:line, function, text."""
    here = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) != here]
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    if not (own or frames):
        return None
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")


def _short(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"[{shown}, … {len(indices)} in all]" if len(indices) > 8 else f"[{shown}]"


class InlineBatch:
    """Sends a batch from a worker to the training process, where it arrives as `batch` itself.

    torch moves every tensor through shared memory, passing a file descriptor over a socket: about 0.15 ms of the
    training process per tensor, more than a fast step can bear. A small tensor is faster inside the message itself, as
    a NumPy array: 0.02 ms for 16 KiB. Large ones are sent in torch's way, which copies less.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (bytes(_Pickler.dumps(self.batch)),)


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _small_and_plain(value):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented  # torch's way


def _small_and_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in _NUMPY_DTYPES
        and not tensor.requires_grad
        and not tensor.is_neg()
        and tensor.nbytes <= INLINE_LIMIT
    )
