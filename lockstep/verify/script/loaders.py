"""Records the samples that a script's loaders read, and gives one process the samples of several ranks."""

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.torch_compat import script_patches
from lockstep.verify.script.record import ScriptRecord, batch_file
from lockstep.verify.script.values import copied, fingerprint


class ObservedLoaders:
    """All loaders of a process; they read samples in the process itself.

    Args:
        folder: receives the samples.
        feed: (loader, batch) → the recorded batches (rank, index) whose samples it gets together.
        samples: the folder of the records that `feed` names.
        sizes: loader → batch size with which it is made.
        read: is called for each batch.
    """

    def __init__(
        self, record: ScriptRecord, rank: int, folder: Path, feed: Mapping[tuple[int, int], list[tuple[int, int]]],
        samples: Path | None, sizes: Mapping[int, int],
        read: Callable[[], None],
    ) -> None:  # fmt: skip
        self.record, self.rank, self.folder = record, rank, folder
        self.feed, self.samples, self.sizes = feed, samples, sizes
        self._made, self._read = 0, read
        script_patches.patch_loaders(self._before, self._after)

    def _before(self, arguments: dict[str, Any]) -> None:
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            arguments.pop(name, None)
        collate = arguments.get("collate_fn")
        loader = collate.loader if isinstance(collate, _Collate) else self._made
        size = arguments.get("batch_size", 1)
        if size is not None and arguments.get("batch_sampler") is None:
            self.record.asked.setdefault(loader, size)
            if loader in self.sizes:
                arguments["batch_size"] = self.sizes[loader]

    def _after(self, loader: Any) -> None:
        number = loader.collate_fn.loader if isinstance(loader.collate_fn, _Collate) else self._made
        with suppress(Exception):  # streams have no length
            size = loader.batch_size or loader.batch_sampler.batch_size
            self.record.lengths[number] = (len(loader) * size, len(loader.dataset))
        if isinstance(loader.collate_fn, _Collate):
            return
        loader.collate_fn = _Collate(loader.collate_fn, self, self._made)
        self._made += 1

    def samples_of(self, loader: int, index: int, own: Any) -> Any:
        """Return the samples of a batch: the script's own, which are stored, or those that are fed."""
        self._read()
        samples = own
        if self.feed:
            wanted = self.feed.get((loader, index))
            if wanted is not None:
                assert self.samples is not None
                parts = [pickle.loads(batch_file(self.samples, r, loader, i).read_bytes()) for r, i in wanted]
                samples = [sample for part in parts for sample in part]
        else:
            with suppress(Exception):  # samples that can't be pickled: the reference can't be given them
                stored = pickle.dumps(copied(own))
                batch_file(self.folder, self.rank, loader, index).write_bytes(stored)
        read = self.record.batches.setdefault(loader, [])
        read.append([fingerprint(sample) for sample in samples] if isinstance(samples, list) else [])
        return samples


class _Collate:
    """Puts samples together as the script's own function does, after it has recorded or exchanged them."""

    def __init__(self, function: Any, loaders: ObservedLoaders, loader: int) -> None:
        self.function, self.loaders, self.loader, self.index = function, loaders, loader, 0

    def __call__(self, samples: Any) -> Any:
        index = self.index
        self.index += 1
        return self.function(self.loaders.samples_of(self.loader, index, samples))
