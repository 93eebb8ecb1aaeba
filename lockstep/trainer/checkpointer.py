"""Decides when a run is saved, which checkpoints are kept, where it resumes, and where it rolls back to.

A run that resumes with other samples or another model is another training; a learning rate or a
number of steps may be changed on purpose. So its settings are compared with those of the
checkpoint.

Tests: tests/trainer/test_resume.py, tests/trainer/test_ends.py
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import psutil

from lockstep import checkpoint, collectives
from lockstep.bad_numbers import BadNumbersError
from lockstep.config import CheckpointConfig, Config, TrainingConfig
from lockstep.config.tree import Origin, parse
from lockstep.data import StepSource
from lockstep.errors import RunError, UsageError
from lockstep.heartbeat import called_by_all_ranks
from lockstep.monitor import Monitor
from lockstep.monitor.figures import gather_objects
from lockstep.optim import Schedule
from lockstep.paths import local_path
from lockstep.records import RunDirectory, last_lines, read_lines

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


_log = logging.getLogger("lockstep")


class Checkpointer:
    """Saves one run and rolls it back.

    Every rank has one, and calls each method at the same steps.
    """

    def __init__(self, trainer: "Trainer", monitor: Monitor) -> None:
        self._trainer, self._monitor, self._config = trainer, monitor, trainer.config.checkpoint
        directory = trainer.run_directory
        self._folder = None if self._config.save_strategy == "none" else trainer.checkpoints
        self._saver: checkpoint.AsyncSaver | None = None
        self._evaluated: dict[int, float] = {}
        self._rollbacks: dict[int, int] = {}  # step → rollbacks to it
        self.saved: int | None = None  # step of the last save that was begun
        self._options = checkpoint.SaveOptions(
            self._config.format, self._config.retries, self._report_retry
        )
        if self._folder is None:
            return
        # The evaluation at the end of a run comes after its last save, which therefore does not
        # hold the result.
        if trainer.is_main_process and directory is not None:
            self._evaluated = evaluations(directory, self._config.keep_best)
        assert trainer.storage_is_shared or self._config.format == "full"
        if self._config.async_:
            self._saver = checkpoint.AsyncSaver(then=self._committed)

    @property
    def needs_save(self) -> bool:
        """Return whether the current step is not saved, though the run is."""
        return self._folder is not None and self.saved != self._trainer.step.progress.step

    def remember_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """Keep the metric of an evaluation that was made after its step was saved."""
        name = self._config.keep_best
        if name is not None and name in results and self._trainer.is_main_process:
            self._evaluated[step] = float(results[name])

    def after_step(self, *, last: bool, last_of_epoch: bool) -> None:
        """Save if it is due; check the running save."""
        if self._folder is None:
            return
        step = self._trainer.step.progress.step
        by_epoch = self._config.save_strategy == "epoch"
        is_best = self._trainer.state.best_is_new
        if last or is_best or (last_of_epoch if by_epoch else step % self._config.save_steps == 0):
            self.save(must_succeed=last)
        elif self._saver is not None:
            self._guard(self._saver.poll, must_succeed=False)

    @called_by_all_ranks
    def save(self, *, must_succeed: bool) -> None:
        """Save the run now; in the background, unless it must have succeeded when this returns."""
        step = self._trainer.step.progress.step
        if self._folder is None or self.saved == step:
            self.finish(must_succeed=must_succeed)
            return
        started = time.perf_counter()
        with self._trainer.step.clock.during("checkpoint"):
            self._trainer.step.flush()  # host waits for the device: bad numbers must not be saved
            self._monitor.flush()  # a run that resumes here has the records up to here
            # Only one save runs at a time.
            self.finish(must_succeed=False)
            waited = time.perf_counter() - started
            self._guard(lambda: self._begin(step), must_succeed=must_succeed)
            if must_succeed:
                self.finish(must_succeed=True)
        stall = time.perf_counter() - started
        self._monitor.event("save_stall", step=step, seconds=stall, waited_for_previous=waited)
        if waited > 1 and self._saver is not None:
            _log.warning(
                "warning: step %d waited %.1f s for the save before it to be written", step, waited
            )

    def save_as_asked(self, snapshot: checkpoint.Snapshot) -> checkpoint.CheckpointPath:
        """Save the caller's snapshot of the current step among the run's checkpoints; on return it is complete."""
        assert self._trainer.checkpoints is not None
        self.finish(must_succeed=False)
        self._monitor.flush()
        step, config = self._trainer.step.progress.step, self._trainer.config
        options = replace(self._options, sets_aside=True)
        path = checkpoint.save(
            self._trainer.checkpoints, step, snapshot, config_yaml=config.to_yaml(), options=options
        )
        self.saved = step
        if self._trainer.is_main_process:
            self._committed(path)
        return path

    def finish(self, *, must_succeed: bool) -> None:
        """Wait for the running save: at the end, before a stop, before a rollback."""
        if self._saver is not None:
            self._guard(self._saver.wait, must_succeed=must_succeed)

    def finish_alone(self) -> None:
        """Wait for the running save on this rank, which ends with an error, without asking the others."""
        if self._saver is not None:
            self._trainer.heartbeat.beat(self._trainer.step.progress.step, "pause")
            self._saver.finish_alone()

    def _begin(self, step: int) -> None:
        assert self._folder is not None
        trainer, self.saved = self._trainer, step
        save = checkpoint.save if self._saver is None else self._saver.save
        path = save(
            self._folder,
            step,
            trainer.snapshot(),
            config_yaml=trainer.config.to_yaml(),
            options=self._options,
        )
        if self._saver is None and trainer.is_main_process:
            assert path is not None
            self._committed(path)

    def _committed(self, path: checkpoint.CheckpointPath) -> None:
        """Record a commit, and delete old checkpoints; on rank 0, in the background for an asynchronous save."""
        folder = self._trainer.checkpoints
        assert folder is not None
        self._monitor.event("save", step=checkpoint.step_of(path.name), checkpoint=path.name)
        best = best_of(folder, self._config, self._evaluated)
        checkpoint.rotate(folder, self._config.save_total_limit, [] if best is None else [best])

    def _guard(self, call: Any, *, must_succeed: bool) -> None:
        try:
            call()
        except RunError as error:
            step = self._trainer.step.progress.step
            self._monitor.event("save_failed", step=step, reason=str(error))
            if must_succeed or self._config.on_failure == "stop":
                raise
            if self._trainer.is_main_process:
                _log.warning(
                    "warning: step %d: training goes on without a new checkpoint: %s", step, error
                )

    def _report_retry(self, error: RunError, seconds: float) -> None:
        self._monitor.event("save_retry", reason=str(error), pause_seconds=seconds)
        _log.warning("warning: a save failed and is tried again in %g s: %s", seconds, error)

    def roll_back(self, error: BadNumbersError) -> None:
        """Go back to the newest checkpoint; the bad step's data will be skipped.

        The error is raised if the config says to stop, there is no checkpoint, or there were too
        many rollbacks.
        """
        trainer, monitor = self._trainer, self._monitor
        self.finish(must_succeed=False)
        if not error.rolls_back or trainer.checkpoints is None:
            raise error
        trainer.optimizer.zero_grad(set_to_none=True)
        if not checkpoint.list_checkpoints(trainer.checkpoints):
            monitor.say("there is no checkpoint yet to go back to")
            raise error
        found = find(trainer, "auto")
        assert found is not None, "there is one"
        restore(trainer, found)
        step = trainer.step.progress.step
        # The number of rollbacks to a step is limited: else a run could repeat them for ever.
        self._rollbacks = {step: self._rollbacks.get(step, 0) + 1}
        if self._rollbacks[step] > trainer.config.training.bad_numbers.patience:
            raise error
        trainer.step.avoid_data_of(error.anomaly.step)
        self.saved = None
        monitor.event("rollback", step=step, checkpoint=found.name, passed_over=error.anomaly.step)
        monitor.say(
            f"goes back to step {step}, {found.name}, and passes over the data of step"
            f" {error.anomaly.step}"
        )


def after_restart(trainer: "Trainer", how: str) -> str:
    """Return how to resume on ranks that a launcher has started again: from what this launch has saved, if anything."""
    directory = trainer.run_directory
    if (
        how == "auto"
        or directory is None
        or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    ):
        return how

    def has_saved() -> bool:
        launched = psutil.Process(os.getppid()).create_time()
        return any(
            event["kind"] == "save" and event["time"] >= launched
            for event in directory.read_events()
        )

    saved = checkpoint.Ranks().broadcast("the events of the run could not be read", has_saved)
    return "auto" if saved else how


def resume(trainer: "Trainer", how: str) -> tuple[checkpoint.CheckpointPath | None, list[str]]:
    """Bring the run's state, and its run directory, to where it resumes.

    Return lines to log, too.
    """
    started = time.perf_counter()
    found = find(trainer, how)
    rows = (
        last_lines(trainer.run_directory.metrics, 50)
        if trainer.run_directory and trainer.is_main_process
        else []
    )
    come_to = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
    if found is None:
        restore(trainer, None)
        return None, []
    _, log_lines = load(trainer, found)
    clear_later(trainer)
    step = trainer.step.progress.step
    if come_to > step:
        log_lines.append(
            f"the run had come to step {come_to}: what follows step {step} is trained again"
        )
    if trainer.run_directory is not None and trainer.is_main_process:
        seconds = time.perf_counter() - started
        trainer.run_directory.append_event(
            "resume", step=step, checkpoint=str(found), seconds=seconds
        )
    return found, log_lines


def load(trainer: "Trainer", found: checkpoint.CheckpointPath) -> tuple[dict[str, Any], list[str]]:
    """Load a checkpoint from which the run goes on.

    Return its metadata, and lines to log on what has changed since.

    Changed settings apply from there on; a UsageError is raised if they make another training.
    """
    changed = compare(
        trainer.config, trainer.global_batch_size, found, is_main=trainer.is_main_process
    )
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    metadata, log_lines = trainer.state.load(found)
    step = trainer.step.progress.step
    log_lines.append(f"resumes after step {step}, from {found}")
    given = [str(change) for change in changed]
    if trainer.scales_rate:  # the config's own optimizer
        apply_changed_options(trainer.optimizer.param_groups, fresh, changed)
    else:
        given += trainer.state.apply_new_options()
    if given:
        log_lines.append(f"changed since that step: {', '.join(given)}")
    if changed and trainer.scales_rate and trainer.user_schedule is None:
        rate = trainer.optimizer.param_groups[0].get(
            "initial_lr", trainer.config.training.learning_rate
        )
        per_epoch = (
            checkpoint.read_state(found).get("steps_per_epoch") if trainer.is_main_process else None
        )
        log_lines += moved_schedule(trainer.config.training, changed, step, rate, per_epoch)
    return metadata, log_lines


def restore(trainer: "Trainer", found: checkpoint.CheckpointPath | None) -> list[str]:
    """Bring the run's state, and its run directory, to a checkpoint, or to the start.

    Every rank calls it.

    Metrics of later steps are dropped, and later checkpoints set aside: they are written again.
    Returns lines to log.
    """
    log_lines = list[str]()
    if found is not None:
        _, log_lines = trainer.state.load(found)
    clear_later(trainer)
    return log_lines


def clear_later(trainer: "Trainer") -> None:
    """Drop what a run directory holds of steps after the current one."""
    step, directory = trainer.step.progress.step, trainer.run_directory
    if directory is not None and trainer.is_main_process:
        directory.drop_after(step)
        for path in checkpoint.set_aside(trainer.checkpoints or directory.checkpoints, after=step):
            directory.append_event("set_aside", step=step, checkpoint=path.name)
    if trainer.layout.world_size > 1:
        collectives.barrier()  # no rank reads the folder before it is in order


def find(trainer: "Trainer", how: str, where: str = "--resume") -> checkpoint.CheckpointPath | None:
    """Return where to resume: the newest whole checkpoint (`auto`), nowhere (`never`), or the given path.

    A RunError is raised if there are checkpoints, and none is whole: a person has to decide about a
    fresh start.
    """
    if how == "never":
        return None
    if how == "auto":
        folder = trainer.checkpoints
        if folder is None:
            return None
        if trainer.storage_is_shared:
            return checkpoint.resume_point(folder)
        here = checkpoint.newest(folder, thorough=True) if trainer.is_main_process else None
        return checkpoint.copy_to_hosts(here)
    if isinstance(trainer.checkpoints, checkpoint.Storage) and trainer.checkpoints.exists(how):
        return trainer.checkpoints.path(how)
    path = local_path(how, "the checkpoint to resume from")
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / checkpoint.MANIFEST).exists():
        return path
    if path.is_dir() and (found := checkpoint.resume_point(path)) is not None:
        return found
    why = (
        f"there is no {checkpoint.MANIFEST} in it"
        if path.is_dir()
        else "there is no such file or folder"
    )
    fix = "give a folder checkpoints/step-…, or a run directory"
    fix += ", auto or never" if where == "--resume" else ""
    if path.is_file():
        why = "it is a file, and a checkpoint is a folder"
        fix = "load a file of weights into the model before the Trainer is made: "
        fix += f"model.load_state_dict(torch.load({how!r})); or make a checkpoint of it: "
        fix += f"`lockstep checkpoint import {quote(how)}`"
    raise UsageError(f"{how} is not a checkpoint", where=where, why=why, fix=fix)


def is_same_folder(folder: checkpoint.Directory, path: str | Path) -> bool:
    """Return whether a path is the run's own folder of checkpoints."""
    return (
        isinstance(folder, Path)
        and folder.resolve() == local_path(path, "save_checkpoint").resolve()
    )


def evaluations(directory: RunDirectory, metric: str | None) -> dict[int, float]:
    """Return step → a metric of its evaluation, from metrics.jsonl; empty if no evaluation computes it."""
    rows = read_lines(directory.metrics) if metric is not None else ()
    return {
        int(row["step"]): float(row[metric]) for row in rows if metric in row and "loss" not in row
    }


def best_of(
    folder: checkpoint.Directory, config: CheckpointConfig, later: Mapping[int, float]
) -> checkpoint.CheckpointPath | None:
    """Return the best checkpoint by the metric `keep_best`, the newest of equal ones.

    None if none has the metric.

    `later` has the values, by step, that were measured after the checkpoint was written.
    """
    if config.keep_best is None:
        return None
    known = []
    sign = 1.0 if config.keep_best_mode == "min" else -1.0
    for path in checkpoint.list_checkpoints(folder):
        try:
            metrics = checkpoint.read_state(path).get("metrics", {})
            value = later.get(
                checkpoint.step_of(path.name) or 0, float(metrics.get(config.keep_best, math.nan))
            )
        except (RunError, TypeError, ValueError, AttributeError):
            # a damaged checkpoint is not a candidate
            continue
        if math.isfinite(value):
            known.append((sign * value, path))
    return min(reversed(known), key=lambda pair: pair[0])[1] if known else None


_COMPARED = (
    *(
        "model.",
        "loss_fn",
        "data.",
        "training.",
        "precision.",
        "distributed.reproducible",
        "distributed.open_axes",
    ),
    *("distributed.context_blocks", "distributed.tensor_blocks", "distributed.sequence_parallel"),
)
_HOW_DATA_ARE_READ = (
    "data.num_workers",
    "data.prefetch_factor",
    "data.pin_memory",
    "data.persistent_workers",
)
_ANOTHER_TRAINING = ("model.", "data.", "training.seed")
_SIZES = (
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
)
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A key with another value."""

    key: str
    before: Any
    now: Any
    another_training: bool

    def __str__(self) -> str:
        before, now = (
            json.dumps(value, ensure_ascii=False, default=str) for value in (self.before, self.now)
        )
        return f"{self.key} {before} → {now}"


def compare(
    config: Config, global_batch_size: int, found: checkpoint.CheckpointPath, *, is_main: bool
) -> list[Change]:
    """Return the keys that differ from a checkpoint's, read by rank 0.

    A UsageError if they make another training.
    """
    mine = list(_changes(config, global_batch_size, found)) if is_main else []
    changes: list[Change] = gather_objects(mine)[0]
    broken = [change for change in changes if change.another_training]
    if broken and not config.checkpoint.allow_changes:
        raise another_training(", ".join(map(str, broken)), found)
    return changes


def require_same_epoch(
    source: StepSource, global_batch_size: int, found: checkpoint.CheckpointPath
) -> None:
    """Reject data of another length than the checkpoint's run had: their order differs too."""
    saved, now = checkpoint.read_state(found), source.steps_per_epoch
    before = saved.get("steps_per_epoch")
    if before is None or now is None or saved.get("global_batch_size") != global_batch_size:
        return
    if before != now:
        source.close()
        raise another_training(f"an epoch of the data had {before} steps, and has {now} now", found)


def another_training(what: str, found: checkpoint.CheckpointPath) -> UsageError:
    """Return the error for resuming from a checkpoint of another training."""
    why = (
        "samples, their order, random numbers and the model follow from the config and the step"
        " number, so this "
    )
    why += "would be another training from here on"
    fix = (
        "give the former value back; or start afresh with --resume never (in Python:"
        " resume='never'); or go on "
    )
    fix += "all the same with --allow-changes (in Python: allow_changes=True)"
    return UsageError(
        f"the run would not go on as it began: {what}",
        where=f"resuming from {found}",
        why=why,
        fix=fix,
    )


def _changes(
    config: Config, global_batch_size: int, found: checkpoint.CheckpointPath
) -> Iterator[Change]:
    before = _flat(
        parse(checkpoint.config_text(found), lambda line: Origin(str(found), line + 1)).plain()
    )
    now = _flat(config.to_dict())
    training = config.training
    whole = checkpoint.read_state(found).get("global_batch_size")
    open_yet = config.model.name is None and "batch_size" not in training.model_fields_set
    sizes_differ = any(_differs(before, now, key) for key in _SIZES) and not open_yet
    grows = whole is not None and whole != global_batch_size and not open_yet
    # Objects that are passed in Python cannot be compared by name.
    objects = [
        part
        for part in ("model", "data")
        if None in (before.get(f"{part}.name"), now.get(f"{part}.name"))
    ]
    handed_over = tuple(f"{part}.{key}" for part in objects for key in ("name", "args"))
    for key in sorted({*before, *now}):
        if (
            _differs(before, now, key)
            and not (open_yet and key in _SIZES)
            and not key.startswith(handed_over)
        ):
            another = key.startswith(_ANOTHER_TRAINING) or (key in _SIZES and grows)
            yield Change(key, before.get(key), now.get(key), another)
    # no key was changed, but the number of ranks, as after the loss of a machine
    if grows and not sizes_differ:
        key = "the global batch (it follows the ranks: set global_batch_size)"
        yield Change(key, whole, global_batch_size, another_training=False)


def _differs(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Return whether a relevant key has another value.

    A key that the saving version lacks has not changed.
    """
    if not key.startswith(_COMPARED) or key in _HOW_DATA_ARE_READ:
        return False
    free = key.startswith(("model.args.", "data.args.", "training.optimizer_args.", "loss_fn"))
    if not free and (key not in before or key not in now):
        return False
    return bool(before.get(key, _ABSENT) != now.get(key, _ABSENT))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree} if prefix else {}
    return {
        k: v
        for key, child in tree.items()
        for k, v in _flat(child, f"{prefix}.{key}" if prefix else key).items()
    }


_SCHEDULE = (
    "max_steps",
    "num_train_epochs",
    "lr_schedule",
    "warmup_steps",
    "min_lr_ratio",
    "wsd_decay_ratio",
)


def moved_schedule(
    training: TrainingConfig,
    changes: list[Change],
    updates: int,
    rate: float,
    steps_per_epoch: int | None,
) -> list[str]:
    """Return a line on the next learning rate, if changes move it: a cosine depends on the number of steps."""
    before = {change.key.removeprefix("training."): change.before for change in changes}
    earlier = training.model_copy(update={key: before[key] for key in _SCHEDULE if key in before})
    rates, described = [], []
    for config in (training, earlier):
        total = config.max_steps or (config.num_train_epochs or 1) * (steps_per_epoch or 0)
        if total == 0:
            return []
        kind, warmup = config.lr_schedule, config.warmup_steps
        schedule = Schedule(kind, total, warmup, config.min_lr_ratio, config.wsd_decay_ratio)
        rates.append(f"{rate * schedule.factor(updates):.3g}")
        described.append(
            f"{kind} over {total} steps" + (f", {warmup} of them warm-up" if warmup else "")
        )
    if rates[0] == rates[1]:
        return []
    return [
        f"the learning rate follows another curve from here on ({described[0]}; before:"
        f" {described[1]}): step {updates + 1} takes {rates[0]} in place of {rates[1]}"
    ]


def apply_changed_options(
    groups: list[dict[str, Any]], fresh: list[dict[str, Any]], changes: list[Change]
) -> None:
    """Set changed options of the config's optimizer in `groups`, which a checkpoint filled, to their `fresh` values."""
    keys = {change.key for change in changes}
    names = [
        key.removeprefix("training.optimizer_args.")
        for key in keys
        if key.startswith("training.optimizer_args.")
    ]
    if keys & {"training.learning_rate", "training.lr_scaling", "training.base_batch_size"}:
        names += ["lr", "initial_lr"]
    if "training.weight_decay" in keys:
        names.append("weight_decay")
    for group, new in zip(groups, fresh, strict=True):
        group.update({name: new[name] for name in names if name in new})
