"""Save a checkpoint: before the commit there is no new one, after it a complete one.

    every rank   stage      its tensors become blocks (`snapshot.py`)
                 describe   what it has, without values
    rank 0       decide     who writes what; begin a draft, which no reader sees
    every rank   write      its share of the files, into the draft (`write.py`)
    rank 0       commit     the files beside the tensors, and the manifest: the draft is visible

Older checkpoints are never touched. An error on one rank is raised on all (`ranks.py`), and the
draft is deleted.

Tests: tests/checkpoint/test_commit.py, tests/checkpoint/test_ranks.py
"""

import itertools
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.checkpoint.manifest import (
    CONFIG,
    GROUPS_KEY,
    JSON_LIMIT,
    STATE,
    DamagedError,
    Manifest,
    verify,
)
from lockstep.checkpoint.posix import storage_at
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.snapshot import (
    CheckpointPlan,
    Description,
    Snapshot,
    Staged,
    describe,
    merge,
    stage,
)
from lockstep.checkpoint.storage import (
    CheckpointPath,
    Directory,
    FileInfo,
    Location,
    Storage,
    aside_name,
    step_name,
    step_of,
)
from lockstep.checkpoint.write import Format, WrittenFiles, writer_of
from lockstep.errors import RunError, UsageError
from lockstep.heartbeat.writer import went_forward

_log = logging.getLogger(__name__)

# the name of the draft that `is_shared` makes, to find out whether ranks see one storage
SHARED_MARK = ".shared"
_FIRST_PAUSE = 0.5  # seconds before the second try; doubled for each further one
# a network file system may show a new folder a moment later
_ATTEMPTS = 5
_SECONDS_BETWEEN_ATTEMPTS = 0.2


@dataclass(frozen=True)
class SaveOptions:
    """The format of checkpoints (see `write`), and the retries of a save."""

    format: Format = "sharded"
    retries: int = 0  # tries of a save that the storage refused, after pauses that double
    # seconds of the pause; on rank 0
    on_retry: Callable[[RunError, float], object] = lambda _error, _seconds: None
    sets_aside: bool = False  # a checkpoint of the same step gets another name; else it is an error


def save(
    directory: Directory,
    step: int,
    snapshot: Snapshot,
    *,
    config_yaml: str,
    options: SaveOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> CheckpointPath:
    """Write the checkpoint `directory/step-00000100`, and return it once it is committed.

    Every rank calls it.

    All ranks share the `directory`, which is created if missing, except in the format `full`. The
    ranks of `group` (Gloo or NCCL) hold the state; None: those of the default group.

    A UsageError is raised if the snapshot can't be stored, or a whole checkpoint of this step
    exists; a RunError, on every rank, if the storage failed: the draft is deleted, and older
    checkpoints are untouched.
    """
    ranks = Ranks(group)
    target = Location(storage_at(directory), step_name(step))
    staged = ranks.run(failure_of(step), lambda: stage(snapshot))
    write_staged(target, step, staged, config_yaml, options or SaveOptions(), ranks)
    return target.path


def write_staged(
    target: Location,
    step: int,
    staged: Staged,
    config_yaml: str,
    options: SaveOptions,
    ranks: Ranks,
) -> None:
    """Write a staged snapshot, with retries; every rank raises the same errors."""
    for attempt in itertools.count():
        try:
            return write_once(target, step, staged, config_yaml, options, ranks)
        except RunError as error:
            # what is read as it is written, as `convert` does, is as damaged the next time
            if attempt == options.retries or isinstance(error, DamagedError):
                raise
            pause = _FIRST_PAUSE * 2**attempt
            if ranks.is_main:
                options.on_retry(error, pause)
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            went_forward()  # the pause is meant: no rank hangs
            time.sleep(min(left, 1.0))


def write_once(
    target: Location,
    step: int,
    staged: Staged,
    config_yaml: str,
    options: SaveOptions,
    ranks: Ranks,
) -> None:
    """Plan, write and commit on every rank, without retries; delete the draft after a failure.

    Rank 0 decides who writes what and begins a draft; every rank writes its share into it; rank 0
    adds the files beside the tensors and makes the checkpoint visible.
    """
    failure = failure_of(step)
    writer = writer_of(options.format, staged, ranks, failure)
    decided: list[tuple[CheckpointPlan, Location]] = []  # on rank 0
    with ExitStack() as stack:

        def decide(described: list[Description]) -> list[tuple[str, object]]:
            """Decide on rank 0 who writes what, and begin the draft; return each rank's share."""
            plan = merge(described)
            shares = writer.plan(plan, described)
            if target.storage.exists(target.name) and not options.sets_aside:
                _set_damaged_aside(target, step)
            draft = stack.enter_context(new_draft(target.storage, target.name))
            decided.append((plan, draft))
            return [(draft.name, share) for share in shares]

        def commit(written: list[WrittenFiles]) -> None:
            """Write the files beside the tensors on rank 0, and make the checkpoint visible."""
            plan, draft = decided[0]
            files = writer.finish(draft, written)
            files |= _write_beside(draft, staged.state, plan.groups, config_yaml)
            versions = {"torch": torch.__version__, "python": platform.python_version()}
            manifest = Manifest(
                step, files, plan.parameters, tuple(plan.parts), versions, writer.raw_ranks
            )
            if options.sets_aside and target.storage.exists(target.name):
                _set_older_aside(target, step)
            manifest_json = _within_limit("manifest.json", manifest.to_bytes())
            target.storage.commit(draft.name, target.name, manifest_json)

        draft_name, share = ranks.exchange(
            failure, lambda: describe(staged, writer.describe()), decide
        )
        draft = Location(target.storage, draft_name)
        ranks.all_reduce(failure, lambda: writer.write(draft, share), commit)


def _set_damaged_aside(target: Location, step: int) -> None:
    """Give a damaged checkpoint of this name another one; a UsageError if it is complete."""
    if step_of(target.name) is None or not verify(target):
        fix = (
            "begin with it (in Python: trainer.load_checkpoint), move it away, or name another"
            " folder for this run"
        )
        what = f"{target} exists already, and a checkpoint is never overwritten"
        raise UsageError(what, fix=fix)
    target.storage.move(target.name, aside_name(step))


def _set_older_aside(target: Location, step: int) -> None:
    """Give the older checkpoint of this name another one, and say so."""
    aside = aside_name(step)
    target.storage.move(target.name, aside)
    _log.warning(
        "warning: %s exists already: the older checkpoint is called %s from now on", target, aside
    )


def _write_beside(
    draft: Location, state: dict[str, Any], groups: dict[str, dict[str, Any]], config_yaml: str
) -> dict[str, FileInfo]:
    """Write the state with the optimizers' groups, and the config; return size and checksum."""
    # Floats are exact to the bit; NaN and Infinity are in Python's notation.
    text = json.dumps({**state, GROUPS_KEY: groups}, indent=1, sort_keys=True) + "\n"
    return {
        STATE: draft.put(STATE, _within_limit(STATE, text.encode())),
        CONFIG: draft.put(CONFIG, config_yaml.encode()),
    }


def is_shared(directory: Directory) -> bool:
    """Return whether all ranks see the storage that rank 0 sees, which they can write to.

    Every rank calls it.
    """
    ranks = Ranks()
    storage = storage_at(directory)
    failure = f"the folder {storage} could not be tested"

    def appears(draft: str) -> bool:
        for _ in range(_ATTEMPTS):
            if storage.sees(draft):
                return True
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        return False

    draft: str | None = None
    try:
        draft = ranks.broadcast(failure, lambda: storage.begin(SHARED_MARK))
        return ranks.all_reduce(failure, partial(appears, draft), all)
    finally:
        if draft is not None and ranks.is_main:
            storage.delete(draft)


def failure_of(step: int) -> str:
    """Return what to say of a step whose checkpoint could not be written."""
    return f"the checkpoint of step {step} was not written"


@contextmanager
def new_draft(storage: Storage, name: str) -> Iterator[Location]:
    """Begin a draft, and delete it after a failure."""
    draft = storage.begin(name)
    try:
        yield Location(storage, draft)
    except BaseException:
        with suppress(Exception):  # if this fails too, the rest is swept later
            storage.delete(draft)
        raise


def _within_limit(file: str, data: bytes) -> bytes:
    if len(data) > JSON_LIMIT:
        what = (
            f"{file} of the checkpoint would have {len(data) >> 20} MiB, and {JSON_LIMIT >> 20} MiB"
            " are read at most"
        )
        raise UsageError(
            what, fix="keep large data in tensors, in `extra`, or in a file of your own"
        )
    return data
