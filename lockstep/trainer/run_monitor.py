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

from lockstep import accelerator, cores
from lockstep.config import MonitorConfig
from lockstep.errors import warn_at_caller
from lockstep.monitor import Figures, Monitor, PhaseClock
from lockstep.monitor.figures import first_step_counted, gather_objects, peak_flops
from lockstep.output import is_rewritable, say
from lockstep.run_files import replace_file
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
    training = run.config.training
    directory = run.output.directory
    layout = run.layout
    device = run.cluster.device
    if not prints:
        config = config.model_copy(
            update={"sinks": [name for name in config.sinks if name != "console"]}
        )
    if directory is not None and run.is_main_process:
        directory.create()
        replace_file(directory.config, run.config.to_yaml())

    figures = Figures(
        PhaseClock(device=None if device.type == "cpu" else device),
        peak=peak_flops(device, run.mode) if run.is_main_process else (0.0, ""),
        recomputes=training.gradient_checkpointing != "none",
    )
    # Operations are counted as they run, in this thread, in eager mode.
    is_counted = not training.compile and not strategy_named(layout.strategy).in_threads
    around_step: AroundStep = first_step_counted(figures) if is_counted else nullcontext

    threads = torch.get_num_threads()
    on = (
        f"CPU, {threads} thread{'s' * (threads != 1)}"
        if device.type == "cpu"
        else accelerator.name_of(device)
    )
    this_rank = {
        "rank": run.cluster.facts.rank,
        "host": socket.gethostname(),
        "device": on,
        "process": os.getpid(),
        "threads": threads,
        "cores": len(cores.allowed()),
    }
    ranks = gather_objects(this_rank)
    start = run.step.progress.step
    monitor = Monitor(
        config,
        directory,
        is_main=run.is_main_process,
        total_steps=total,
        start_step=start,
        figures=figures,
        hosts=[rank["host"] for rank in ranks],
        callbacks=callbacks,
    )
    lines = [*lines_at_start(run, total), *log_lines]
    monitor.say(*lines)
    versions = {
        "lockstep": version("lockstep-train"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    versions |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    monitor.event(
        "start",
        layout=str(layout),
        sizes=layout.sizes,
        world_size=layout.world_size,
        lines=lines,
        ranks=ranks,
        step=start,
        total_steps=total,
        parameters=run.step.placed.num_parameters,
        peak_flops=figures.peak,
        peak_source=figures.peak_source,
        versions=versions,
        data_workers=run.data_workers,
        given=_given_in_python(run),
    )
    run.step.observe(figures.clock, monitor.logs if config.gradient_norms else None)
    return monitor, around_step


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
