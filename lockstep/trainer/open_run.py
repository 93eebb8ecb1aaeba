"""Opens the run of each way to train, and closes the one before it.

    train            a monitor of its own, evaluations; closed when `train` returns
    steps,           one run for all loops after each other; recorded with a run directory, else
    training_step    its progress alone is shown
    log              before any run: a monitor for these values alone

Tests: tests/trainer/test_loops.py, tests/trainer/test_trainer.py, tests/trainer/test_ends.py
"""

import atexit
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from lockstep.config import MonitorConfig
from lockstep.errors import NoEffectWarning, warn_at_caller
from lockstep.monitor import Monitor
from lockstep.trainer import no_effect, run_monitor, start_lines
from lockstep.trainer.caller_batches import OpenStep
from lockstep.trainer.checkpointer import Checkpointer
from lockstep.trainer.evaluator import Evaluator
from lockstep.trainer.run_evaluations import RunEvaluations
from lockstep.trainer.run_start import RunStart
from lockstep.trainer.run_state import RunState
from lockstep.trainer.training_run import TrainingRun


class OpenRun:
    """The run of a trainer that is open, or was the last, and its monitor; every rank has one."""

    def __init__(
        self, run: RunState, start: RunStart, callbacks: Sequence[Any], open_step: OpenStep
    ) -> None:
        self._run = run
        self._start = start
        self._callbacks = callbacks  # those that were given as objects
        self._open_step = open_step
        self.current: TrainingRun | None = None  # the run in progress, or the last
        self._monitor: Monitor | None = None  # that of the recorded run, or of `log` alone
        # warnings that are not printed yet: no run has recorded anything
        self._placement_warnings = run.step.placed.warnings()

    def for_train(
        self, total: int | None, lines: Sequence[str], evaluator: Evaluator
    ) -> tuple[TrainingRun, RunEvaluations]:
        """Open the run of `Trainer.train`, which logs the lines first, and its evaluations."""
        run = self._run
        monitor, around_step = run_monitor.open_monitor(run, total, lines, self._callbacks)
        evaluations = RunEvaluations(run, monitor, evaluator)
        self._monitor = monitor
        self.current = TrainingRun(run, monitor, around_step, evaluations)
        return self.current, evaluations

    def for_callers_loop(self, total: int | None, progress: bool | None) -> TrainingRun:
        """Return the run of a loop of the caller's own: the open one, or a new one."""
        current = self.current
        state = self._run
        if current is not None and current.is_recorded and not current.is_closed:
            current.settle()
            current.monitor.go_on_to(total)
            return current
        self.close()
        lines = self._start.take_lines()
        around_step: run_monitor.AroundStep = nullcontext
        is_recorded = run_monitor.records_steps(state, self._callbacks)
        if is_recorded:
            prints = progress is not False
            monitor, around_step = run_monitor.open_monitor(
                state, total, lines, self._callbacks, prints=prints
            )
            self._monitor = monitor
        else:
            monitor = run_monitor.open_bar(state, total, progress)
            if not progress:
                self._start.report("log_steps", no_effect.of_unrecorded_loop)
            idle = start_lines.idle_ranks(state)
            if idle and state.is_main_process:
                warn_at_caller(idle)
        run = TrainingRun(
            state,
            monitor,
            around_step,
            in_callers_loop=True,
            is_recorded=is_recorded,
            open_step=self._open_step,
        )
        self.current = run
        if not is_recorded:
            warnings_of_placement = self._placement_warnings
            self._placement_warnings = []
            run.announcer.say(*warnings_of_placement, *lines)
        return run

    def checkpointer(self) -> Checkpointer:
        """Return the current run's checkpointer, or one where nothing is recorded."""
        if self.current is not None:
            return self.current.checkpointer
        run = self._run
        monitor = Monitor(
            MonitorConfig(sinks=[]), run.output.directory, is_main=run.is_main_process
        )
        return Checkpointer(run, monitor)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the caller's values, on rank 0; see `Trainer.log`."""
        run = self._run
        directory = run.output.directory
        # nothing is recorded: one for `log` alone, until the process ends
        if self._monitor is None:
            if directory is not None:
                directory.create()
            self._monitor = Monitor(run.config.monitor, directory, is_main=True)
            atexit.register(self._monitor.close)
        lost = self._monitor.on_log(step, values)
        if lost and self._start.is_new("log"):
            text = no_effect.of_log(lost, records=directory is not None)
            warn_at_caller(text, NoEffectWarning)

    def close(self) -> None:
        """Close the monitor of an earlier loop, or of `log` alone."""
        if self.current is not None:
            self.current.close()
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None
