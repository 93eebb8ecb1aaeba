"""Knows the loaders of a script: their samples, which are recorded, or exchanged for those fed.

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_compat import script_patches
from lockstep.torch_compat.pytree import tree_map_only
from lockstep.verify.own_lines import order_of, own_line
from lockstep.verify.script.observed.draws import BatchKey
from lockstep.verify.script.observed.values import fingerprint, generator_states, rows
from lockstep.verify.script.record import ScriptRecord, batch_file
from lockstep.verify.script.task import ScriptTask


class ObservedLoaders:
    """All loaders of a process, which read samples in the process itself.

    `read` is called for each batch.
    """

    def __init__(
        self, task: ScriptTask, record: ScriptRecord, rank: int, read: Callable[[], None]
    ) -> None:
        self._task = task
        self._record = record
        self._rank = rank
        self._made = 0
        self._read = read
        self.last: BatchKey | None = None  # the loader and index of the last batch
        self._unused: list[BatchKey] = []  # batches that no backward pass has come after
        self._evaluated: list[BatchKey] = []  # those of them that a model has evaluated
        self.sources: list[BatchKey] = []  # the rank and index of each part of that batch
        script_patches.patch_loaders(self._before, self._after)

    def _before(self, arguments: dict[str, Any]) -> None:
        for name in (
            "num_workers",
            "prefetch_factor",
            "persistent_workers",
            "multiprocessing_context",
            "timeout",
        ):
            arguments.pop(name, None)
        collate = arguments.get("collate_fn")
        loader = collate.loader if isinstance(collate, _Collate) else self._made
        size = arguments.get("batch_size", 1)
        if size is not None and arguments.get("batch_sampler") is None:
            self._record.asked.setdefault(loader, size)
            sizes = self._task.given.sizes
            if loader in sizes:
                arguments["batch_size"] = sizes[loader]

    def _after(self, loader: Any) -> None:
        """Give a loader a number, and let it give its batches through `_Collate`."""
        number = loader.collate_fn.loader if isinstance(loader.collate_fn, _Collate) else self._made
        with suppress(Exception):  # streams have no length
            in_data = len(loader.dataset)
            # A batch sampler of the script's own may give batches of any size.
            self._record.lengths.setdefault(number, (0, in_data))
            size = loader.batch_size or loader.batch_sampler.batch_size
            self._record.lengths[number] = (len(loader) * size, in_data)
        if number in self._task.given.lengths:
            say_length(loader, self._task.given.lengths[number])
        if getattr(loader.sampler, "replacement", False):
            self._record.replacing.add(number)
        if isinstance(loader.collate_fn, _Collate):
            return
        # The samples of a loader without batches are batches already.
        in_batches = loader.batch_sampler is not None
        loader.collate_fn = _Collate(
            loader.collate_fn, self, self._made, loader.dataset, in_batches=in_batches
        )
        self._record.lines.loaders[self._made] = order_of(loader) or own_line()
        self._made += 1

    @property
    def were_made(self) -> bool:
        """Return whether the script has made a loader."""
        return self._made > 0

    def take_unused(self) -> list[BatchKey]:
        """Return the batches that were read to train on since this was last called."""
        batches = [*self._evaluated, *self._unused]
        self._unused = []
        self._evaluated = []
        return batches

    def note_evaluation(self) -> None:
        """Note that a model evaluates the last batches.

        They are not trained on, unless a backward pass comes before others are read: the model may
        be a teacher.
        """
        self._evaluated += self._unused
        self._unused = []

    def note_data(self, loader: int, data: Any) -> None:
        """Note what tells the data of a loader from others, before its first batch is read."""
        if loader not in self._record.data:
            self._record.data[loader] = _print_of_data(data)

    def samples_of(self, loader: int, index: int, own: Any, *, in_batches: bool = True) -> Any:
        """Return the samples of a batch: the script's own, or those that are fed.

        Where a run is fed nothing, the script's own are stored.

        Args:
            loader: its number.
            index: of the batch.
            own: list of the samples that the script has read; or all of them in one, where the
                data are batches already.
            in_batches: whether it is a list of samples.
        """
        self._read()
        self._evaluated = []
        if torch.is_grad_enabled():
            self._unused.append((loader, index))
        self._record.lines.reads[loader] = own_line()
        samples = own
        task = self._task
        given = task.given
        self.last = (loader, index)
        self.sources = []
        if given.feed:
            wanted = given.feed.get((loader, index))
            if wanted is not None and given.by_rank:
                wanted = [(self._rank, number) for _, number in wanted]
            self.sources = list(wanted or ())
            if wanted is not None:
                assert given.samples is not None
                parts = [
                    pickle.loads(batch_file(given.samples, r, loader, i).read_bytes())
                    for r, i in wanted
                ]
                samples = list(chain.from_iterable(parts)) if in_batches else joined(parts)
        else:
            # samples that can't be pickled: the reference can't be given them
            with suppress(Exception):
                # A view would be stored with all that it is a view of.
                copied = tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), own)
                batch_file(task.folder, self._rank, loader, index).write_bytes(pickle.dumps(copied))
        read = self._record.batches.setdefault(loader, [])
        read.append([fingerprint(sample) for sample in samples] if in_batches else rows(samples))
        return samples


def say_length(loader: Any, batches: int) -> None:
    """Let `len` say that a loader has so many batches; it gives those that it has."""
    kind = type(loader)
    loader.__class__ = type(kind.__name__, (kind,), {"__len__": lambda _self: batches})


def number_of(loader: Any) -> int | None:
    """Return the number of a loader; None if it is not observed."""
    collate = getattr(loader, "collate_fn", None)
    return collate.loader if isinstance(collate, _Collate) else None


class _Collate:
    """Collates samples as the script's own function does.

    The samples are recorded or exchanged before that.
    """

    def __init__(
        self,
        function: Any,
        loaders: ObservedLoaders,
        loader: int,
        data: Any,
        *,
        in_batches: bool,
    ) -> None:
        self.function = function
        self.loaders = loaders
        self.loader = loader
        self.index = 0
        self._data = data
        self._in_batches = in_batches

    def __call__(self, samples: Any) -> Any:
        self.loaders.note_data(self.loader, self._data)
        index = self.index
        self.index += 1
        return self.function(
            self.loaders.samples_of(self.loader, index, samples, in_batches=self._in_batches)
        )


def joined(parts: Sequence[Any]) -> Any:
    """Return several batches as one, joined along the first dim of each of their tensors.

    Raises TypeError: they hold something else than tensors, arrays and lists.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        columns = [joined(column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        if any(isinstance(each, Tensor | np.ndarray | Mapping) for each in first):
            return [joined(column) for column in zip(*parts, strict=True)]
        return list(chain.from_iterable(parts))
    raise TypeError(f"batches of {type(first).__name__} can't be joined")


def _print_of_data(data: Any) -> str:
    """Return what tells data from others: the print of some samples; empty for a stream.

    They are read with the same random numbers on each rank, and the script's own are put back.
    """
    states = generator_states()
    try:
        random.setstate(random.Random(0).getstate())
        np.random.set_state(np.random.RandomState(0).get_state())
        torch.default_generator.manual_seed(0)
        positions = (0, len(data) // 2, len(data) - 1)
        return fingerprint([len(data), *(data[at] for at in positions)])
    except Exception:  # a stream, or data that are read otherwise
        return ""
    finally:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
