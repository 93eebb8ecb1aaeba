"""Copies a run into the memory of its machine, every `checkpoint.memory_steps` steps.

Ranks that are started again go on from the newest copy (`resume.find`). What the copies are, and
why they survive a rank, is in `lockstep/checkpoint/memory.py`.

Tests: tests/faults/test_memory_copies.py
"""

from collections.abc import Callable

from lockstep import checkpoint
from lockstep.monitor import Monitor
from lockstep.trainer import saved_state
from lockstep.trainer.run_state import RunState

# Runs a save, and reports its error or raises it: `checkpoint.on_failure`.
Guard = Callable[[Callable[[], object]], object]


class MemoryCopies:
    """Makes the copies of one run; every rank has one, and calls each method at the same steps.

    Args:
        storage: where they lie.
        guard: what happens when a copy fails.
    """

    def __init__(
        self, run: RunState, storage: checkpoint.MemoryStorage, monitor: Monitor, guard: Guard
    ) -> None:
        steps = run.config.checkpoint.memory_steps
        assert steps is not None
        self._run = run
        self._storage = storage
        self._monitor = monitor
        self._guard = guard
        self._steps = steps
        self._is_recorded = False
        self._saver = checkpoint.AsyncSaver(then=self._committed, use="memory")

    @property
    def _is_due(self) -> bool:
        return self._run.step.progress.step % self._steps == 0

    def finish_before_next(self) -> None:
        """Wait for the copy that is under way, if the next one is due; raise its error."""
        if self._is_due:
            with self._run.step.clock.during("checkpoint"):
                self.finish()

    def after_step(self) -> None:
        """Copy the run if it is due."""
        if not self._is_due:
            return
        step = self._run.step.progress.step
        with self._run.step.clock.during("checkpoint"):
            self._run.step.flush()  # host waits for the device: bad numbers must not be kept
            self._monitor.flush()  # a run that resumes here has the records up to here
            self._guard(lambda: self._begin(step))

    def finish(self) -> None:
        """Wait for the copy that is under way."""
        self._guard(self._saver.wait)

    def finish_alone(self) -> None:
        """Wait for it on this rank, which ends with an error; the other ranks are not asked."""
        self._saver.finish_alone()

    def _begin(self, step: int) -> None:
        contents = saved_state.snapshot(self._run)
        self._saver.save(self._storage, step, contents, config_yaml=self._run.config.to_yaml())

    def _committed(self, path: checkpoint.CheckpointPath) -> None:
        """Delete the copy before this one, and record the size of the first; on rank 0."""
        step = checkpoint.step_of(path.name)
        assert step is not None
        self._storage.keep_only(step)
        if not self._is_recorded:
            self._is_recorded = True
            num_bytes = checkpoint.read_manifest(path).num_bytes
            self._monitor.event("memory_copy", step=step, bytes=num_bytes, every=self._steps)
