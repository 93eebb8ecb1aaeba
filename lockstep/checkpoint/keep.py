"""Choose the checkpoint to resume from, and delete old ones."""

import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from lockstep.checkpoint.commit import new_draft
from lockstep.checkpoint.fetch import DescribingFiles, describe, with_description
from lockstep.checkpoint.manifest import (
    DamagedError,
    DamagedFilesError,
    problems_of_files,
    read_manifest,
    unreachable_error,
)
from lockstep.checkpoint.posix import locate, storage_at
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.restore import verify_together
from lockstep.checkpoint.storage import (
    MANIFEST,
    Checkpoint,
    CheckpointPath,
    Directory,
    Location,
    aside_name,
    step_of,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)


def _warn(path: CheckpointPath, reason: str) -> None:
    _log.warning("warning: passing over %s: %s", path, reason)


def list_checkpoints(directory: Directory) -> list[CheckpointPath]:
    """Return the checkpoints of a folder by step, oldest first, damaged ones too.

    None if there is no such folder. An UnreachableError is raised if they could not be listed.
    """
    return [checkpoint.path for checkpoint in _checkpoints(directory)]


def _checkpoints(directory: Directory) -> list[Location]:
    storage = storage_at(directory)
    try:
        names = storage.names()
    except OSError as error:
        raise unreachable_error(str(storage), error) from None
    named_steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    return [Location(storage, name) for _, name in named_steps]


def newest(directory: Directory, *, thorough: bool = False) -> CheckpointPath | None:
    """Return the newest whole checkpoint, or None if there are no checkpoints; without collectives.

    With `thorough`, the checksums of all files are compared; else that of the manifest, and all
    sizes. A warning names each newer one that is passed over. If none is whole, a DamagedError
    leaves the decision to a person; an UnreachableError does so where one could not be read.
    """
    chosen = _choose(directory, lambda checkpoint: _damage(checkpoint, thorough=thorough), set())
    return None if chosen is None else chosen.path


def resume_point(directory: Directory) -> CheckpointPath | None:
    """Return the newest checkpoint with correct checksums; raise as `newest`.

    Every rank reads a share, and rank 0 warns.
    """
    ranks = Ranks()
    found = _take_newest(directory, ranks, lambda checkpoint, _: verify_together(checkpoint, ranks))
    return None if found is None else found[0].path


def load_newest(
    directory: Directory, load: Callable[[Location, bool], T]
) -> tuple[CheckpointPath, T] | None:
    """Load the newest checkpoint with correct checksums; every rank calls it, and rank 0 warns.

    Of a storage far away each byte is sent once: `load` compares the checksums as it reads, before
    it changes anything, and where they differ the next older checkpoint is loaded. Where bytes
    could not be had, all ranks raise an UnreachableError.

    Args:
        directory: of the checkpoints.
        load: loads a checkpoint by `restore.load`, with the `is_verified` that it is given. What it
            does before is done again for an older checkpoint.

    Returns:
        the checkpoint, and what `load` returned; None if there is none.
    """
    ranks = Ranks()

    def verify_or_fetch(checkpoint: Location, description: DescribingFiles | None) -> T:
        near = None if description is None else with_description(checkpoint, description)
        if near is not None:
            return load(near, False)
        verify_together(checkpoint, ranks)
        return load(checkpoint, True)

    found = _take_newest(directory, ranks, verify_or_fetch)
    return None if found is None else (found[0].path, found[1])


def _take_newest(
    directory: Directory, ranks: Ranks, take: Callable[[Location, DescribingFiles | None], T]
) -> tuple[Location, T] | None:
    """Return the newest checkpoint that can be taken, and what `take` returned for it.

    A checkpoint that is damaged at a glance is passed over, and one for which `take` raises a
    DamagedFilesError, on all ranks. Of a checkpoint far away it is given what describes it.
    """
    storage = storage_at(directory)
    damaged: dict[str, str] = {}
    warned: set[str] = set()
    described: dict[str, DescribingFiles] = {}

    def damage(checkpoint: Location) -> str | None:
        """Return why a checkpoint is not whole, as far as is known; read what describes it."""
        if checkpoint.name in damaged:
            return damaged[checkpoint.name]
        if not checkpoint.is_remote:
            return _damage(checkpoint, thorough=False)
        try:
            described[checkpoint.name] = describe(checkpoint)
        except DamagedFilesError as error:
            return error.why
        except DamagedError as error:
            return _reason(error)
        return None

    def choose() -> tuple[str, DescribingFiles | None] | None:
        chosen = _choose(storage, damage, warned)
        return None if chosen is None else (chosen.name, described.get(chosen.name))

    failure = f"no checkpoint in {storage} could be chosen"
    while (chosen := ranks.broadcast(failure, choose)) is not None:
        name, files = chosen
        checkpoint = Location(storage, name)
        try:
            return checkpoint, take(checkpoint, files)
        except DamagedFilesError as error:
            damaged[name] = error.why or error.what
    return None


def _choose(
    directory: Directory, damage: Callable[[Location], str | None], warned: set[str]
) -> Location | None:
    """Return the newest checkpoint without damage.

    Warn of each one before it whose name is not among the `warned`.
    """
    reasons = []
    for checkpoint in reversed(_checkpoints(directory)):
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        if checkpoint.name not in warned:
            warned.add(checkpoint.name)
            _warn(checkpoint.path, reason)
        reasons.append(f"{checkpoint.name}: {reason}")
    if reasons:
        what = f"none of the {len(reasons)} checkpoints in {directory} is whole"
        fix = (
            "restore one from a backup; or, to start afresh on purpose, move them away or pass"
            " --resume never"
        )
        raise DamagedError(what, why="; ".join(reasons[:4]), fix=fix)
    return None


def _damage(checkpoint: Location, *, thorough: bool) -> str | None:
    """Return why a checkpoint is not whole; None if it is.

    A later format and a file that could not be read raise errors, because they are not damage.
    """
    try:
        problems = problems_of_files(checkpoint, read_manifest(checkpoint), thorough=thorough)
    except DamagedError as error:
        return _reason(error)
    return "; ".join(problems[:4]) or None


def _reason(error: DamagedError) -> str:
    return error.what + (f": {error.why}" if error.why else "")


def rotate(
    directory: Directory, keep: int | None, protect: Iterable[Checkpoint] = ()
) -> list[CheckpointPath]:
    """Delete all but the newest `keep` complete checkpoints, and drafts of dead writers.

    The newest checkpoint is verified first.

    One process calls it; it returns what it deleted. A damaged checkpoint neither counts nor is
    deleted, and those to `protect` stay. If the newest is damaged, a warning says so, and nothing
    is deleted.
    """
    assert keep is None or keep >= 1, "the only checkpoint is never deleted"
    storage = storage_at(directory)
    storage.sweep()
    if keep is None:
        return []
    protected = {locate(checkpoint).name for checkpoint in protect}
    intact = [it for it in reversed(_checkpoints(storage)) if _damage(it, thorough=False) is None]
    surplus = [it for it in intact[keep:] if it.name not in protected]
    if not surplus:
        return []
    if (reason := _damage(intact[0], thorough=True)) is not None:
        _warn(intact[0].path, reason)
        return []
    for checkpoint in reversed(surplus):  # the oldest first
        storage.delete(checkpoint.name)
    return [checkpoint.path for checkpoint in surplus]


def set_aside(directory: Directory, after: int) -> list[CheckpointPath]:
    """Rename the checkpoints after a step to names that no run resumes from.

    The run goes back to that step.
    """
    later = [
        checkpoint
        for checkpoint in _checkpoints(directory)
        if (step_of(checkpoint.name) or 0) > after
    ]
    for checkpoint in reversed(later):  # the newest first: an interruption leaves no gap
        checkpoint.storage.move(checkpoint.name, aside_name(step_of(checkpoint.name) or 0))
    return [checkpoint.path for checkpoint in later]


def copy_to_hosts(path: Checkpoint | None) -> CheckpointPath | None:
    """Copy the checkpoint `path` of rank 0 to each host that lacks it, and return it.

    Every rank calls it.
    """
    ranks = Ranks()
    path = ranks.broadcast("no checkpoint was chosen", lambda: path)
    if path is None:
        return None
    checkpoint = locate(path)
    storage = checkpoint.storage
    failure = f"the checkpoint {checkpoint} could not be copied to other hosts"
    files = ranks.broadcast(failure, lambda: [*read_manifest(checkpoint).files])
    name = checkpoint.name
    place = (socket.gethostname(), os.path.abspath(str(storage)))

    def receivers(places: list[tuple[str, str, bool]]) -> list[int]:
        first: dict[tuple[str, str], int] = {}
        for rank, (host, folder, there) in enumerate(places):
            if not there:
                first.setdefault((host, folder), rank)
        return list(first.values())

    receives = ranks.rank in ranks.all_reduce(
        failure, lambda: (*place, storage.exists(name)), receivers
    )
    with ExitStack() as stack:
        draft = ranks.run(
            failure,
            lambda: stack.enter_context(new_draft(storage, name)) if receives else checkpoint,
        )
        for file in files:
            data = ranks.broadcast(failure, partial(_content, checkpoint, file))

            def put(file: str = file, data: bytes = data) -> None:
                if receives:
                    draft.put(file, data)

            ranks.run(failure, put)
        manifest = ranks.broadcast(failure, lambda: _content(checkpoint, MANIFEST))
        ranks.run(failure, lambda: storage.commit(draft.name, name, manifest) if receives else None)
    return checkpoint.path


def _content(checkpoint: Location, file: str) -> bytes:
    with checkpoint.open(file) as stream:
        return stream.read()
