"""Turns data that a user hands to the trainer into a source of steps.

- A dataset, or a DataLoader that samples it in a usual way: the order is ours (`SampleOrder`), or
  that of the dataset's own method `epoch_order`, as a mixture of sources has; the loader's dataset,
  collate_fn and workers are kept.
- A DataLoader with a sampler or batch sampler of the user's own: its order; each rank reads its
  micro-batches of it.
- Any other iterable: every rank iterates it and keeps its micro-batches (`IterableSteps`).
"""

import warnings
from dataclasses import dataclass, field, replace
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
from lockstep.data.agreement import several_ranks
from lockstep.data.batches import Assign, BatchSizes, SourceSettings, StepSource
from lockstep.data.iterable import IterableSteps
from lockstep.data.loader import StepLoader
from lockstep.data.order import (
    DistributedSampler,
    Order,
    SampleOrder,
    SamplerOrder,
    check_batch_sizes,
)
from lockstep.data.permutation import EpochOrder
from lockstep.errors import UsageError
from lockstep.process_group import collectives
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


def adopt(
    data: Any,
    sizes: BatchSizes,
    assign: Assign,
    settings: SourceSettings,
    config: DataConfig | None = None,
    *,
    state: dict[str, Any] | None = None,
    for_evaluation: bool = False,
) -> StepSource:
    """Return the steps of a user's data that the settings name.

    With `for_evaluation` every sample is taken once, even if a DataLoader drops some, and the
    DataLoader's own batch_size counts, with as many micro-batches in a step. In training its
    batch_size must agree.

    Args:
        data: a dataset (`__getitem__` and `__len__`, or an IterableDataset of samples), a
            DataLoader, or any other iterable of ready batches, such as a plain list.
        sizes: of micro-batches and steps; for ready batches the quotient counts.
        assign: says which micro-batches of a step this rank runs.
        settings: which steps, from which seed, for which device.
        config: order and workers, but a DataLoader has its own.
        state: the source's `state_dict` from when the run was saved.
        for_evaluation: whether the data are gone through to be evaluated.

    Raises:
        UsageError: the data can't be used.
    """
    check_batch_sizes(sizes.batch_size, sizes.global_batch_size)
    config = config or DataConfig()
    user_data = _understand(data, config)
    if for_evaluation:
        user_data = replace(user_data, drop_last=False)
    if user_data.batch_size is not None and user_data.batch_size != sizes.batch_size:
        if not for_evaluation:
            raise _other_batch_size(user_data.batch_size, sizes.batch_size)
        sizes = sizes.with_batch_size(user_data.batch_size)

    sharded = _is_rank_sharded(user_data.data, user_data.batch_sampler)
    if sharded and not user_data.iterated:
        own_loader = _own_loader(data, user_data, sizes.batch_size)
        user_data = replace(user_data, data=own_loader, ready=True, iterated=True)

    settings = replace(
        settings,
        notice=user_data.notice,
        compares=settings.reproducible or several_ranks(),
    )
    if user_data.iterated:
        return IterableSteps(
            user_data.data,
            sizes.batch_size,
            sizes.global_batch_size,
            assign,
            settings,
            ready=user_data.ready,
            state=state,
            any_left=_on_any_rank if sharded else None,
        )
    order: Order
    if user_data.batch_sampler is not None:
        order = SamplerOrder(
            user_data.batch_sampler, sizes.micro_batches_per_step, seed=settings.seed
        )
    else:
        epoch_order = None if for_evaluation else _epoch_order(user_data, settings.seed)
        order = SampleOrder(
            len(user_data.data) if epoch_order is None else epoch_order.num_samples,
            sizes.batch_size,
            sizes.global_batch_size,
            seed=settings.seed,
            shuffle=user_data.shuffle,
            drop_last=user_data.drop_last,
            order=epoch_order or _order_of(config.order, state, settings.start_step),
        )
    return StepLoader(user_data.data, order, assign, settings, **user_data.reading)


def _other_batch_size(of_loader: int, of_config: int) -> UsageError:
    """Return the error for a DataLoader whose batch size is not that of the training."""
    return UsageError(
        f"the DataLoader has batch_size {of_loader}, training.batch_size is {of_config}",
        where="the training data",
        why="both mean the samples in a micro-batch",
        fix=f"give the trainer batch_size={of_loader}",
    )


def _on_any_rank(condition: bool) -> bool:
    """Return whether a condition holds on any rank; all ranks call it together."""
    return bool(collectives.all_reduce(float(condition), op="max"))


def _epoch_order(user_data: "_UserData", seed: int) -> EpochOrder | None:
    """Return the order that the dataset itself gives its samples; None if it gives none."""
    if not hasattr(user_data.data, "epoch_order"):
        return None
    order: EpochOrder | None = user_data.data.epoch_order(seed, shuffle=user_data.shuffle)
    return order


def _order_of(wanted: str, state: dict[str, Any] | None, start_step: int) -> str:
    """Return the name of the order: the config's, or else the one with which the run began.

    Runs whose checkpoints name none have begun with `randperm`.
    """
    if wanted != "auto" or start_step == 0:
        return wanted
    recorded: str = (state or {}).get("order", "randperm")
    return recorded


@dataclass(frozen=True)
class _UserData:
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


def _understand(data: Any, config: DataConfig) -> _UserData:
    """Find out what kind of data was given, and how it is to be read."""
    if isinstance(data, DataLoader):
        return _loader(data)
    hugging_face_stream = type(data).__module__.startswith("datasets.") and not hasattr(
        data, "__getitem__"
    )
    if isinstance(data, IterableDataset) or hugging_face_stream:
        notice = (
            "an iterable dataset is read in the training process; give a DataLoader to read it in"
            " workers"
        )
        return _UserData(data, iterated=True, notice=notice if config.num_workers else None)
    require_data(data)
    has_length = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, list | tuple) or not has_length:
        _warn_of_samples(data)
        return _UserData(data, iterated=True, ready=True)
    reading = {name: getattr(config, name) for name in _OF_THE_CONFIG}
    return _UserData(data, shuffle=config.shuffle, drop_last=config.drop_last, reading=reading)


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
    """Return whether this is (inputs, targets) of all samples.

    These are two tensors of as many rows that can't be batches.
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
    """Warn of a list whose first item looks like a sample.

    No two tensors of it have as many rows.
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


def _loader(loader: DataLoader[Any]) -> _UserData:
    """Take a DataLoader apart.

    Read are its data set, its options, and a sampler if it has one of its own.
    """
    batch_size = loader.batch_size
    dataset = loader.dataset
    notice: str | None = None
    if loader.batch_sampler is None or isinstance(dataset, IterableDataset):
        if not _is_rank_sharded(loader):
            notice = f"every rank reads all of {type(dataset).__name__} and keeps its micro-batches"
        return _UserData(loader, batch_size, iterated=True, ready=True, notice=notice)
    reading = {name: getattr(loader, name) for name in _OF_A_LOADER}
    shuffle = usual_order(loader)
    if shuffle is None:
        sampler = loader.batch_sampler if batch_size is None else loader.sampler
        notice = (
            f"the order is that of {type(sampler).__name__}: every rank goes through all of it and"
            " reads its micro-batches"
        )
        return _UserData(
            dataset,
            batch_size,
            batch_sampler=loader.batch_sampler,
            reading=reading,
            notice=notice,
        )
    if isinstance(loader.sampler, TorchDistributedSampler | DistributedSampler):
        notice = "the DistributedSampler is not used: the trainer itself assigns samples to ranks"
    return _UserData(
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


def _is_rank_sharded(*holders: Any) -> bool:
    """Return whether one of these says that each rank has data of its own.

    The dataset or the sampler in it may say so, too.
    """
    parts = [getattr(holder, name, None) for holder in holders for name in ("dataset", "sampler")]
    return any(getattr(each, "rank_sharded", False) for each in (*holders, *parts))


def _own_loader(data: Any, user_data: _UserData, batch_size: int) -> DataLoader[Any]:
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
