"""Turns data that a user hands to the trainer into a source of steps.

- A dataset, or a DataLoader that samples it in a usual way: the order is ours (`SampleOrder`), or
  that of the dataset's own method `epoch_order`, as a mixture of sources has; the loader's dataset,
  collate_fn and workers are kept.
- A DataLoader with a sampler or batch sampler of the user's own: its order; each rank reads its
  micro-batches of it.
- Any other iterable: every rank iterates it and keeps its micro-batches (`IterableSteps`).
"""

from dataclasses import replace
from typing import Any

from lockstep.config import DataConfig
from lockstep.data.agreement import several_ranks
from lockstep.data.batches import Assign, BatchSizes, SourceSettings, StepSource
from lockstep.data.iterable import IterableSteps
from lockstep.data.loader import StepLoader
from lockstep.data.order import SampleOrder, SamplerOrder, check_batch_sizes
from lockstep.data.permutation import EpochOrder
from lockstep.data.user_data import UserData, is_rank_sharded, own_loader, understand
from lockstep.errors import UsageError
from lockstep.process_group import collectives


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
    user_data = understand(data, config)
    if for_evaluation:
        user_data = replace(user_data, drop_last=False)
    if user_data.batch_size is not None and user_data.batch_size != sizes.batch_size:
        if not for_evaluation:
            raise _other_batch_size(user_data.batch_size, sizes.batch_size)
        sizes = sizes.with_batch_size(user_data.batch_size)

    sharded = is_rank_sharded(user_data.data, user_data.batch_sampler)
    if sharded and not user_data.iterated:
        loader = own_loader(data, user_data, sizes.batch_size)
        user_data = replace(user_data, data=loader, ready=True, iterated=True)

    compares = settings.reproducible or several_ranks()
    settings = replace(settings, notice=user_data.notice, compares=compares)
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
    if user_data.batch_sampler is not None:
        of_sampler = SamplerOrder(
            user_data.batch_sampler, sizes.micro_batches_per_step, seed=settings.seed
        )
        return StepLoader(user_data.data, of_sampler, assign, settings, **user_data.reading)

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


def _epoch_order(user_data: UserData, seed: int) -> EpochOrder | None:
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
