"""Reading a micro-batch of a dataset, in whichever process.

What a sample holds is a function of (seed, epoch, dataset index), what a collate function draws of (seed, step,
micro-batch): see `seeding`. What the user's code raises comes back as a `Failure`, short enough for one message.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data import get_worker_info as worker_info

from lockstep.data.dataset import Collating
from lockstep.data.parcel import Parcel
from lockstep.data.seeding import outer_states_kept, seed_from

Collate = Callable[[list[Any]], Any]


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


class Reader(Dataset[Any]):
    """The user's dataset, asked for micro-batches; lives in the workers."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate | None, seed: int, num_workers: int) -> None:
        self.dataset = dataset
        self._collate: Collate = collate_fn or default_collate
        self._draws = not draws_nothing(dataset)
        self._collate_draws = collate_fn not in (None, default_collate)
        self._collated = None if collate_fn not in (None, default_collate) else collated_of(dataset)
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
        if self._collated is not None and not self._draws:
            return self._together(self._collated, request.indices)
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
            samples: list[Any] = self._together(lambda indices: list(together(indices)), request.indices)
            return samples
        if self._draws or self._reading is not None:
            samples = [self._sample(request.epoch, index) for index in request.indices]
        else:
            samples = []
            for self._at in request.indices:  # in `_at`, for the message if it fails
                samples.append(self.dataset[self._at])
        self._at = None
        self._mark(-1)
        return samples

    def _together(self, read: Callable[[list[int]], Any], indices: list[int]) -> Any:
        """All of them in one call."""
        self._mark(indices[0])
        try:
            result = read(indices)
            self._mark(-1)
            return result
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


def collated_of(dataset: Any) -> Collate | None:
    """What makes a micro-batch of the dataset in one go; None where a subclass reads samples in its own way."""

    def defined(name: str) -> int:
        return next(place for place, kind in enumerate(type(dataset).__mro__) if name in vars(kind))

    if isinstance(dataset, Collating) and defined("collated") <= defined("__getitem__"):
        return dataset.collated
    return None


def users_line(error: BaseException) -> str | None:
    """The deepest line of the traceback that is neither ours nor an installed package's: file:line, function, text."""
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
