"""Opens the monitor of a run, and logs how it starts.

Tests: tests/trainer/test_ends.py, tests/monitor/test_figures.py
"""

import os
import platform
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lockstep.config import MonitorConfig
from lockstep.errors import warn_at_caller
from lockstep.machine import accelerator, cores
from lockstep.machine.output import is_rewritable, say
from lockstep.monitor import Figures, Monitor, PhaseClock
from lockstep.monitor.figures import first_step_counted, gather_objects, peak_flops
from lockstep.run_directory.run_files import replace_file
from lockstep.strategy import strategy_named
from lockstep.trainer.run_state import RunState
from lockstep.trainer.start_lines import lines_at_start

AroundStep = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Announcer:
    """Prints lines for the person who started the run, on rank 0.

    Where steps are not recorded the monitor has no console, and the lines are printed all the same.
    """

    monitor: Monitor
    is_recorded: bool  # the steps
    is_main: bool

    def say(self, *lines: str) -> None:
        """Print lines."""
        if self.is_recorded:
            self.monitor.say(*lines)
        elif self.is_main:
            say(*lines)

    def warn(self, text: str) -> None:
        """Print a warning; where steps are not recorded, as Python's."""
        if self.is_recorded:
            self.monitor.say(f"warning: {text}")
        elif self.is_main:
            warn_at_caller(text)


def open_monitor(
    run: RunState,
    total: int | None,
    log_lines: Sequence[str],
    callbacks: Sequence[Any],
    *,
    prints: bool = True,
) -> tuple[Monitor, AroundStep]:
    """Create the monitor of a run, observe its steps, and log how it starts; all ranks call it.

    Args:
        run: whose steps are observed.
        total: the number of its last step, if it is known.
        log_lines: further lines to log.
        callbacks: those that were given as objects, beside those that the config names.
        prints: False leaves out the sink `console`.

    Returns:
        the monitor, and the context for each step, which counts the operations of the first.
    """
    config = run.config.monitor
    if not prints:
        sinks = [name for name in config.sinks if name != "console"]
        config = config.model_copy(update={"sinks": sinks})
    directory = run.output.directory
    if directory is not None and run.is_main_process:
        directory.create()
        replace_file(directory.config, run.config.to_yaml())

    figures = _figures_of(run)
    around_step: AroundStep = first_step_counted(figures) if _is_counted(run) else nullcontext
    ranks = gather_objects(_this_rank(run))
    monitor = Monitor(
        config,
        directory,
        is_main=run.is_main_process,
        total_steps=total,
        start_step=run.step.progress.step,
        figures=figures,
        hosts=[rank["host"] for rank in ranks],
        callbacks=callbacks,
    )
    lines = [*lines_at_start(run, total), *log_lines]
    monitor.say(*lines)
    _record_start(monitor, run, figures, total_steps=total, lines=lines, ranks=ranks)
    run.step.observe(figures.clock, monitor.logs if config.gradient_norms else None)
    return monitor, around_step


def _figures_of(run: RunState) -> Figures:
    """Return what measures the steps of a run on this rank."""
    device = run.cluster.device
    return Figures(
        PhaseClock(device=None if device.type == "cpu" else device),
        peak=(
            peak_flops(device, run.mode, _peak_before(run)) if run.is_main_process else (0.0, "")
        ),
        recomputes=run.config.training.gradient_checkpointing != "none",
    )


def _peak_before(run: RunState) -> tuple[float, str]:
    """Return the peak, and its source, of the process in whose place this one was started.

    Without one, or if it had other threads, cores or another device: none.
    """
    directory = run.output.directory
    if directory is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return 0.0, ""
    starts = [event for event in directory.read_events() if event["kind"] == "start"]
    mine = _this_rank(run)
    if not starts or {**starts[-1]["ranks"][0], "process": mine["process"]} != mine:
        return 0.0, ""
    return starts[-1]["peak_flops"], starts[-1]["peak_source"]


def _is_counted(run: RunState) -> bool:
    """Return whether operations can be counted as they run: in this thread, in eager mode."""
    in_threads = strategy_named(run.layout.strategy).in_threads
    return not run.config.training.compile and not in_threads


def _this_rank(run: RunState) -> dict[str, Any]:
    """Return where this rank runs, as the event `start` has it for each rank."""
    device = run.cluster.device
    threads = torch.get_num_threads()
    if device.type == "cpu":
        device_name = f"CPU, {threads} thread{'s' * (threads != 1)}"
    else:
        device_name = accelerator.name_of(device)
    return {
        "rank": run.cluster.facts.rank,
        "host": socket.gethostname(),
        "device": device_name,
        "process": os.getpid(),
        "threads": threads,
        "cores": len(cores.allowed()),
    }


def _record_start(
    monitor: Monitor,
    run: RunState,
    figures: Figures,
    *,
    total_steps: int | None,
    lines: list[str],
    ranks: list[dict[str, Any]],
) -> None:
    """Write the event `start`: what runs, where, and on which versions.

    Args:
        monitor: of the run, which writes it.
        run: that starts.
        figures: for the peak that its speed is compared with.
        total_steps: the number of the last step, if it is known.
        lines: that the log begins with.
        ranks: where each rank runs (`_this_rank`).
    """
    versions = {
        "lockstep": version("lockstep-train"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    monitor.event(
        "start",
        layout=str(run.layout),
        sizes=run.layout.sizes,
        world_size=run.layout.world_size,
        lines=lines,
        ranks=ranks,
        step=run.step.progress.step,
        total_steps=total_steps,
        parameters=run.step.placed.num_parameters,
        peak_flops=figures.peak,
        peak_source=figures.peak_source,
        versions=versions,
        data_workers=run.data_workers,
        given=_given_in_python(run),
    )


def open_bar(run: RunState, total: int | None, progress: bool | None) -> Monitor:
    """Return a monitor that shows the progress of steps which nothing records."""
    config = run.config.monitor
    sinks: list[str] = []
    if progress or (progress is None and "console" in config.sinks and is_rewritable(sys.stdout)):
        sinks = ["console" if progress else "lockstep.monitor.console:Bar"]
    shown = MonitorConfig(sinks=sinks, log_steps=config.log_steps)
    start = run.step.progress.step
    return Monitor(shown, None, is_main=run.is_main_process, total_steps=total, start_step=start)


def records_steps(run: RunState, callbacks: Sequence[Any]) -> bool:
    """Return whether the steps of a caller's own loop are recorded.

    They are if there is a run directory, or if someone asks for them.
    """
    config = run.config.monitor
    asked = config.model_fields_set - {"log_steps", "sinks"}
    own_sinks = any(":" in name for name in config.sinks)
    return run.output.directory is not None or own_sinks or bool(asked) or bool(callbacks)


def _given_in_python(run: RunState) -> dict[str, str]:
    """Return, in words, what a script has set in Python and the config does not show.

    It is recorded to compare runs.
    """
    given = {}
    if run.config.model.name is None:
        given["model"] = type(run.step.placed.parts[0]).__name__
    if run.own_optimizer:
        optimizer = run.step.optimizer
        settings = {**optimizer.defaults, "lr": optimizer.param_groups[0].get("initial_lr")}
        named = ", ".join(
            f"{key}={value}"
            for key, value in settings.items()
            if value and not isinstance(value, bool)
        )
        given["optimizer"] = f"{type(optimizer).__name__}({named})"
    if Path(sys.argv[0]).name not in ("__main__.py", "lockstep"):
        given["arguments"] = shlex.join(sys.argv[1:])[:200]
    return given
