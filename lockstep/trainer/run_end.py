"""Ends a run that the caller's loop has left open, when its trainer is gone or Python ends.

Tests: tests/trainer/test_ends.py, tests/trainer/test_loops.py
"""

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import wraps
from shlex import quote
from typing import Any, ParamSpec, TypeVar

from lockstep.errors import RunError
from lockstep.monitor import Monitor
from lockstep.trainer import saved_state
from lockstep.trainer.caller_batches import OpenStep
from lockstep.trainer.checkpointer import Checkpointer
from lockstep.trainer.run_state import RunState

_log = logging.getLogger("lockstep")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class RunEnd:
    """Closes a run; its `TrainingRun` is gone by then, or the process ends."""

    run: RunState
    monitor: Monitor
    checkpointer: Checkpointer
    first: int  # the step after which it begins
    path: str | None  # the run directory of a caller's loop
    open_step: OpenStep  # of `training_step`
    waits_for: str  # settings that wait for a first evaluation of the loop
    is_recorded: bool = False  # the event of its end is written
    has_failed: bool = False  # an error of the training ended it

    def fail(self) -> None:
        """Note that an error of the training ended the run."""
        self.has_failed = True

    def record(self) -> None:
        """Record how the run ended."""
        reason = "preempted" if self.run.step.stopping else "done"
        self.monitor.event("stop", step=self.run.step.progress.step, reason=reason)
        self.is_recorded = True

    def was_evaluated(self) -> None:
        """Note that no setting waits for an evaluation any more."""
        self.waits_for = ""

    def __call__(self) -> None:
        """Save the last step, close the monitor, and print where the run is.

        The last step is saved here only if this is the only rank.
        """
        # an exception ended the script
        failed = self.has_failed or getattr(sys, "last_value", None) is not None
        step = self.run.step.progress.step
        took_steps = step > self.first
        is_saved = step == self.first or not self.checkpointer.needs_save
        if not failed:
            self._warn_of_what_was_not_done(took_steps=took_steps)
        if self.path is not None and not (is_saved or failed) and self.run.layout.world_size == 1:
            is_saved = self._save(step)
        if self.path is not None and not self.is_recorded and not failed:
            self.monitor.event("stop", step=step, reason="done")
        self.monitor.close()
        self.run.output.publish()
        if self.path is None or not took_steps or self.has_failed:
            return
        if not is_saved:
            fix = "all ranks call trainer.save_checkpoint() after the loop"
            self.monitor.say(f"warning: step {step} is the last one, and it is not saved: {fix}")
        elif not failed:
            self.monitor.say(done_line(step, self.path))

    def _save(self, step: int) -> bool:
        """Save the last step; return whether it is saved."""
        try:
            self.run.step.flush()
            self.checkpointer.save_as_asked(saved_state.snapshot(self.run))
        except RunError as error:
            _log.warning("warning: step %d could not be saved: %s", step, error)
            return False
        return True

    def _warn_of_what_was_not_done(self, *, took_steps: bool) -> None:
        """Warn of micro-batches without an update, and of settings that await an evaluation.

        No evaluation has reached those settings.
        """
        if waiting := self.open_step.sentence():
            _log.warning(
                "warning: %s, which the end of the loop drops: call trainer.flush() after it",
                waiting,
            )
        if self.waits_for and took_steps:
            fix = "call trainer.evaluate(val_data) in it"
            _log.warning(
                "warning: %s did nothing: the loop made no evaluation that counts; %s",
                self.waits_for,
                fix,
            )


def done_line(step: int, directory: str | None) -> str:
    """Return the line of a run that has come to its end: where it is, and what to type next."""
    if directory is None:
        return f"done after step {step}"
    return f"done after step {step} in {directory}; `lockstep report {quote(directory)}` draws it"


_open_loops: "weakref.WeakSet[Generator[Any, None, None]]" = weakref.WeakSet()


def closed_at_exit(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Close the generators that `function` returns before Python ends.

    Modules still have their contents then.
    """

    @wraps(function)
    def opened(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        loop = function(*args, **kwargs)
        assert isinstance(loop, Generator)
        _open_loops.add(loop)
        return loop

    return opened


@atexit.register
def _close_open_loops() -> None:
    for loop in list(_open_loops):
        loop.close()
