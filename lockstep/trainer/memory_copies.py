"""Copies a run into the memory of each of its machines, every `checkpoint.memory_steps` steps.

Ranks that are started again, or go on after others have died, begin with the newest copy
(`resume.find`). What the copies are, and why they survive a rank, is in
`lockstep/checkpoint/memory.py`.

A copy of a step is complete before the step is recorded. Only a step that is evaluated, or one of
the caller's own loop, is copied after what follows its record: an early stop, a learning rate or
the caller's code may depend on it. A death meanwhile costs that step.

Tests: tests/faults/test_memory_copies.py
"""

from collections.abc import Callable

from lockstep import checkpoint
from lockstep.config import Config
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
        self._monitor = monitor
        self._guard = guard
        self._steps = steps
        self._is_recorded = False
        self._tried = -1  # the step that was copied last, or could not be
        self._written: int | None = None  # the step of a copy that is not visible yet
        self._writer = checkpoint.MemoryWriter(storage)
        self._config: Config | None = None  # that `_config_yaml` says, on rank 0
        self._config_yaml = ""

    @property
    def _is_due(self) -> bool:
        step = self._run.step.progress.step
        return step % self._steps == 0 and step != self._tried

    def write(self) -> None:
        """Copy the run if it is due; the copy is complete on return, and not visible."""
        if not self._is_due:
            return
        self._tried = self._run.step.progress.step
        with self._run.step.clock.during("checkpoint"):
            self._run.step.flush()  # host waits for the device: bad numbers must not be kept
            self._guard(self._write)

    def commit(self) -> None:
        """Make the copy visible that was written, if one was, once the records have come to it."""
        step = self._written
        if step is None:
            return
        self._written = None
        with self._run.step.clock.during("checkpoint"):
            self._monitor.flush()
            self._writer.commit(step)

    def go_back(self) -> None:
        """Note that the run has gone back: steps that were copied are made again."""
        self._tried = -1

    def _write(self) -> None:
        step = self._run.step.progress.step
        if self._run.is_main_process and self._config is not self._run.config:
            self._config = self._run.config
            self._config_yaml = self._config.to_yaml()
        contents = saved_state.snapshot(self._run)
        num_bytes = self._writer.write(step, contents, config_yaml=self._config_yaml)
        self._written = step
        if not self._is_recorded:
            self._is_recorded = True
            self._monitor.event("memory_copy", step=step, bytes=num_bytes, every=self._steps)
