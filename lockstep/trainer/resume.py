"""Finds the checkpoint from which a run goes on, and brings the run to it."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar

import psutil

from lockstep import checkpoint
from lockstep.errors import UsageError
from lockstep.files.paths import bucket_url
from lockstep.machine.environment import GENERATION
from lockstep.process_group import collectives
from lockstep.process_group.collectives import is_main_process
from lockstep.trainer import saved_state
from lockstep.trainer.changed_settings import compare, moved_schedule
from lockstep.trainer.optimizer_options import apply_changed_settings
from lockstep.trainer.run_output import RunOutput
from lockstep.trainer.run_state import RunState

T = TypeVar("T")


class ChosenCheckpoint(NamedTuple):
    """The checkpoint from which a run goes on, if there is one."""

    path: checkpoint.CheckpointPath | None  # None: nowhere, or the newest one in a folder
    # whether all ranks have just compared its checksums together, so that `load` need not
    is_verified: bool = False
    newest_in: checkpoint.Directory | None = None

    def load(
        self, load: Callable[[checkpoint.Location, bool], T]
    ) -> tuple[checkpoint.CheckpointPath, T] | None:
        """Load it by a function that takes `is_verified`, too; all ranks call it.

        Return the checkpoint and what the function returned; None if there is no checkpoint. One
        that was not named is passed over if its bytes are not those that were written.
        """
        if self.newest_in is not None:
            return checkpoint.load_newest(self.newest_in, load)
        if self.path is None:
            return None
        return self.path, load(checkpoint.fetched(self.path), self.is_verified)


def after_restart(output: RunOutput, how: str) -> str:
    """Return how to resume on ranks that a launcher has started again.

    They resume from what this launch has saved, if anything.
    """
    directory = output.directory
    if (
        how == "auto"
        or directory is None
        or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        == os.environ.get(GENERATION, "0")
        == "0"
    ):
        return how

    copied = _agreed_copy(output)

    def has_saved() -> bool:
        if copied is not None:
            return True
        launched = psutil.Process(os.getppid()).create_time()
        return any(
            event["kind"] == "save" and event["time"] >= launched
            for event in directory.read_events()
        )

    saved = checkpoint.Ranks().broadcast("the events of the run could not be read", has_saved)
    return "auto" if saved else how


def resume(run: RunState, how: str) -> tuple[checkpoint.CheckpointPath | None, list[str]]:
    """Bring the run's state, and its run directory, to where it resumes.

    Return lines to log, too.
    """
    started = time.perf_counter()
    directory = run.output.directory
    chosen = find(run.output, how)
    come_to = 0
    if directory is not None and run.is_main_process:
        come_to = directory.recorded_step
    loaded = chosen.load(lambda saved, verified: load(run, saved, is_verified=verified))
    lost_seconds = clear_later(run)
    step = run.step.progress.step
    if directory is not None and come_to > step and run.is_main_process:
        directory.append_event("lost_steps", step=step, come_to=come_to, seconds=lost_seconds)
    if loaded is None:
        return None, []
    saved, (_, log_lines) = loaded
    if come_to > step:
        log_lines.append(
            f"the run had come to step {come_to}: what follows step {step} is trained again"
        )
    if directory is not None and run.is_main_process:
        seconds = time.perf_counter() - started
        directory.append_event("resume", step=step, checkpoint=str(saved), seconds=seconds)
    return saved, log_lines


def load(
    run: RunState, saved: checkpoint.CheckpointPath, *, is_verified: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Load a checkpoint from which the run goes on.

    Return its metadata, and lines to log on what has changed since.

    `is_verified`: the ranks have compared its checksums just now, as they chose it.

    Changed settings apply from there on; a UsageError is raised if they make another training.
    """
    training = run.config.training
    optimizer = run.step.optimizer
    changed = compare(run.config, run.global_batch_size, saved, is_main=run.is_main_process)
    fresh = [dict(group) for group in optimizer.param_groups]
    metadata, log_lines = saved_state.load(run, saved, is_verified=is_verified)
    step = run.step.progress.step
    log_lines.append(f"resumes after step {step}, from {saved}")
    given = [str(change) for change in changed]
    if run.own_optimizer:
        given += run.given_options.apply_changes(optimizer)
    else:
        apply_changed_settings(optimizer.param_groups, fresh, changed)
    if given:
        log_lines.append(f"changed since that step: {', '.join(given)}")
    if changed and not run.own_optimizer and run.user_schedule is None:
        rate = optimizer.param_groups[0].get("initial_lr", training.learning_rate)
        per_epoch = (
            checkpoint.read_state(saved).get("steps_per_epoch") if run.is_main_process else None
        )
        log_lines += moved_schedule(training, changed, step, rate, per_epoch)
    return metadata, log_lines


def clear_later(run: RunState) -> float:
    """Drop what a run directory holds of steps after the current one; every rank calls it.

    Metrics of later steps are dropped, and later checkpoints set aside: they are written again.
    Return the seconds that these steps took; on rank 0, elsewhere 0.
    """
    step = run.step.progress.step
    lost_seconds = 0.0
    directory = run.output.directory
    if directory is not None and run.is_main_process:
        lost_seconds = directory.drop_after(step)
        for path in checkpoint.set_aside(
            run.output.checkpoints or directory.checkpoints, after=step
        ):
            directory.append_event("set_aside", step=step, checkpoint=path.name)
    memory = run.output.memory
    if memory is not None and checkpoint.leads_host(memory, checkpoint.Ranks()):
        memory.delete_after(step)
    if run.layout.world_size > 1:
        collectives.barrier()  # no rank reads the folder before it is in order
    return lost_seconds


def find(output: RunOutput, how: str, where: str = "--resume") -> ChosenCheckpoint:
    """Return where to resume: the newest complete checkpoint, nowhere, or the given path or URL.

    `auto` means the newest complete checkpoint, on disk or in memory, and `never` nowhere.

    A RunError is raised if there are checkpoints, and none is whole, or one could not be read: a
    person has to decide about a fresh start.
    """
    if how == "never":
        return ChosenCheckpoint(None)
    if how == "auto":
        copy = _newest_in_memory(output)
        return newest_kept(output) if copy is None else ChosenCheckpoint(copy, is_verified=True)
    if isinstance(output.checkpoints, checkpoint.Storage) and _holds(output.checkpoints, how):
        return ChosenCheckpoint(output.checkpoints.path(how))
    url = bucket_url(how, "the checkpoint to resume from")
    if url is not None:
        return _in_bucket(url, where)
    path = Path(how)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / checkpoint.MANIFEST).exists():
        return ChosenCheckpoint(path)
    newest = checkpoint.resume_point(path) if path.is_dir() else None
    if newest is not None:
        return ChosenCheckpoint(newest, is_verified=True)
    why = (
        f"there is no {checkpoint.MANIFEST} in it"
        if path.is_dir()
        else "there is no such file or folder"
    )
    fix = "give a folder checkpoints/step-…, or a run directory"
    fix += ", auto or never" if where == "--resume" else ""
    if path.is_file():
        why = "it is a file, and a checkpoint is a folder"
        fix = (
            "load a file of weights into the model before the Trainer is made:"
            f" model.load_state_dict(torch.load({how!r})); or make a checkpoint of it: `lockstep"
            f" checkpoint import {quote(how)}`"
        )
    raise UsageError(f"{how} is not a checkpoint", where=where, why=why, fix=fix)


def _in_bucket(url: str, where: str) -> ChosenCheckpoint:
    """Return the newest whole checkpoint below a URL, or the one that it names."""
    place = checkpoint.in_bucket(url)
    if not isinstance(place, checkpoint.Storage):
        if _holds(place.storage, place.name):
            return ChosenCheckpoint(place)
    elif checkpoint.Ranks().broadcast(
        f"no checkpoint in {place} could be chosen",
        lambda: bool(checkpoint.list_checkpoints(place)),
    ):
        return ChosenCheckpoint(None, newest_in=place)
    raise UsageError(
        f"there is no checkpoint in {url}",
        where=where,
        fix="give the URL of a run, as s3://BUCKET/PREFIX, or of one of its checkpoints,"
        " s3://BUCKET/PREFIX/step-00000100",
    )


def _holds(storage: checkpoint.Storage, name: str) -> bool:
    """Return whether a storage has a checkpoint of this name; rank 0 asks for all."""
    failure = f"{storage} could not be asked for {name}"
    return checkpoint.Ranks().broadcast(failure, lambda: storage.exists(name))


def newest_kept(output: RunOutput) -> ChosenCheckpoint:
    """Return the newest complete one of the run's checkpoints, without the copies in memory.

    Where all ranks see the folder, it is chosen as it is loaded.
    """
    folder = output.checkpoints
    if folder is None:
        return ChosenCheckpoint(None)
    if output.is_shared:
        return ChosenCheckpoint(None, newest_in=folder)
    newest = checkpoint.newest(folder, thorough=True) if is_main_process() else None
    return ChosenCheckpoint(checkpoint.copy_to_hosts(newest))


def _newest_in_memory(output: RunOutput) -> checkpoint.CheckpointPath | None:
    """Return the newest copy in memory, if it is complete and not older than what is kept."""
    memory = output.memory
    if memory is None:
        return None

    copied = _agreed_copy(output)
    if copied is None:
        return None

    def is_newest() -> bool:
        kept = [] if output.checkpoints is None else checkpoint.list_checkpoints(output.checkpoints)
        newest = max((checkpoint.step_of(path.name) or 0 for path in kept), default=0)
        return copied >= newest

    if not checkpoint.Ranks().broadcast("the copies in memory could not be read", is_newest):
        return None
    try:
        return checkpoint.resume_point(memory)
    except checkpoint.DamagedError:
        # none is whole, of which rank 0 has warned: the run's checkpoints are left
        return None


def _agreed_copy(output: RunOutput) -> int | None:
    """Return the step of the newest copy in memory that all hosts have; every rank asks.

    That of the last recorded step counts, too, if its writer died before it could show it.
    """
    if output.memory is None:
        return None
    directory = output.directory
    return checkpoint.agree_on_copy(
        output.memory,
        checkpoint.Ranks(),
        lambda: 0 if directory is None else directory.recorded_step,
    )
