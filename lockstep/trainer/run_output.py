"""`RunOutput`: where a run writes.

Tests: tests/test_run_lock.py, tests/trainer/test_resume.py
"""

import os
from functools import cached_property
from pathlib import Path

from lockstep import checkpoint
from lockstep.config import CheckpointConfig
from lockstep.environment import MEMORY
from lockstep.errors import UsageError
from lockstep.paths import local_path, run_directory
from lockstep.records import RunDirectory
from lockstep.run_lock import RunLock


class RunOutput:
    """The run directory, the folder of checkpoints, and the lock that one run at a time holds.

    Without an `output_dir` there is neither, and nothing is written. `memory` is where copies lie
    that outlive the ranks, if their launcher offers such a place.
    """

    def __init__(
        self, output_dir: str | Path | None, config: CheckpointConfig, *, world_size: int
    ) -> None:
        self._config = config
        self._world_size = world_size
        self.directory: RunDirectory | None = None
        self.checkpoints: checkpoint.Directory | None = None
        self.memory: checkpoint.MemoryStorage | None = None
        self._lock: RunLock | None = None
        if output_dir is not None:
            named = local_path(output_dir, "output_dir")
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
            self._lock = RunLock(
                self.directory.path, lambda text: print(f"lockstep: {text}", flush=True)
            )

    def keeps(self, path: str | Path) -> bool:
        """Return whether a path is the run's own folder of checkpoints."""
        own = self.checkpoints
        return (
            isinstance(own, Path) and own.resolve() == local_path(path, "save_checkpoint").resolve()
        )

    def acquire(self) -> None:
        """Check a storage elsewhere; take the lock on rank 0, which holds it until `release`.

        All ranks call it.
        """
        if isinstance(self.checkpoints, checkpoint.Storage):
            checkpoint.Ranks().broadcast(
                f"{self.checkpoints} could not be checked", self.checkpoints.check
            )
        if self._lock is not None:
            checkpoint.Ranks().broadcast(
                "the run directory could not be locked", self._lock.acquire
            )

    def check_lock(self) -> None:
        """Raise an error if another run has taken the directory."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Let other runs have the directory."""
        if self._lock is not None:
            self._lock.release()

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
