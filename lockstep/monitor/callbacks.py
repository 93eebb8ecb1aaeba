"""Runs the user's own callbacks (`monitor.callbacks`), with every logged record.

In a config they are written `monitor.callbacks: [package.module:Name]`.

A function is called; of a class an object is made and called; in Python objects are handed over as
they are. Objects whose `every_rank` is true are called on every rank, others on rank 0. The events
of other trainers, `on_step_end(args, state, control)` and those beside it in `EVENTS`, are called
on every rank.

Tests: tests/monitor/test_monitor.py
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.config import MonitorConfig, ObjectSpec
from lockstep.config.schema_training import build_object, check_object
from lockstep.errors import UsageError
from lockstep.files.paths import local_path
from lockstep.machine.environment import rank_facts
from lockstep.machine.output import say
from lockstep.registry import load_object
from lockstep.run_directory.records import StepRecord, append_line

Callback = Callable[[StepRecord], object]


def build_callbacks(
    config: MonitorConfig, run: Path | None = None, handed_over: Sequence[Any] = ()
) -> list[tuple[str, Callback]]:
    """Return the callbacks and their names; those with an argument `run_directory` get `run`.

    `handed_over` are objects in Python, beside those that the config names.
    """
    built: list[tuple[str, Callback]] = [
        (_name_of(object_given), understood(object_given)) for object_given in handed_over
    ]
    for number, spec in enumerate(config.callbacks):
        where = f"monitor.callbacks[{number}]"
        target = check_callback(spec, where)
        callback = target
        if _is_made(spec, target):
            own = (
                run is not None
                and "run_directory" not in spec.args
                and _takes_run_directory(target)
            )
            callback = build_object(spec, where, **({"run_directory": run} if own else {}))
        built.append((spec.name, understood(callback, spec.name, where)))
    return built


def understood(
    callback: Any, name: str | None = None, where: str = "Trainer(callbacks=…)"
) -> Callback:
    """Return a callback as a function of a record.

    A UsageError if it can't be one, or waits for an event in vain.
    """
    name = name or _name_of(callback)
    if inspect.isclass(callback):
        raise UsageError(
            f"{name} is a class", where=where, fix=f"hand over an object: {callback.__name__}()"
        )
    if any(_defines(callback, event) for event in EVENTS):
        unknown = [
            event
            for event in dir(type(callback))
            if event.startswith("on_") and event not in EVENTS
        ]
        if missed := [event for event in unknown if _defines(callback, event)]:
            what = f"{name}.{missed[0]} is never called"
            fix = (
                f"use {', '.join(EVENTS)}; or write the loop yourself: `for record in"
                " trainer.steps(data)`"
            )
            raise UsageError(
                what, where=where, why="a run has no such event for callbacks", fix=fix
            )
        return Events(callback)
    if not callable(callback):
        raise _cannot_be_called(name, where)
    function: Callback = callback
    return function


def _name_of(callback: Any) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))


def _defines(callback: Any, event: str) -> bool:
    """Return whether a callback has its own method for an event.

    The methods of transformers' base class do nothing, and do not count.
    """
    if hasattr(callback, "__dict__") and event in vars(callback):
        return True
    owner = next((kind for kind in type(callback).__mro__ if event in vars(kind)), None)
    return owner is not None and owner.__name__ != "TrainerCallback"


def check_callback(spec: ObjectSpec, where: str) -> Any:
    """Return what a callback's spec names.

    A UsageError unless it imports, takes the arguments and can be called.
    """
    target = load_object(spec.name, where)
    if _is_made(spec, target):
        check_object(spec, where)
    if (
        inspect.isclass(target)
        and not hasattr(target, "on_step_end")
        and "__call__" not in dir(target)
    ):
        raise _cannot_be_called(f"objects of {spec.name}", where)
    return target


def _cannot_be_called(what: str, where: str) -> UsageError:
    why = "a callback is called with each step's record"
    fix = "give the class __call__(self, record), or on_step_end(self, args, state, control)"
    return UsageError(f"{what} can't be called", where=where, why=why, fix=fix)


def _is_made(spec: ObjectSpec, target: Any) -> bool:
    return bool(inspect.isclass(target) or spec.args or spec.positional)


def _takes_run_directory(target: Any) -> bool:
    try:
        return "run_directory" in inspect.signature(target).parameters
    except ValueError:
        return False


EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end")
"""The events of other trainers' callbacks that are called; of steps, those that are logged."""


class Events:
    """Adapts a callback with events `on_…(args, state, control, …)`.

    Trainers of Hugging Face and Forgather have such callbacks.
    """

    every_rank = True

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._history: list[dict[str, Any]] = []
        self._place: tuple[int, int] | None = None  # step and epoch

    def __call__(self, record: StepRecord) -> None:
        row = record.as_dict()
        self._begin(record.step - 1, record.epoch)
        self._history = [*self._history[-99:], row]
        self._place = record.step, record.epoch
        self._send("on_step_end", logs=row)
        self._send("on_log", logs=row)

    def on_eval(self, row: dict[str, Any]) -> None:
        """Take an evaluation."""
        if "eval_loss" in row:
            self._begin(row["step"], 0)
            self._history = [*self._history[-99:], row]
            self._send("on_evaluate", metrics=row)

    def close(self) -> None:
        """End the training, if it has begun, and close the callback."""
        if self._place is not None:
            self._send("on_train_end")
        close = getattr(self._callback, "close", None)
        if callable(close):
            close()

    def _begin(self, step: int, epoch: int) -> None:
        if self._place is None:
            self._place = step, epoch
            self._send("on_train_begin")

    def _send(self, event: str, **facts: Any) -> None:
        """Call the callback's method for an event, if it has one, with the state of the run."""
        call = getattr(self._callback, event, None)
        if call is None:
            return
        assert self._place is not None
        here = rank_facts()
        state = SimpleNamespace(
            global_step=self._place[0],
            epoch=self._place[1],
            log_history=self._history,
            is_world_process_zero=here.is_main,
            is_local_process_zero=here.local_rank == 0,
            num_input_tokens_seen=None,
        )
        args = SimpleNamespace(
            local_rank=here.local_rank, process_index=here.rank, world_size=here.world_size
        )
        control = SimpleNamespace(**dict.fromkeys(_REQUESTS, False))
        call(args, state, control, **facts)
        if requested := [name for name, value in vars(control).items() if value]:
            what = f"a callback set {requested[0]}, but callbacks cannot control the training"
            fix = (
                "write the loop yourself: `for record in trainer.steps(data)`, and break or save"
                " there"
            )
            raise UsageError(what, where="monitor.callbacks", fix=fix)


# What such a callback can ask of other trainers.
_REQUESTS = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)


class JsonLogger:
    """Writes records as JSON to `path` in `run_directory`, on the ranks of `rank_filter`.

    `{rank}` in `path` is replaced; a `rank_filter` of None means all ranks.
    """

    every_rank = True

    def __init__(
        self,
        path: str = "metrics-{rank}.jsonl",
        name: str | None = None,
        rank_filter: int | Sequence[int] | None = 0,
        run_directory: str | Path = ".",
    ) -> None:
        rank = rank_facts().rank
        wanted = [rank_filter] if isinstance(rank_filter, int) else rank_filter
        self._writes = wanted is None or rank in wanted
        local_path(path, "the path of the file")
        self._path = Path(
            local_path(run_directory, "run_directory"), path.replace("{rank}", str(rank))
        )
        # to distinguish runs
        self._extra: dict[str, Any] = {"rank": rank} | ({} if name is None else {"name": name})
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, record: StepRecord) -> None:
        if self._writes:
            append_line(self._path, self._extra | record.as_dict())


IMBALANCE = 1.25  # the most over the least
# smallest difference between ranks that counts, as a share of a device's memory
_SIGNIFICANT = 0.02
_GIB = 2**30
_log = logging.getLogger("lockstep")


class ResourceMonitor:
    """Warns when memory passes a threshold or ranks differ much, in the log and to `event`.

    It warns once, and again only after all was fine. On GPUs it compares each rank's peak with its
    GPU's memory; on the CPU it uses the machine's, which ranks share.
    """

    def __init__(
        self,
        gpu_memory_threshold: float = 0.9,
        alert_on_imbalance: bool = True,
        event: Callable[..., None] | None = None,
    ) -> None:
        self._threshold = gpu_memory_threshold
        self._compares = alert_on_imbalance
        self._event = event
        self._warned: set[str] = set()

    def __call__(self, record: StepRecord) -> None:
        import psutil

        if record.memory is None or "total" not in record.memory:
            return
        least, _, most, rank = record.memory["peak"]
        total = record.memory["total"][2]
        on_gpu = "reserved" in record.memory
        used = most / total if on_gpu else psutil.virtual_memory().percent / 100
        whose = (
            f"rank {rank} has held {most / _GIB:.1f} of {total / _GIB:.1f} GiB"
            if on_gpu
            else "of this machine"
        )
        self._warn(
            "memory_high",
            used >= self._threshold,
            f"{used:.0%} of the memory is in use: {whose}",
            record.step,
        )
        uneven = self._compares and most > IMBALANCE * least and most - least > _SIGNIFICANT * total
        text = (
            f"ranks hold unequal memory: rank {rank} {most / _GIB:.2f} GiB, the least"
            f" {least / _GIB:.2f} GiB"
        )
        self._warn("memory_imbalance", uneven, text, record.step)

    def _warn(self, kind: str, true: bool, text: str, step: int) -> None:
        if not true:
            self._warned.discard(kind)
        elif kind not in self._warned:
            self._warned.add(kind)
            _log.warning("warning: step %d: %s", step, text)
            if self._event is not None:
                self._event(kind, step=step, text=text)


class DistributedMonitor:
    """Prints the ranks' memory and how long they wait for one another, on rank 0."""

    def __call__(self, record: StepRecord) -> None:
        if record.memory is None or record.phases is None:
            return
        parts = [
            f"{name} {_range(value, _GIB, 'GiB')}"
            for name, value in record.memory.items()
            if name != "total"
        ]
        if (waiting := record.phases.get("communication")) is not None:
            parts.append(f"communication {_range(waiting, 1e-3, 'ms')} per step")
        say(f"step {record.step}  ranks: {', '.join(parts)}", prefix="")


def _range(spread: Any, unit: float, name: str) -> str:
    least, _, most, rank = spread
    if least == most:
        return f"{most / unit:.2f} {name}"
    return f"{least / unit:.2f} to {most / unit:.2f} {name} (rank {rank})"
