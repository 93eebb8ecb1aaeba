"""Opens the training data: their batch size, their steps, and the number of the last one.

Tests: tests/trainer/test_loops.py, tests/trainer/test_settings.py
"""

from typing import Any

from torch.utils.data import DataLoader

from lockstep.config import Config, TrainingConfig, require_equation
from lockstep.data import (
    BatchSizes,
    SourceSettings,
    StepSource,
    adopt,
    counted_samples,
    require_data,
)
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.parallel_model import ParallelModel


def global_batch_size(training: TrainingConfig, layout: Layout) -> int:
    """Return the samples in a full step, over all ranks."""
    return (
        training.global_batch_size
        or training.batch_size * layout.batch_shares * training.accumulation
    )


def with_batch_size_of(data: Any, config: Config) -> Config:
    """Return the config with the data's batch size, if the settings have none.

    The data are a DataLoader, or a list of batches.
    """
    require_data(data)
    own = (
        getattr(data, "batch_size", None) if isinstance(data, DataLoader) else _size_of_first(data)
    )
    if own is None or own == config.training.batch_size:
        return config
    if "batch_size" in config.training.model_fields_set:
        if isinstance(data, DataLoader):  # it is compared where its order is taken over
            return config
        what = (
            f"the first batch has {own} samples, and training.batch_size is"
            f" {config.training.batch_size}"
        )
        fix = f"give the trainer batch_size={own}, or batches of {config.training.batch_size}"
        raise UsageError(
            what, where="the training data", why="both mean the samples in a micro-batch", fix=fix
        )
    if config.training.batch_norm_samples is not None:  # the ranks of a row have been counted
        what = (
            "batch_norm_samples is made of micro-batches of batch_size, and the DataLoader has its"
            f" own: {own}"
        )
        raise UsageError(
            what, where="training.batch_norm_samples", fix=f"give the trainer batch_size={own}, too"
        )
    total = config.training.global_batch_size
    if total is not None and total % own:
        equation = f"{total} = {total // own} × {own} + {total % own}"
        more = (total // own + 1) * own
        what = (
            f"global_batch_size {total} is not a multiple of the DataLoader's batch_size {own}:"
            f" {equation}"
        )
        why = "a step is made of whole micro-batches of batch_size samples"
        fix = (
            f"give the DataLoader a batch_size that divides {total}, or the trainer"
            f" global_batch_size={more}"
        )
        raise UsageError(what, where="the training data", why=why, fix=fix)
    return config.replaced({"training.batch_size": own})


def _size_of_first(data: Any) -> int | None:
    """Return the samples in the first batch of a list of batches.

    None for other data, and of batches without any.
    """
    return counted_samples(data[0]) if isinstance(data, list | tuple) and data else None


def require_one_length(config: Config, epochs: int | None) -> None:
    """Reject `epochs` in a call beside another number of epochs in the settings."""
    length = config.training.num_train_epochs
    if epochs is not None and length is not None and epochs != length:
        what = f"the run can't have both {length} epochs and {epochs}"
        raise UsageError(
            what, where="training.num_train_epochs, epochs=", fix="keep one of the two"
        )


def data_workers(data: Any, config: Config) -> int:
    """Return how many workers read the data: a DataLoader's own number, or the config's."""
    if isinstance(data, DataLoader):
        return data.num_workers
    return (
        config.data.num_workers
        if hasattr(data, "__getitem__") and not isinstance(data, list | tuple)
        else 0
    )


def open_source(
    data: Any,
    config: Config,
    placed: ParallelModel,
    *,
    epochs: int | None,
    global_batch_size: int,
    start_step: int,
    position: dict[str, Any],
) -> tuple[StepSource, int | None]:
    """Return the steps from `start_step` on, and the number of the last one, if it is known.

    `epochs` (unset: the config's) are those of the whole run; `position` counts if it does not
    follow from the steps.
    """
    training = config.training
    require_equation(training, placed.layout.batch_shares)
    epochs = epochs or (None if training.max_steps else training.num_train_epochs or 1)
    settings = SourceSettings(
        start_step=start_step,
        stop_step=training.max_steps,
        seed=training.seed,
        device=placed.random_state.device,
        epochs=epochs,
        wanted=placed.wants_data,
        reproducible=placed.reproducible,
    )
    sizes = BatchSizes(training.batch_size, global_batch_size)
    source = adopt(data, sizes, placed.assign, settings, config.data, state=position)
    by_epochs = source.steps_per_epoch * epochs if source.steps_per_epoch and epochs else None
    bounds = [bound for bound in (training.max_steps, by_epochs) if bound is not None]
    return source, min(bounds, default=None)  # unknown if only the end of the data shows it
