"""Holds what stands around the steps of a run: its lock, its monitor, its first log lines, reports of hangs.

Tests: tests/trainer/test_ends.py, tests/trainer/test_loops.py
"""

import atexit
import os
import platform
import socket
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from lockstep import accelerator, cores
from lockstep.checkpoint import Ranks
from lockstep.config import MonitorConfig
from lockstep.data import StepLoader, StepSource
from lockstep.heartbeat import DUMP
from lockstep.monitor import Figures, Monitor, PhaseClock
from lockstep.monitor.console import on_a_terminal
from lockstep.monitor.figures import first_step_counted, gather_objects, peak_flops
from lockstep.run_files import replace_file
from lockstep.strategy import strategy_named
from lockstep.torch_compat import flight_recorder
from lockstep.trainer.setup import given_in_python

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

AroundStep = Callable[[], AbstractContextManager[None]]


def lock_run_directory(trainer: "Trainer") -> None:
    """Take the run directory's lock on rank 0, which holds it until `train` ends.

    All ranks call it.
    """
    if trainer.lock is not None:
        Ranks().broadcast("the run directory could not be locked", trainer.lock.acquire)


def open_monitor(
    trainer: "Trainer", total: int | None, log_lines: Sequence[str], *, prints: bool = True
) -> tuple[Monitor, AroundStep]:
    """Create the monitor of a run, observe its steps, and log how it starts; all ranks call it.

    The context for each step, which is returned too, counts the operations of the first. Without
    `prints` the sink `console` is left out.
    """
    directory, config, training = (
        trainer.run_directory,
        trainer.config.monitor,
        trainer.config.training,
    )
    if not prints:
        config = config.model_copy(
            update={"sinks": [name for name in config.sinks if name != "console"]}
        )
    if directory is not None and trainer.is_main_process:
        directory.create()
        replace_file(directory.config, trainer.config.to_yaml())
    clock = PhaseClock(device=None if trainer.device.type == "cpu" else trainer.device)
    figures = Figures(clock)
    around_step: AroundStep = nullcontext
    in_threads = strategy_named(trainer.layout.strategy).uses_threads
    # operations are counted as they run, in this thread, in eager mode
    if not training.compile and not in_threads:
        around_step = first_step_counted(figures)
        figures.recomputes = training.gradient_checkpointing != "none"
    if trainer.is_main_process:
        figures.peak, figures.peak_source = peak_flops(trainer.device, trainer.mode)
    threads, device = torch.get_num_threads(), trainer.device
    on = (
        f"CPU, {threads} thread{'s' * (threads != 1)}"
        if device.type == "cpu"
        else accelerator.name_of(device)
    )
    ranks = gather_objects(
        {
            "rank": trainer.cluster.facts.rank,
            "host": socket.gethostname(),
            "device": on,
            "process": os.getpid(),
            "threads": threads,
            "cores": len(cores.allowed()),
        }
    )
    start = trainer.step.progress.step
    monitor = Monitor(
        config,
        directory,
        is_main=trainer.is_main_process,
        total_steps=total,
        start_step=start,
        figures=figures,
        hosts=[rank["host"] for rank in ranks],
        callbacks=trainer.callbacks,
    )
    lines = [*_lines(trainer, total), *log_lines]
    monitor.say(*lines)
    versions = {
        "lockstep": version("lockstep-train"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    versions |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    monitor.event(
        "start",
        layout=str(trainer.layout),
        sizes=trainer.layout.sizes,
        world_size=trainer.layout.world_size,
        lines=lines,
        ranks=ranks,
        step=start,
        total_steps=total,
        parameters=trainer.placed.num_parameters,
        peak_flops=figures.peak,
        peak_source=figures.peak_source,
        versions=versions,
        data_workers=trainer.data_workers,
        given=_given(trainer),
    )
    trainer.step.observe(clock, monitor.logs if config.gradient_norms else None)
    return monitor, around_step


def open_bar(trainer: "Trainer", total: int | None, progress: bool | None) -> Monitor:
    """Return a monitor that shows the progress of steps which nothing records."""
    config = trainer.config.monitor
    sinks: list[str] = []
    if progress or (progress is None and "console" in config.sinks and on_a_terminal()):
        sinks = ["console" if progress else "lockstep.monitor.console:Bar"]
    return Monitor(
        MonitorConfig(sinks=sinks, log_steps=config.log_steps),
        None,
        is_main=trainer.is_main_process,
        total_steps=total,
        start_step=trainer.step.progress.step,
    )


def records_steps(trainer: "Trainer") -> bool:
    """Return whether the steps of a caller's own loop are recorded: there is a run directory, or someone who asks."""
    asked = trainer.config.monitor.model_fields_set - {"log_steps", "sinks"}
    own_sinks = any(":" in name for name in trainer.config.monitor.sinks)
    return trainer.run_directory is not None or own_sinks or bool(asked) or bool(trainer.callbacks)


def no_step_left(trainer: "Trainer", total: int | None) -> str | None:
    """Return a line if a loop of the caller's own has no step to take."""
    step, following = trainer.step.progress.step, trainer.state.following
    if following.stopped:
        return f"no step is left to take: {following.why_stopped()}"
    if total is None or step < total:
        return None
    return (
        f"no step is left to take: {step} are done, and the run has {total}. Epochs and max_steps"
        " are counted from the start of the run: ask for more of them, such as epochs=epoch + 1 in"
        " a loop over epochs"
    )


def nothing_to_do(trainer: "Trainer", total: int | None, val_data: Any) -> list[str]:
    """Return log lines on what a run will not do: steps, if it is finished, and evaluations without validation data."""
    training, following, step = (
        trainer.config.training,
        trainer.state.following,
        trainer.step.progress.step,
    )
    key = "eval_strategy" if training.eval_strategy == "epoch" else "eval_steps"
    lines = []
    if total is not None and step >= total:
        lines.append(
            f"nothing left to do: {step} steps are done, and the run has {total}. For more of them"
            " raise training.max_steps or num_train_epochs; with checkpoint.resume=never it starts"
            " afresh (in Python: epochs=…, max_steps=…, resume='never')"
        )
    elif following.stopped:
        lines.append(f"nothing left to do: {following.why_stopped()}")
    if val_data is None and key in training.model_fields_set and getattr(training, key) is not None:
        lines.append(f"no validation data: training.{key} evaluates nothing")
    return lines


def _lines(trainer: "Trainer", last_step: int | None) -> list[str]:
    """Return the log lines at the start: the strategy first, always by name."""
    training, ranks = trainer.config.training, trainer.layout.data_parallel_size
    total, warmup = trainer.global_batch_size, training.warmup_steps
    micro_batches = total // training.batch_size
    early = (
        f"warning: the run ends after {last_step} steps, in the warm-up of {warmup}:"
        " training.warmup_steps"
    )
    precision = f"{trainer.mode} ({trainer.why_mode})" if trainer.why_mode else trainer.mode
    return [
        f"strategy {trainer.layout} on {trainer.cluster.facts.world_size} × {trainer.device.type},"
        f" {precision}, " + _parameters(trainer.num_trained, trainer.placed.num_parameters),
        (
            f"global batch {total} = {micro_batches} micro-batch{'es' * (micro_batches != 1)} ×"
            f" {training.batch_size}, over {ranks} data-parallel rank{'s' * (ranks != 1)};"
            f" {trainer.rate_line}"
        ),
        *(f"warning: {line}" for line in idle_ranks(trainer)),
        *([early] if last_step is not None and warmup > last_step else []),
        *([trainer.layout.notice] if trainer.layout.notice else []),
        *trainer.placed.log_lines,
    ]


def _given(trainer: "Trainer") -> dict[str, str]:
    """Return what the script gave in Python: a model that no config names, an optimizer of its own, arguments."""
    model = None if trainer.config.model.name is not None else trainer.placed.parts[0]
    return given_in_python(model, None if trainer.scales_rate else trainer.optimizer)


def _parameters(trained: int, total: int) -> str:
    return (
        f"{total:,} parameters"
        if trained == total
        else f"{trained:,} of {total:,} parameters train"
    )


def idle_ranks(trainer: "Trainer") -> list[str]:
    """Return a line if a step has fewer micro-batches than ranks."""
    ranks, batch_size = trainer.layout.data_parallel_size, trainer.config.training.batch_size
    micro_batches = trainer.global_batch_size // batch_size
    idle = ranks - micro_batches
    if idle <= 0:
        return []
    return [
        f"a step has {micro_batches} micro-batch{'es' * (micro_batches != 1)} for {ranks}"
        f" data-parallel ranks: {idle} of them compute{'s' * (idle == 1)} nothing that counts. Use"
        f" {micro_batches} rank{'s' * (micro_batches != 1)}, a smaller batch_size, or"
        f" global_batch_size={ranks * batch_size}"
    ]


_LOOK_SECONDS = 0.5
_answering: set[Path] = set()


def dump_collectives_on_request(folder: Path | None, rank: int) -> None:
    """Write `flight-RANK.json`, the last collectives, into the launcher's folder whenever the file `dump` is new.

    A rank that hangs waits in a collective and runs no Python; a thread beside it does.
    """
    read = flight_recorder.read
    if folder is None or read is None or folder in _answering:
        return
    _answering.add(folder)
    ends = threading.Event()

    def watch() -> None:
        answered = 0.0
        while not ends.wait(_LOOK_SECONDS) and folder.is_dir():
            asked = 0.0
            with suppress(OSError):
                asked = (folder / DUMP).stat().st_mtime
            if asked > answered:
                beside = folder / f".flight-{rank}"
                beside.write_bytes(read())
                beside.rename(folder / f"flight-{rank}.json")
                answered = asked

    thread = threading.Thread(target=watch, name="flight", daemon=True)
    thread.start()

    def end() -> None:
        ends.set()
        thread.join()

    atexit.register(end)


P = ParamSpec("P")
T = TypeVar("T")
_open_loops: "weakref.WeakSet[Generator[Any, None, None]]" = weakref.WeakSet()


def closed_at_exit(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Close the generators that `function` returns before Python ends, while modules still have their contents."""

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


@contextmanager
def explain_worker_deaths(source: StepSource) -> Iterator[None]:
    """Add the samples being read to the error that torch raises when a data worker dies."""
    try:
        yield
    except RuntimeError as error:
        explained = source.explain(error) if isinstance(source, StepLoader) else None
        if explained is None:
            raise
        raise explained from None
