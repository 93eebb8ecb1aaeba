"""The doors for writing: `save`, to a folder of checkpoints, and `save_as`, to a path of the caller's."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from lockstep.checkpoint.commit import commit, not_written, unfinished
from lockstep.checkpoint.export import rewrite_full
from lockstep.checkpoint.gathered import commit_gathered
from lockstep.checkpoint.local import commit_local
from lockstep.checkpoint.names import step_name
from lockstep.checkpoint.snapshot import Snapshot, Staged, stage
from lockstep.checkpoint.together import Ranks
from lockstep.errors import RunError

Format = Literal["sharded", "full", "local"]
_FIRST_PAUSE = 0.5  # seconds before the second try; doubled for each further one


@dataclass(frozen=True)
class Manner:
    """How checkpoints of a run are written.

    Attributes:
        format: see `save`.
        shared: whether all ranks see one folder; if not, rank 0 gathers and writes everything (`format: full` only).
        retries: how often a save that the storage refused is tried again, after pauses that double.
        on_retry: told the error and the seconds of the pause, on rank 0.
    """

    format: Format = "sharded"
    shared: bool = True
    retries: int = 0
    on_retry: Callable[[RunError, float], object] = lambda _error, _seconds: None


def save(
    directory: str | Path,
    step: int,
    snapshot: Snapshot,
    *,
    config_yaml: str,
    format: Format = "sharded",
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint; every rank of the group calls it. When it returns, the checkpoint is on disk, whole.

    Args:
        directory: the folder of checkpoints, which all ranks share; made if it is not there.
        step: the step after which the snapshot was taken.
        config_yaml: the resolved config of the run, kept beside the state.
        format: `sharded`: each rank writes a file of its own blocks; `full`: one file of whole tensors a part, which
            rank 0 makes of the sharded ones, one tensor in memory at a time. Any number of ranks loads either.
            `local`: each rank's shards as they lie in its memory, replicas too; only the same ranks load it again.
        group: the ranks that hold the state; the default group if None. Gloo or NCCL.

    Returns:
        the folder of the new checkpoint, `directory/step-00000100`.

    Raises:
        UsageError: the snapshot can't be stored, or a checkpoint of this step exists already and is whole.
        RunError: the disk refused; nothing of the attempt stays behind, older checkpoints are untouched.
            The same error on every rank.
    """
    path = Path(directory) / step_name(step)
    return save_as(path, step, snapshot, config_yaml=config_yaml, manner=Manner(format), group=group)


def save_as(
    path: str | Path,
    step: int,
    snapshot: Snapshot,
    *,
    config_yaml: str,
    manner: Manner | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """`save`, to a folder of the caller's naming: `path` is the checkpoint itself, and must not exist yet.

    Args:
        manner: unset: sharded, into a folder that all ranks share, tried once.
    """
    ranks = Ranks(group)
    staged = ranks.agree(not_written(step), lambda: stage(snapshot))
    return write(Path(path), step, staged, config_yaml, manner or Manner(), ranks)


def write(path: Path, step: int, staged: Staged, config_yaml: str, manner: Manner, ranks: Ranks) -> Path:
    """`save_as`, for a snapshot that is staged already; every rank meets the same errors, and tries again alike."""
    pause = _FIRST_PAUSE
    for left in reversed(range(manner.retries + 1)):
        try:
            return _write_once(path, step, staged, config_yaml, manner, ranks)
        except RunError as error:
            if not left:
                raise
            if ranks.is_main:
                manner.on_retry(error, pause)
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last try returns or raises")


def _write_once(path: Path, step: int, staged: Staged, config_yaml: str, manner: Manner, ranks: Ranks) -> Path:
    if not manner.shared:
        assert manner.format == "full", "the sharded format needs one folder that all ranks share"
        return commit_gathered(path, step, staged, config_yaml, ranks)
    if manner.format == "local" and ranks.size > 1:
        return commit_local(path, step, staged, config_yaml, ranks)
    if manner.format != "full" or ranks.size == 1:  # one rank's blocks are whole tensors
        return commit(path, step, staged, config_yaml, ranks)
    with unfinished(path) as mine:
        scattered = path.with_name(ranks.same(not_written(step), lambda: mine.name))
        commit(scattered, step, staged, config_yaml, ranks)
        ranks.same(not_written(step), lambda: rewrite_full(scattered, path).name)
    return path
