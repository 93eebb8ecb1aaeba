"""Which checkpoints there are to trust, and which may go."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

from lockstep.checkpoint.commit import is_in_flight
from lockstep.checkpoint.disk import sync_directory
from lockstep.checkpoint.manifest import DamagedError, problems_of_files, read_manifest
from lockstep.checkpoint.names import Writer, aside_name, list_checkpoints, step_of
from lockstep.checkpoint.restore import prove
from lockstep.checkpoint.together import Ranks
from lockstep.errors import RunError

_log = logging.getLogger(__name__)
_ABANDONED_SECONDS = 3600.0  # a writer on another host that has not touched its folder for so long is dead

OnDamaged = Callable[[Path, str], None]


def _warn(path: Path, reason: str) -> None:
    _log.warning("passing over %s: %s", path, reason)


def newest(directory: str | os.PathLike[str], *, thorough: bool = False, on_damaged: OnDamaged = _warn) -> Path | None:
    """The newest checkpoint that is whole; None if there is none at all. Local: no rank waits for another.

    Args:
        thorough: compare the checksums of all files; else the manifest's own, and all sizes (`load` compares the rest).
        on_damaged: told each newer checkpoint that is passed over, and why.

    Raises:
        RunError: there are checkpoints, but none is whole. To start afresh then is for a person to decide.
    """
    return _choose(Path(directory), lambda path: _damage(path, thorough=thorough), on_damaged)


def resume_point(
    directory: str | os.PathLike[str], *, on_damaged: OnDamaged = _warn, group: dist.ProcessGroup | None = None
) -> Path | None:
    """`newest`, every checksum compared: every rank calls it, they share the reading, and get the same answer.

    Rank 0 alone calls `on_damaged`. What is returned may be loaded with `proved=True`.
    """
    ranks, folder = Ranks(group), Path(directory)
    damaged: dict[str, str] = {}
    told: set[Path] = set()

    def tell(path: Path, reason: str) -> None:
        if path not in told:
            told.add(path)
            on_damaged(path, reason)

    def choose() -> Path | None:
        return _choose(folder, lambda path: damaged.get(path.name) or _damage(path, thorough=False), tell)

    while (found := ranks.same(f"no checkpoint in {folder} could be chosen", choose)) is not None:
        try:
            prove(found, ranks)
            return found
        except DamagedError as error:
            damaged[found.name] = error.why or error.what
    return None


def _choose(directory: Path, damage: Callable[[Path], str | None], on_damaged: OnDamaged) -> Path | None:
    reasons = []
    for path in reversed(list_checkpoints(directory)):
        reason = damage(path)
        if reason is None:
            return path
        on_damaged(path, reason)
        reasons.append(f"{path.name}: {reason}")
    if reasons:
        raise RunError(
            f"none of the {len(reasons)} checkpoints in {directory} is whole",
            why="; ".join(reasons[:4]),
            fix="restore one from a backup; or, to start afresh on purpose, move them away or pass --resume never",
        )
    return None


def _damage(path: Path, *, thorough: bool) -> str | None:
    """Why a checkpoint can't be trusted; None if it can. One of a later format is an error, not damage."""
    try:
        problems = problems_of_files(path, read_manifest(path), thorough=thorough)
    except DamagedError as error:
        return error.what + (f": {error.why}" if error.why else "")
    return "; ".join(problems[:4]) or None


def rotate(
    directory: str | os.PathLike[str],
    keep: int | None,
    protect: Iterable[str | os.PathLike[str]] = (),
    *,
    on_damaged: OnDamaged = _warn,
) -> list[Path]:
    """Delete whole checkpoints beyond the newest `keep`, once the newest is proved byte by byte; sweep dead writers'
    folders.

    One process of a run calls it (rank 0, after a save). A damaged checkpoint counts for nothing and is left for
    whoever wants to look. What is deleted first loses its name, so that a kill half-way leaves no half checkpoint.

    Args:
        keep: how many to keep, at least 1; None: all of them.
        protect: checkpoints that stay in any case (the best one).
        on_damaged: told the newest checkpoint, and why it does not prove whole: then nothing is deleted.

    Returns:
        the deleted checkpoints; none if the newest does not prove whole.
    """
    assert keep is None or keep >= 1, "the only checkpoint is never deleted"
    folder = Path(directory)
    sweep(folder)
    if keep is None:
        return []
    protected = {Path(path).name for path in protect}
    whole = [path for path in reversed(list_checkpoints(folder)) if _damage(path, thorough=False) is None]
    gone = [path for path in whole[keep:] if path.name not in protected]
    if not gone:
        return []
    if (reason := _damage(whole[0], thorough=True)) is not None:
        on_damaged(whole[0], reason)
        return []
    for path in reversed(gone):  # the oldest first
        _delete(path)
    return gone


def sweep(directory: Path) -> list[Path]:
    """Delete what dead writers left: on this host the process is gone, on others the folder lay still for an hour."""
    try:
        entries = sorted(entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    dead = [Path(path) for path in entries if _is_dead(Path(path))]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)  # another sweeper may be at it
    return dead


def set_aside(directory: str | os.PathLike[str], after: int) -> list[Path]:
    """Rename the checkpoints of steps later than `after`: the run goes back there, and will write these steps anew.

    They are kept under names that no run resumes from. One process calls it, when it resumes from other than the
    newest.
    """
    later = [path for path in list_checkpoints(directory) if (step_of(path.name) or 0) > after]
    for path in reversed(later):  # the newest first: whatever stops this, no gap is left behind
        path.rename(path.with_name(aside_name(step_of(path.name) or 0)))
    if later:
        sync_directory(Path(directory))
    return later


def _delete(path: Path) -> None:
    doomed = path.with_name(Writer.new().folder(path.name))
    path.rename(doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed)


def _is_dead(path: Path) -> bool:
    writer = Writer.of(path.name)
    if writer is None or is_in_flight(writer.token):
        return False
    here = Writer.new()
    if writer.host == here.host:
        return writer.pid == here.pid or not _is_running(writer.pid)
    try:
        touched = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
    except FileNotFoundError:  # it is being removed or renamed just now
        return False
    return time.time() - touched > _ABANDONED_SECONDS


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
