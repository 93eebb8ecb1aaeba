"""Brings a run to where it begins: its lock, the checkpoint it goes on from, its data.

Tests: tests/trainer/test_loops.py, tests/trainer/test_resume.py, tests/trainer/test_no_effect.py
"""

from collections.abc import Callable, Iterable
from typing import Any

from lockstep import checkpoint
from lockstep.data import StepSource
from lockstep.errors import UsageError
from lockstep.run_directory import recovery_clock
from lockstep.trainer import data_setup, loss_check, no_effect, resume
from lockstep.trainer.changed_settings import require_same_epoch
from lockstep.trainer.run_state import RunState


class RunStart:
    """Begins a trainer's run; every rank has one, and calls its methods together."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._is_decided = False  # the run was resumed, loaded, or told to start afresh
        # until its data are compared with this run's
        self._resumed_from: checkpoint.CheckpointPath | None = None
        self._lines: list[str] = []  # to log at the start
        # the ways to train, and data, whose settings without effect were reported
        self._reported: set[str] = set()

    def report(
        self, where: str, without_effect: Callable[[], Iterable[no_effect.NoEffect]]
    ) -> None:
        """Report settings without effect somewhere, once."""
        if self.is_new(where):
            no_effect.report(without_effect(), self._run.asked, is_main=self._run.is_main_process)

    def is_new(self, where: str) -> bool:
        """Return whether nothing was reported of a place yet; the next call returns False."""
        is_new = where not in self._reported
        self._reported.add(where)
        return is_new

    def take_lines(self) -> list[str]:
        """Return the lines to log at the start, once."""
        lines = self._lines
        self._lines = []
        return lines

    def begin(self, data: Any, where: str | None = None) -> None:
        """Lock the run directory, and resume by `checkpoint.resume` before the first step.

        `where` names the way to train in messages about settings that have no effect in it; None:
        `train`.
        """
        run = self._run
        if where is not None:
            self.report(where, lambda: no_effect.of_way(run.config, where))
        run.output.acquire()
        if self._is_decided or run.step.progress.step:
            return
        run.adopt_batch_size(data)
        how = run.config.checkpoint.resume
        if run.output.directory is not None or how not in ("auto", "never"):
            self.go_on_from(how)

    def go_on_from(self, how: str) -> checkpoint.CheckpointPath | None:
        """Resume as `Trainer.resume` does.

        Ranks that a launcher has started again go on from what this launch has saved.
        """
        output = self._run.output
        output.acquire()
        how = resume.after_restart(output, how)
        self._resumed_from, lines = resume.resume(self._run, how)
        recovery_clock.end_of("loaded")
        if recovery_clock.is_running() and self._run.step.progress.step >= loss_check.STEPS:
            # the survivors of a death have checked this loss in the run's first steps
            self._run.loss_check.skip()
        self._is_decided = True
        self._lines += lines
        return self._resumed_from

    def load(self, path: str) -> dict[str, Any]:
        """Load a checkpoint from which the run goes on; return its metadata."""
        chosen = resume.find(self._run.output, path, "load_checkpoint")
        loaded = chosen.load(
            lambda saved, verified: resume.load(self._run, saved, is_verified=verified)
        )
        if loaded is None:
            what = f"there is no checkpoint in {path}"
            raise UsageError(
                what, fix="give a checkpoint, a run directory or its folder checkpoints/"
            )
        self._is_decided = True
        self._resumed_from, (metadata, lines) = loaded
        self._lines += lines
        return metadata

    def open_data(self, data: Any, epochs: int | None) -> tuple[StepSource, int | None]:
        """Return the remaining steps, and the number of the last one, if it is known."""
        run = self._run
        run.check_can_train()
        self.report("data", lambda: no_effect.beside_data(run.config, data))
        data_setup.require_one_length(run.config, epochs)
        run.adopt_batch_size(data)
        source, total = data_setup.open_source(
            data,
            run.config,
            run.step.placed,
            epochs=epochs,
            global_batch_size=run.global_batch_size,
            start_step=run.step.progress.step,
            position=run.position,
        )
        run.adopt_source(source, data_setup.data_workers(data, run.config))
        if self._resumed_from is not None and not run.config.checkpoint.allow_changes:
            saved = self._resumed_from
            self._resumed_from = None
            require_same_epoch(source, run.global_batch_size, saved)
        run.plan_steps(total)
        if line := no_effect.unused_of_loader(data):
            self._lines.append(f"warning: {line}")
        if source.notice:
            self._lines.append(source.notice)
        return source, total
