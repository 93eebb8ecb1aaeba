"""The data of a run: which steps are left, how many there are in all, and what of the run follows from that."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import read_state
from lockstep.config import require_equation
from lockstep.data import StepSource, adopt
from lockstep.trainer.changes import another_training
from lockstep.trainer.optimizing import scaled_rate, schedule_over, with_batch_size_of

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


def open_source(trainer: "Trainer", data: Any, epochs: int | None) -> tuple[StepSource, int | None]:
    """The steps that are left to do, and the number of the last one, where it is known; sets the schedule.

    Args:
        data: a dataset, a DataLoader, or an iterable of batches.
        epochs: in the whole run; unset: as the config says.

    Raises:
        UsageError: it can't be trained on, sizes contradict each other, or the schedule needs a number of steps.
    """
    trainer.cluster.check()
    take_batch_size(trainer, data)
    training = trainer.config.training
    require_equation(training, trainer.layout.batch_shares)
    epochs = epochs or (None if training.max_steps else training.num_train_epochs or 1)
    source = adopt(
        data, trainer.config.data, batch_size=training.batch_size, global_batch_size=trainer.global_batch_size,
        assign=trainer.placed.assign, start_step=trainer.step.progress.step, stop_step=training.max_steps,
        epochs=epochs, seed=training.seed, device=trainer.device, wanted=trainer.placed.wants_data,
        state=trainer.source_state,
    )  # fmt: skip
    _require_as_many_samples(trainer, source)
    total = _total(training.max_steps, source.steps_per_epoch, epochs)
    trainer.step.schedule = trainer.user_schedule or schedule_over(
        training, total, own_optimizer=not trainer.scales_rate
    )
    trainer.step.total = total or 0
    if source.notice:
        trainer.start_lines.append(source.notice)
    return source, total


def _require_as_many_samples(trainer: "Trainer", source: StepSource) -> None:
    """Refuse data of another length than those of the run that is gone on with: their order is another one too."""
    trainer.steps_per_epoch = source.steps_per_epoch
    if trainer.resumed_from is None or trainer.config.checkpoint.allow_changes:
        return
    found, trainer.resumed_from = trainer.resumed_from, None
    saved, now = read_state(found), source.steps_per_epoch
    before = saved.get("steps_per_epoch")
    if before is None or now is None or saved.get("global_batch_size") != trainer.global_batch_size:
        return
    if before != now:
        source.close()
        raise another_training(f"an epoch of the data had {before} steps, and has {now} now", found)


def _total(max_steps: int | None, per_epoch: int | None, epochs: int | None) -> int | None:
    """The steps of the whole run, whichever bound comes first; None where nobody knows before the data end."""
    by_epochs = per_epoch * epochs if per_epoch and epochs else None
    return min((bound for bound in (max_steps, by_epochs) if bound is not None), default=None)


def take_batch_size(trainer: "Trainer", data: Any) -> None:
    """A DataLoader's own batch size may stand; the learning rate follows its rule."""
    config = with_batch_size_of(data, trainer.config)
    if config is trainer.config:
        return
    trainer.config = config
    if trainer.scales_rate:
        rate, trainer.rate_line = scaled_rate(config.training, trainer.global_batch_size)
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = rate


@contextmanager
def worker_deaths_explained(source: StepSource) -> Iterator[None]:
    """Inside, torch's word that a data worker died, which it raises wherever the loop is, says what was being read."""
    try:
        yield
    except RuntimeError as error:
        explain = getattr(source, "explain", None)
        explained = explain(error) if explain is not None else None
        if explained is None:
            raise
        raise explained from None
