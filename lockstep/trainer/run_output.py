"""`RunOutput`: where a run writes.

Tests: tests/run_directory/test_run_lock.py, tests/trainer/test_resume.py
"""

import os
from functools import cached_property
from pathlib import Path

from lockstep import checkpoint
from lockstep.config import CheckpointConfig
from lockstep.errors import UsageError
from lockstep.files.paths import bucket_url, local_path, run_directory
from lockstep.heartbeat.writer import went_forward
from lockstep.machine.environment import MEMORY
from lockstep.machine.output import say
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_lock import RunLock
from lockstep.run_directory.run_mirror import RunMirror, local_folder


class RunOutput:
    """The run directory, the folder of checkpoints, and the lock that one run at a time holds.

    An `output_dir` that is the URL of a bucket has all of them there, beside a folder of this
    machine. Without one there is neither, and nothing is written. `memory` is where copies lie that
    outlive the ranks, if their launcher offers such a place.
    """

    def __init__(
        self, output_dir: str | Path | None, config: CheckpointConfig, *, world_size: int
    ) -> None:
        self._config = config
        self._world_size = world_size
        self._is_acquired = False
        self.directory: RunDirectory | None = None
        self.checkpoints: checkpoint.Directory | None = None
        self.memory: checkpoint.MemoryStorage | None = None
        self._lock: RunLock | None = None
        self._mirror: RunMirror | None = None  # of a run in a bucket; rank 0 uses it
        if output_dir is not None:
            url = bucket_url(output_dir, "output_dir")
            named = Path(output_dir) if url is None else local_folder(url)
            self.directory = RunDirectory(run_directory(named))
            own = self.directory.checkpoints
            is_a_proof = self.directory.path != named  # which writes to no storage of the user's
            self.checkpoints = (
                own
                if config.storage is None or is_a_proof
                else checkpoint.build_storage(config.storage)
            )
            if not is_a_proof:
                self.memory = _memory_of(self.directory.path)
            self._lock = RunLock(self.directory.path, say)
            cache = config.local_cache
            if cache is not None and isinstance(self.checkpoints, checkpoint.ObjectStorage):
                self.checkpoints.cache_in(local_path(cache, "checkpoint.local_cache"))
            if url is not None and isinstance(self.checkpoints, checkpoint.ObjectStorage):
                self._mirror = RunMirror(
                    self.checkpoints.client, self.directory.path, say, went_forward
                )
                self.checkpoints.call_before_commit(self._mirror.push)

    def keeps(self, path: str | Path) -> bool:
        """Return whether a path is the run's own folder of checkpoints."""
        own = self.checkpoints
        return (
            isinstance(own, Path) and own.resolve() == local_path(path, "save_checkpoint").resolve()
        )

    def acquire(self) -> None:
        """Check a storage elsewhere; take the lock on rank 0, which holds it until `release`.

        All ranks call it; once they have the directory, nothing happens.
        """
        if self._is_acquired:
            return
        if isinstance(self.checkpoints, checkpoint.Storage):
            self.checkpoints.meet()
            checkpoint.Ranks().broadcast(
                f"{self.checkpoints} could not be checked", self.checkpoints.check
            )
        if self._lock is not None:
            checkpoint.Ranks().broadcast(
                "the run directory could not be locked", self._lock.acquire
            )
        if self._mirror is not None:
            checkpoint.Ranks().broadcast(
                f"the run in {self._mirror} could not be fetched", self._mirror.acquire
            )
        self._is_acquired = True

    def check_lock(self) -> None:
        """Raise an error if another run has taken the directory."""
        if self._lock is not None:
            self._lock.check()
        if self._mirror is not None:
            self._mirror.check()

    def release(self) -> None:
        """Let other runs have the directory."""
        self._is_acquired = False
        if self._mirror is not None:
            self._mirror.release()
        if self._lock is not None:
            self._lock.release()

    def publish(self) -> None:
        """Copy what was written after `release` to the bucket of the run, if it has one."""
        if self._mirror is not None and checkpoint.Ranks().is_main:
            self._mirror.push_late()

    @cached_property
    def is_shared(self) -> bool:
        """Return whether all ranks see the same folder of checkpoints; all of them ask together.

        Raises:
            UsageError: they do not, and the format of the checkpoints needs it.
        """
        folder = self.checkpoints
        config = self._config
        if self._world_size == 1 or folder is None or config.save_strategy == "none":
            return True
        shared = checkpoint.is_shared(folder)
        if not shared and config.format != "full":
            what = f"the hosts do not share {folder}"
            why = "each rank writes its part of a checkpoint, and they belong into one folder"
            fix = (
                "choose an --output-dir that all hosts mount, or checkpoint.format: full, which"
                " rank 0 writes"
            )
            raise UsageError(what, where="checkpoint.format: " + config.format, why=why, fix=fix)
        return shared


def _memory_of(run: Path) -> checkpoint.MemoryStorage | None:
    """Return where this launch keeps copies of a run; None: it keeps none."""
    folder = os.environ.get(MEMORY)
    return checkpoint.copies_of(Path(folder), run) if folder else None
