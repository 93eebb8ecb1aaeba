"""Finds out what kind of data a user has given, and refuses what can't be read.

    a DataLoader      its data set, options and workers; its order, if that is a usual one
    a data set        whose items are samples, read by the config's options
    an iterable       of samples, as a stream, or of batches that are ready

Tests: tests/data/test_adopt.py
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from lockstep.config import DataConfig
from lockstep.data.order import DistributedSampler
from lockstep.errors import UsageError
from lockstep.torch_compat.pytree import tree_leaves

# How data are read: settings of the config, and those of a DataLoader.
_OF_THE_CONFIG = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_OF_A_LOADER = (
    *_OF_THE_CONFIG,
    "collate_fn",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
)


@dataclass(frozen=True)
class UserData:
    """The data that a user has given, and the way in which they are read."""

    data: Any  # the dataset or the iterable
    batch_size: int | None = None  # of a DataLoader
    shuffle: bool = True
    drop_last: bool = False
    iterated: bool = False  # it can only be iterated
    ready: bool = False  # with `iterated`: the items are batches
    batch_sampler: Any = None  # the user's own one
    reading: dict[str, Any] = field(default_factory=dict)  # arguments of StepLoader
    notice: str | None = None


def understand(data: Any, config: DataConfig) -> UserData:
    """Find out what kind of data was given, and how it is to be read."""
    if isinstance(data, DataLoader):
        return _taken_apart(data)
    hugging_face_stream = type(data).__module__.startswith("datasets.") and not hasattr(
        data, "__getitem__"
    )
    if isinstance(data, IterableDataset) or hugging_face_stream:
        notice = (
            "an iterable dataset is read in the training process; give a DataLoader to read it in"
            " workers"
        )
        return UserData(data, iterated=True, notice=notice if config.num_workers else None)
    require_data(data)
    has_length = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, list | tuple) or not has_length:
        _warn_of_samples(data)
        return UserData(data, iterated=True, ready=True)
    reading = {name: getattr(config, name) for name in _OF_THE_CONFIG}
    return UserData(data, shuffle=config.shuffle, drop_last=config.drop_last, reading=reading)


def _taken_apart(loader: DataLoader[Any]) -> UserData:
    """Return the data set of a DataLoader, its options, and a sampler of the user's own."""
    batch_size = loader.batch_size
    dataset = loader.dataset
    notice: str | None = None
    if loader.batch_sampler is None or isinstance(dataset, IterableDataset):
        if not is_rank_sharded(loader):
            notice = f"every rank reads all of {type(dataset).__name__} and keeps its micro-batches"
        return UserData(loader, batch_size, iterated=True, ready=True, notice=notice)
    reading = {name: getattr(loader, name) for name in _OF_A_LOADER}
    shuffle = usual_order(loader)
    if shuffle is None:
        sampler = loader.batch_sampler if batch_size is None else loader.sampler
        notice = (
            f"the order is that of {type(sampler).__name__}: every rank goes through all of it and"
            " reads its micro-batches"
        )
        return UserData(
            dataset,
            batch_size,
            batch_sampler=loader.batch_sampler,
            reading=reading,
            notice=notice,
        )
    if isinstance(loader.sampler, TorchDistributedSampler | DistributedSampler):
        notice = "the DistributedSampler is not used: the trainer itself assigns samples to ranks"
    return UserData(
        dataset,
        batch_size,
        shuffle=shuffle,
        drop_last=loader.drop_last,
        reading=reading,
        notice=notice,
    )


def usual_order(loader: DataLoader[Any]) -> bool | None:
    """Return whether the loader shuffles, if `SampleOrder` can replace its order; else None."""
    sampler = loader.sampler
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(sampler) is SequentialSampler:
        return False
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return True
    if type(sampler) in (TorchDistributedSampler, DistributedSampler):
        return bool(sampler.shuffle)  # type: ignore[attr-defined]
    return None


def is_rank_sharded(*holders: Any) -> bool:
    """Return whether one of these says that each rank has data of its own.

    The dataset or the sampler in it may say so, too.
    """
    parts = [getattr(holder, name, None) for holder in holders for name in ("dataset", "sampler")]
    return any(getattr(each, "rank_sharded", False) for each in (*holders, *parts))


def own_loader(data: Any, user_data: UserData, batch_size: int) -> DataLoader[Any]:
    """Return a loader of a dataset that is this rank's own: the user's, or one by the config."""
    if isinstance(data, DataLoader):
        return data
    return DataLoader(
        data,
        batch_size,
        shuffle=user_data.shuffle,
        drop_last=user_data.drop_last,
        **user_data.reading,
    )


def require_data(data: Any) -> None:
    """Raise a UsageError if this is not data that can be read.

    It can't be iterated, or it is one batch instead of many.
    """
    can_be_read = hasattr(data, "__iter__") or (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    )
    is_other = isinstance(data, torch.Tensor | dict | str | bytes | type)
    if is_other or not (can_be_read or isinstance(data, DataLoader)) or _is_a_pair_of_columns(data):
        raise _no_data(data)


def _is_a_pair_of_columns(data: Any) -> bool:
    """Return whether this is a pair (inputs, targets) of all samples, and no list of batches.

    Both have the same number of rows, and another number of dims.
    """
    if not (
        isinstance(data, list | tuple)
        and len(data) == 2
        and all(hasattr(column, "shape") for column in data)
    ):
        return False
    inputs, targets = data
    return bool(
        inputs.shape[:1] == targets.shape[:1] != () and len(inputs.shape) != len(targets.shape)
    )


def _no_data(data: Any) -> UsageError:
    """Return the error for what is not a data set, with what to write in its place."""
    fix = (
        "give a dataset, a DataLoader or an iterable of batches (for tensors:"
        " torch.utils.data.TensorDataset)"
    )
    what = f"data of type {type(data).__name__} can't be trained on"
    if isinstance(data, type):
        what = f"the data are the class {data.__name__}"
        fix = f"make an object of it: {data.__name__}(…)"
    elif callable(data):
        name = getattr(data, "__name__", "function")
        what = f"the data are the function {name}"
        fix = f"call it: train({name}()); each item is then a batch"
    elif isinstance(data, str):
        what = f"the text {data!r:.60} can't be trained on"
        fix = (
            "read the file into a torch.utils.data.Dataset; names of data belong into a config's"
            " key data.name"
        )
    elif isinstance(data, list | tuple):
        what = "the data are two tensors: all inputs and all targets"
        fix = "write torch.utils.data.TensorDataset(inputs, targets), whose items are samples"
    return UsageError(what, where="the training or validation data", fix=fix)


def _warn_of_samples(data: Any) -> None:
    """Warn of a list whose first item looks like one sample, and not like a batch.

    The tensors of a batch have the same number of rows. Those of a sample rarely do.
    """
    if not (isinstance(data, list | tuple) and data):
        return
    leaves = [leaf for leaf in tree_leaves(data[0]) if isinstance(leaf, torch.Tensor | int | float)]
    rows = [len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    one_of_some = len(leaves) > 1 and len(set(rows)) == len(rows)
    if one_of_some or (leaves and not rows):
        warnings.warn(
            f"each item of a {type(data).__name__} is taken as a batch, and the first looks like"
            " one sample\n  do: for samples give torch.utils.data.DataLoader(data, batch_size=…)",
            stacklevel=2,
        )
