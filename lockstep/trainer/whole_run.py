"""Runs a training from its current step to its end: first log lines, steps, evaluations, checkpoints, rollbacks."""

import atexit
import os
import platform
import socket
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from lockstep import accelerator, cores
from lockstep.bad_numbers import ALL_IGNORED, Anomaly, BadNumbersError
from lockstep.checkpoint import Ranks
from lockstep.config import MonitorConfig
from lockstep.data import StepLoader, StepSource
from lockstep.errors import listed
from lockstep.heartbeat import DUMP
from lockstep.monitor import Figures, Monitor, PhaseClock
from lockstep.monitor.console import on_a_terminal
from lockstep.monitor.figures import first_step_counted, gather_objects, peak_flops
from lockstep.records import StepRecord
from lockstep.strategy import strategy_named
from lockstep.torch_compat import flight_recorder
from lockstep.trainer.checkpointer import Checkpointer
from lockstep.trainer.evaluator import Evaluator

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

AroundStep = Callable[[], AbstractContextManager[None]]


def lock_run_directory(trainer: "Trainer") -> None:
    """Take the run directory's lock on rank 0, which holds it until `train` ends; all ranks call it."""
    if trainer.lock is not None:
        Ranks().broadcast("the run directory could not be locked", trainer.lock.acquire)


def open_monitor(trainer: "Trainer", total: int | None, log_lines: Sequence[str]) -> tuple[Monitor, AroundStep]:
    """Create the monitor of a run, observe its steps, and log how it starts; all ranks call it.

    The context for each step, which is returned too, counts the operations of the first.
    """
    directory, config, training = trainer.run_directory, trainer.config.monitor, trainer.config.training
    if directory is not None and trainer.is_main_process:
        directory.create()
        directory.config.write_text(trainer.config.to_yaml())
    clock = PhaseClock(device=None if trainer.device.type == "cpu" else trainer.device)
    figures = Figures(clock)
    around_step: AroundStep = nullcontext
    in_threads = strategy_named(trainer.layout.strategy).uses_threads
    if not training.compile and not in_threads:  # operations are counted as they run, in this thread, in eager mode
        around_step = first_step_counted(figures)
        figures.recomputes = training.gradient_checkpointing != "none"
    if trainer.is_main_process:
        figures.peak, figures.peak_source = peak_flops(trainer.device, trainer.mode)
    threads, device = torch.get_num_threads(), trainer.device
    on = f"CPU, {threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else accelerator.name_of(device)
    ranks = gather_objects({
        "rank": trainer.cluster.facts.rank, "host": socket.gethostname(), "device": on, "process": os.getpid(),
        "threads": threads, "cores": len(cores.allowed()),
    })  # fmt: skip
    start = trainer.step.progress.step
    monitor = Monitor(
        config, directory, is_main=trainer.is_main_process, total_steps=total, start_step=start, figures=figures,
        hosts=[rank["host"] for rank in ranks],
    )  # fmt: skip
    lines = [*_lines(trainer, total), *log_lines]
    monitor.say(*lines)
    versions = {"lockstep": version("lockstep-train"), "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    monitor.event(
        "start", layout=str(trainer.layout), sizes=trainer.layout.sizes, world_size=trainer.layout.world_size,
        lines=lines, ranks=ranks, step=start, total_steps=total, parameters=trainer.placed.num_parameters,
        peak_flops=figures.peak, peak_source=figures.peak_source, versions=versions,
    )  # fmt: skip
    trainer.step.observe(clock, monitor.logs if config.gradient_norms else None)
    return monitor, around_step


@contextmanager
def shown(trainer: "Trainer", total: int | None, progress: bool | None) -> Iterator[Callable[[StepRecord], None]]:
    """Show the progress of steps that no monitor records; yield a function to call with each step's record."""
    config = trainer.config.monitor
    if not (progress or (progress is None and "console" in config.sinks and on_a_terminal())):
        yield lambda _record: None
        return
    sink = "console" if progress else "lockstep.monitor.console:Bar"
    monitor = Monitor(
        MonitorConfig(sinks=[sink], log_steps=config.log_steps), None, is_main=trainer.is_main_process,
        total_steps=total, start_step=trainer.step.progress.step,
    )  # fmt: skip

    def show(record: StepRecord) -> None:
        monitor.counts_tokens = trainer.reads_tokens
        monitor.on_step(record)

    with closing(monitor):
        yield show


def nothing_to_do(trainer: "Trainer", total: int | None, val_data: Any) -> list[str]:
    """Return log lines on what a run will not do: steps, if it is finished, and evaluations without validation data."""
    training, following, step = trainer.config.training, trainer.state.following, trainer.step.progress.step
    key = "eval_strategy" if training.eval_strategy == "epoch" else "eval_steps"
    lines = []
    if total is not None and step >= total:
        lines.append(
            f"nothing left to do: {step} steps are done, and the run has {total}. For more of them "
            "raise training.max_steps or num_train_epochs; with checkpoint.resume=never it starts afresh "
            "(in Python: epochs=…, max_steps=…, resume='never')"
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
    early = f"warning: the run ends after {last_step} steps, in the warm-up of {warmup}: training.warmup_steps"
    precision = f"{trainer.mode} ({trainer.why_mode})" if trainer.why_mode else trainer.mode
    return [
        f"strategy {trainer.layout} on {trainer.cluster.facts.world_size} × {trainer.device.type}, {precision}, "
        f"{trainer.placed.num_parameters:,} parameters",
        f"global batch {total} = {micro_batches} micro-batch{'es' * (micro_batches != 1)} × {training.batch_size}, "
        f"over {ranks} data-parallel rank{'s' * (ranks != 1)}; {trainer.rate_line}",
        *(f"warning: {line}" for line in idle_ranks(trainer)),
        *([early] if last_step is not None and warmup > last_step else []),
        *([trainer.layout.notice] if trainer.layout.notice else []),
        *trainer.placed.log_lines,
    ]


def idle_ranks(trainer: "Trainer") -> list[str]:
    """Return a line if a step has fewer micro-batches than ranks."""
    ranks, batch_size = trainer.layout.data_parallel_size, trainer.config.training.batch_size
    micro_batches = trainer.global_batch_size // batch_size
    idle = ranks - micro_batches
    if idle <= 0:
        return []
    return [
        f"a step has {micro_batches} micro-batch{'es' * (micro_batches != 1)} for {ranks} data-parallel ranks: {idle} "
        f"of them compute{'s' * (idle == 1)} nothing that counts. Use {micro_batches} rank{'s' * (micro_batches != 1)}"
        f", a smaller batch_size, or global_batch_size={ranks * batch_size}"
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


if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

TakenSteps = Iterator[tuple[StepRecord | None, bool]]
"""(record, last of its epoch) of each step; no record if its data are skipped."""


def without_targets(anomaly: Anomaly, source: StepSource) -> str:
    """Return a sentence on a step without a valid target that names its samples, if the data number them."""
    window = _window_of(anomaly, source)
    samples = [str(index) for batch in window.micro_batches for index in batch] if window else []
    which = f", which are number {listed(samples, 16)} of the data" if samples else ""
    return f"{anomaly.what}{which}: it makes no update ({ALL_IGNORED})"


def _window_of(anomaly: Anomaly, source: StepSource) -> Any:
    """Return the samples of an anomaly's step, by micro-batch; None if the data do not number them."""
    order = getattr(source, "order", None)
    return order.window(anomaly.step - 1) if order is not None else None


@dataclass
class WholeRun:
    """One call of `Trainer.train`; every rank has one."""

    trainer: "Trainer"
    monitor: Monitor
    evaluator: Evaluator
    open_source: Callable[[], StepSource]  # returns the remaining steps of the data
    take: Callable[[StepSource], TakenSteps]  # runs the steps of a source

    def to_end(self, source: StepSource, total: int | None) -> StepRecord | None:
        """Train to the end, with rollbacks; close the source, and return the last step's record."""
        trainer, monitor = self.trainer, self.monitor
        try:
            checkpointer = Checkpointer(trainer, monitor)
            while True:
                try:
                    record = self._train(source, total, checkpointer)
                    break
                except BadNumbersError as error:
                    self._report(error.anomaly, source)
                    source.close()
                    checkpointer.roll_back(error)
                    source = self.open_source()
                except Exception:
                    checkpointer.finish_alone()
                    raise
            reason = "preempted" if trainer.step.stopping else "done"
            monitor.event("stop", step=trainer.step.progress.step, reason=reason)
            monitor.close()  # the last step's line comes first
            if record is not None:
                monitor.say(self._ending(checkpointer.saved))
        finally:
            source.close()
        return record

    def _train(self, source: StepSource, total: int | None, checkpointer: Checkpointer) -> StepRecord | None:
        """Train from the run's current step to its end, or to a step with bad numbers."""
        trainer, evaluator = self.trainer, self.evaluator
        step, state, following = trainer.step, trainer.state, trainer.state.following
        record, last = None, True
        if evaluator.was_stopped():
            self._evaluate(followed=evaluator.is_due(last_of_epoch=state.ended_epoch))
        begun = step.progress.step
        with explain_worker_deaths(source):
            for record, last_of_epoch in () if step.stopping or following.stopped else self.take(source):
                if trainer.lock is not None:
                    trainer.lock.check()
                if record is not None:
                    self._record(record)
                if step.anomaly is not None:
                    self._report(step.anomaly, source)
                last = step.progress.step == total or step.stopping
                # What follows the results is part of the last save; a plain evaluation waits until that is done.
                waits = last and not state.acts_on_evaluations
                if not step.stopping and not waits and evaluator.is_due(last_of_epoch=last_of_epoch):
                    self._evaluate(followed=True)
                    last = last or step.stopping or following.stopped
                checkpointer.after_step(last=last, last_of_epoch=last_of_epoch)
                if step.stopping or following.stopped:
                    break
        step.flush()
        if not last:  # the data ended, at an unknown length
            checkpointer.after_step(last=True, last_of_epoch=True)
        checkpointer.finish(must_succeed=True)
        if step.progress.step > begun and not step.stopping and evaluator.is_due_at_end:
            self._evaluate(followed=False)  # after the save: a run that is killed now loses this number alone
        return record

    def _ending(self, saved: int | None) -> str:
        """Return the line that a run ends with: where it is, and what to type next; `saved`: step of the last save."""
        trainer, run = self.trainer, self.trainer.run_directory
        step = trainer.step.progress.step
        following = trainer.state.following
        if trainer.step.stopping and not following.stopped:
            whether = "which is saved: the same command goes on" if saved == step else "which is not saved"
            return f"stopped after step {step}, {whether}"
        why = f"{following.why_stopped()}; " if following.stopped else ""
        where = f" in {run.path}; `lockstep report {run.path}` draws it" if run is not None else ""
        return f"{why}done after step {step}{where}"

    def _record(self, record: StepRecord) -> None:
        trainer, monitor = self.trainer, self.monitor
        monitor.counts_tokens = trainer.reads_tokens
        monitor.on_step(record)
        monitor.say(*trainer.placed.take_log_lines())
        trainer.state.record_step(record)
        if record.recomputed:
            monitor.event("recomputed", step=record.step, what=record.recomputed)
            monitor.say(f"warning: {record.recomputed}")

    def _report(self, anomaly: Anomaly, source: StepSource) -> None:
        """Report an anomaly and its samples: dataset indices by micro-batch, if the data have any."""
        window = _window_of(anomaly, source)
        self.monitor.event(
            "bad_numbers", step=anomaly.step, what=anomaly.what, loss=anomaly.loss, grad_norm=anomaly.grad_norm,
            action=self.trainer.config.training.bad_numbers.action, samples=window and window.micro_batches,
            epoch=window.epoch if window else self.trainer.step.progress.epoch,
        )  # fmt: skip
        self.monitor.say(f"warning: {without_targets(anomaly, source) if anomaly.no_targets else anomaly.what}")

    def _evaluate(self, *, followed: bool) -> None:
        """Evaluate, and record the results; the run ends here if a rank was asked to stop meanwhile."""
        trainer, monitor, following = self.trainer, self.monitor, self.trainer.state.following
        step = trainer.step.progress.step
        with trainer.step.clock.during("evaluation"), trainer.heartbeat.call("evaluate"):
            results = self.evaluator.run()
        if results is None:
            trainer.step.stop()
            monitor.event("evaluation_stopped", step=step)
            return
        trainer.state.record_evaluation(results, followed=followed)
        monitor.on_eval({"step": step, **results})
        if followed and following.stopped:
            monitor.event("early_stop", step=step, reason=following.why_stopped())
