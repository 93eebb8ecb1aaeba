"""Which steps are read, what sinks get, and that none of them stops a run."""

import errno
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lockstep import Trainer
from lockstep.config import MonitorConfig
from lockstep.errors import UsageError
from lockstep.monitor import JsonLogger, Meters, Monitor
from lockstep.monitor.meters import memory_of_this_rank
from lockstep.run_directory.records import RunDirectory, StepRecord, read_lines


class OnDevice:
    """A number that is still on the device: counts how often the host waits for it."""

    waits = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self) -> "OnDevice":
        return self

    def item(self) -> float:
        type(self).waits += 1
        return self.value

    def __radd__(self, other: float) -> "OnDevice":
        return OnDevice(self.value + other)

    def __add__(self, other: "OnDevice") -> "OnDevice":
        return OnDevice(self.value + other.value)


def record(step: int, **fields: Any) -> StepRecord:
    given: dict[str, Any] = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "samples": 8, "tokens": 64}
    return StepRecord(step=step, **{**given, **fields})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def config(**fields: Any) -> MonitorConfig:
    return MonitorConfig.model_validate({"log_steps": 10, "sinks": ["jsonl"], **fields})


def user_module(monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    module = types.ModuleType("users_own")
    for name, value in content.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "users_own", module)


def test_skipped_steps_are_counted(run: RunDirectory) -> None:
    monitor = Monitor(config(), run, is_main=True, total_steps=30)
    for step in range(1, 31):
        monitor.on_step(record(step, skipped=step in (5, 14)))
    monitor.close()
    assert [row.get("skipped_steps") for row in run.read_metrics()] == [None, 1, 2, 2]


def test_trap_46_numbers_are_read_on_logged_steps_only(run: RunDirectory) -> None:
    """`.item()` on every step makes the host wait for the device on every step."""
    OnDevice.waits = 0
    monitor = Monitor(config(), run, is_main=True, total_steps=35)
    for step in range(1, 36):
        monitor.on_step(
            record(step, loss=OnDevice(step), grad_norm=OnDevice(1.0), tokens=OnDevice(64))
        )
    monitor.close()
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [
        1,
        10,
        20,
        30,
        35,
    ], "every tenth, the first and the last"
    assert OnDevice.waits == len(rows) * 5, (
        "loss, norm, tokens of the step, tokens and targets of the interval"
    )


def test_trap_46_no_graph_is_kept_alive(run: RunDirectory) -> None:
    """A loss that is held, or added up, with its graph keeps every step's activations."""
    monitor = Monitor(config(log_steps=100), run, is_main=True)
    graphs = []
    for step in range(1, 4):
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * 2).sum()
        graphs.append(weakref.ref(weight))
        monitor.on_step(record(step, loss=loss, tokens=loss * 1))
        del loss, weight
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 3
    monitor.close()


def test_the_last_step_is_logged_though_nobody_knew_that_it_is_the_last(run: RunDirectory) -> None:
    monitor = Monitor(config(), run, is_main=True)
    for step in range(7, 14):
        monitor.on_step(record(step, loss=torch.tensor(float(step))))
    monitor.close()
    monitor.close()
    assert [row["step"] for row in run.read_metrics()] == [7, 10, 13]


def test_other_ranks_write_nothing_and_read_nothing(run: RunDirectory) -> None:
    OnDevice.waits = 0
    monitor = Monitor(config(sinks=["console", "jsonl", "tensorboard"]), run, is_main=False)
    for step in range(1, 21):
        monitor.on_step(record(step, loss=OnDevice(1.0), tokens=OnDevice(1)))
    monitor.event("start")
    monitor.close()
    assert OnDevice.waits == 0
    assert not run.metrics.exists()
    assert not run.events.exists()


def test_rows_hold_what_the_interval_was_like(run: RunDirectory) -> None:
    monitor = Monitor(config(), run, is_main=True)
    for step in range(1, 11):
        monitor.on_step(
            record(step, tokens=64, tokens_read=torch.tensor(96), loss=torch.tensor(float("nan")))
        )
    monitor.on_eval({"step": 10, "eval_loss": 1.5})
    monitor.close()
    *_, last, evaluation = run.read_metrics()
    assert last["loss"] == "nan"
    assert last["tokens"] == 64
    assert last["step_seconds"] > 0
    assert last["tokens_per_second"] == pytest.approx(96 / last["step_seconds"])
    assert last["targets_per_second"] == pytest.approx(64 / last["step_seconds"])
    assert last["memory_bytes"] > 10_000_000
    assert evaluation["eval_loss"] == 1.5


def test_meters_average_over_the_interval_and_leave_out_pauses() -> None:
    now = [0.0]
    meters = Meters(clock=lambda: now[0])
    for step in range(4):
        now[0] += 0.5
        meters.count(record(step, tokens_read=torch.tensor(100), tokens=torch.tensor(40)))
    assert meters.read() == (0.5, 2.0 * record(0).samples, 200.0, 80.0)
    now[0] += 2.0
    meters.count(record(5, tokens_read=100, tokens=40))
    now[0] += 10.0
    meters.pause(10.0)
    assert meters.read() == (2.0, 0.5 * record(0).samples, 50.0, 20.0)
    assert meters.read() == (0.0, 0.0, 0.0, 0.0)


def test_memory_is_this_ranks_own() -> None:
    memory = memory_of_this_rank()
    assert 10_000_000 < memory.peak < memory.total


def test_memory_is_not_that_of_the_process_which_started_the_rank() -> None:
    child = (
        "from lockstep.monitor.meters import memory_of_this_rank; print(memory_of_this_rank().peak)"
    )
    start = (
        "import subprocess, sys; held = b'x' * 2**30; subprocess.run([sys.executable, '-c',"
        " sys.argv[1]], check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", start, child], capture_output=True, text=True, check=True
    )
    assert 10_000_000 < int(done.stdout) < 2**30


def test_a_sink_that_fails_is_said_once_and_stops_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    def broken(step: StepRecord) -> None:
        raise ConnectionError("the server is away")

    def working(step: StepRecord) -> None:
        seen.append((step.step, step.loss))

    user_module(monkeypatch, broken=broken, working=working)
    monitor = Monitor(
        config(log_steps=1, callbacks=["users_own:broken", "users_own:working"]), run, is_main=True
    )
    with caplog.at_level(logging.WARNING, "lockstep"):
        for step in range(1, 5):
            monitor.on_step(record(step, loss=torch.tensor(0.5)))
        monitor.close()
    assert seen == [(step, 0.5) for step in range(1, 5)]
    assert len(caplog.records) == 1
    assert "users_own:broken" in caplog.text
    assert "the server is away" in caplog.text
    assert [event["kind"] for event in run.read_events()] == ["sink_failed"]


def test_a_full_disk_stops_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lockstep.run_directory.records.append_line", full)
    monitor = Monitor(config(log_steps=1), run, is_main=True)
    with caplog.at_level(logging.WARNING, "lockstep"):
        monitor.on_step(record(1))
        monitor.on_step(record(2))
        monitor.event("save", step=2)
    monitor.close()
    assert "No space left" in caplog.text


def test_a_callback_that_cannot_be_had_is_refused_before_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_module(monkeypatch, number=3)
    for name in ("no_such_module:call", "users_own:nothing", "users_own:number"):
        with pytest.raises(UsageError, match=r"monitor\.callbacks\[0\]"):
            Monitor(config(callbacks=[name]), run, is_main=True)


def test_a_class_is_made_with_its_arguments_and_closed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Watcher:
        def __init__(self, limit: int) -> None:
            self.limit = limit
            self.steps = 0
            self.closed = False
            made.append(self)

        def __call__(self, step: StepRecord) -> None:
            self.steps += 1

        def close(self) -> None:
            self.closed = True

    user_module(monkeypatch, Watcher=Watcher)
    callbacks = [{"name": "users_own:Watcher", "args": {"limit": 3}}]
    monitor = Monitor(config(log_steps=1, callbacks=callbacks), run, is_main=True)
    monitor.on_step(record(1))
    monitor.close()
    assert [(w.limit, w.steps, w.closed) for w in made] == [(3, 1, True)]
    Monitor(config(callbacks=callbacks), run, is_main=False).on_step(record(1))
    assert len(made) == 2, "made on every rank, so that a mistake is found on every rank"
    assert made[1].steps == 0, "called on rank 0"


@pytest.mark.parametrize(
    ("rank", "rank_filter", "writes"),
    [(0, 0, True), (1, 0, False), (1, [0, 1], True), (2, None, True)],
)
def test_json_logger_writes_on_the_ranks_of_its_filter(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rank: int,
    rank_filter: Any,
    writes: bool,
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = tmp_path / "own/records-{rank}.jsonl"
    spec = {
        "name": "lockstep.monitor:JsonLogger",
        "args": {"path": str(path), "name": "a", "rank_filter": rank_filter},
    }
    monitor = Monitor(config(log_steps=1, sinks=[], callbacks=[spec]), run, is_main=rank == 0)
    monitor.on_step(record(1, loss=torch.tensor(0.25)))
    monitor.close()
    rows = list(read_lines(tmp_path / f"own/records-{rank}.jsonl"))
    assert bool(rows) == writes
    if writes:
        assert (rows[0]["rank"], rows[0]["name"], rows[0]["loss"]) == (rank, "a", 0.25)
    assert JsonLogger.every_rank


def test_json_logger_writes_into_the_run_directory(run: RunDirectory) -> None:
    callbacks = [
        "lockstep.monitor:JsonLogger",
        {"name": "lockstep.monitor:JsonLogger", "args": {"path": "a/b.jsonl"}},
    ]
    monitor = Monitor(config(log_steps=1, sinks=[], callbacks=callbacks), run, is_main=True)
    monitor.on_step(record(1))
    monitor.close()
    assert [
        len(list(read_lines(run.path / name))) for name in ("metrics-0.jsonl", "a/b.jsonl")
    ] == [1, 1]


class OnStepEnd:
    """A callback as other trainers have them."""

    seen: ClassVar[list[tuple[int, bool, float]]] = []

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at = stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, state.is_world_process_zero, kwargs["logs"]["loss"]))
        control.should_training_stop = state.global_step == self.stop_at


def test_a_callback_with_on_step_end_is_called_as_other_trainers_call_it(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    OnStepEnd.seen.clear()
    callbacks = [{"name": "tests.monitor.test_monitor:OnStepEnd", "args": {"stop_at": 2}}]
    monitor = Monitor(config(log_steps=1, sinks=[], callbacks=callbacks), run, is_main=True)
    for step in (1, 2):
        monitor.on_step(record(step, loss=0.5))
    monitor.close()
    assert OnStepEnd.seen == [(1, True, 0.5), (2, True, 0.5)]
    assert "set should_training_stop, but callbacks cannot control" in caplog.text
    with pytest.raises(UsageError, match="takes no argument 'stop'; did you mean 'stop_at'"):
        Monitor(config(callbacks=[{**callbacks[0], "args": {"stop": 2}}]), run, is_main=True)


def test_tensorboard_holds_the_scalars(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = Monitor(config(sinks=["tensorboard"], log_steps=1), run, is_main=True)
    monitor.on_step(record(1, loss=torch.tensor(2.5)))
    monitor.on_step(record(2, loss=torch.tensor(1.5)))
    monitor.on_eval({"step": 2, "eval_loss": 1.25})
    monitor.close()
    found = EventAccumulator(str(run.tensorboard)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [(e.step, e.value) for e in found.Scalars("eval_loss")] == [(2, 1.25)]


def test_tensorboard_has_each_point_once_after_a_resume_and_a_rollback(run: RunDirectory) -> None:
    """A killed run has written steps that are taken once more."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def write(start: int, steps: Iterable[int]) -> None:
        sink = Monitor(
            config(sinks=["tensorboard"], log_steps=1), run, is_main=True, start_step=start
        )
        for step in steps:
            sink.on_step(record(step, loss=float(step)))
            sink.on_eval({"step": step, "eval_loss": float(step)})
        sink.close()

    write(0, range(1, 8))
    time.sleep(1.1)  # files are read in the order of their names, which hold seconds
    write(4, [5, 6, 7, 6, 7, 8])
    after = Monitor(config(sinks=["tensorboard"]), run, is_main=True)
    after.on_log(8, {"mine": 1.0})  # hides nothing
    after.close()
    found = EventAccumulator(str(run.tensorboard)).Reload()
    for name in ("loss", "eval_loss"):
        assert [event.step for event in found.Scalars(name)] == list(range(1, 9)), name


def test_a_missing_tensorboard_is_one_warning(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with caplog.at_level(logging.WARNING, "lockstep"):
        monitor = Monitor(config(sinks=["tensorboard", "jsonl"]), run, is_main=True)
        monitor.on_step(record(10))
        monitor.close()
    assert len(caplog.records) == 1
    assert "pip install tensorboard," in caplog.text
    assert len(run.read_metrics()) == 1


def test_without_a_run_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = Monitor(config(sinks=["jsonl", "tensorboard"]), None, is_main=True)
    monitor.on_step(record(10))
    monitor.event("start")
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_one_object_a_line(run: RunDirectory) -> None:
    monitor = Monitor(config(log_steps=1), run, is_main=True)
    for step in (1, 2):
        monitor.on_step(record(step, loss_scale=1024.0))
    monitor.close()
    lines = run.metrics.read_text().splitlines()
    names = {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "samples",
        "tokens",
        "step_seconds",
        "tokens_per_second",
    }
    assert names | {"memory_bytes", "loss_scale", "time"} <= set(json.loads(lines[1]))


def test_the_start_tells_the_workers_of_the_loader_that_is_read(run: RunDirectory) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    trainer = Trainer(
        torch.nn.Linear(4, 1),
        loss_fn=torch.nn.MSELoss(),
        max_steps=1,
        sinks=["jsonl"],
        output_dir=run.path,
    )
    list(trainer.steps(torch.utils.data.DataLoader(data, 8, num_workers=1)))
    trainer._open.close()
    assert json.loads(run.events.read_text().splitlines()[0])["data_workers"] == 1


# ---- callbacks that are handed over in Python ----


class Seen:
    """Keeps the events of a callback of transformers' kind."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(("step", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
        self.events.append(("evaluate", metrics["step"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(("end", state.global_step))


@pytest.mark.parametrize("way", ["train", "steps", "training_step"])
def test_functions_and_objects_are_callbacks_in_every_way_to_train(way: str) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    seen = Seen()
    losses = list[float]()
    trainer = Trainer(
        torch.nn.Linear(4, 1),
        loss_fn=torch.nn.MSELoss(),
        batch_size=8,
        max_steps=3,
        log_steps=1,
        sinks=[],
        callbacks=[lambda record: losses.append(record.loss), seen],
    )
    if way == "train":
        trainer.train(data, data)
    elif way == "steps":
        for _ in trainer.steps(data):
            pass
        trainer.evaluate(data)
    else:
        for batch in torch.utils.data.DataLoader(data, 8):
            trainer.training_step(batch)
        trainer.evaluate(data)
    trainer._open.close()
    assert len(losses) == 3
    middle = [("step", 1), ("step", 2), ("step", 3), ("evaluate", 3)]
    assert seen.events == [("begin", 0), *middle, ("end", 3)]


def test_a_callback_that_waits_in_vain_is_refused() -> None:
    class Late(Seen):
        def on_epoch_end(self, *_: Any, **more: Any) -> None: ...

    for callback, message in (
        (Late(), "on_epoch_end is never called"),
        (Seen, "Seen is a class"),
        (7, "int can't be called"),
    ):
        with pytest.raises(UsageError, match=message):
            Trainer(torch.nn.Linear(4, 1), loss_fn=torch.nn.MSELoss(), callbacks=[callback])


def test_a_callback_of_transformers_is_called_for_the_events_that_it_has() -> None:
    transformers = pytest.importorskip("transformers")
    steps = []

    class Mine(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            steps.append(state.global_step)

    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    trainer = Trainer(
        torch.nn.Linear(4, 1),
        loss_fn=torch.nn.MSELoss(),
        batch_size=8,
        log_steps=1,
        sinks=[],
        callbacks=[Mine()],
    )
    list(trainer.steps(data))
    assert steps == [1, 2, 3]


@pytest.mark.fault(
    "storage: metrics or events can't be written for a while",
    "a write of a row fails, as on a disk that is full, and later ones succeed",
    "rows and events wait, and are written in their order once there is room: none is lost, none is"
    " there twice",
)
def test_rows_and_events_wait_for_room(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(config(sinks=["jsonl"], log_steps=1), run, is_main=True)
    write = os.write
    refuses = threading.Event()

    def refusing(handle: int, data: bytes) -> int:
        if refuses.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(os, "write", refusing)
    monitor.on_step(record(1))
    monitor.flush()
    refuses.set()
    monitor.on_step(record(2))
    monitor.event("save", step=2)
    monitor.flush()
    monitor.on_step(record(3))
    monitor.on_log(3, {"own": 1.0})
    refuses.clear()
    monitor.event("save", step=3)
    monitor.close()
    assert [row["step"] for row in run.read_metrics() if "loss" in row] == [1, 2, 3]
    assert [row["own"] for row in run.read_metrics() if "own" in row] == [1.0]
    events = [event for event in run.read_events() if event["kind"] == "save"]
    assert [event["step"] for event in events] == [2, 3]
    assert events[0]["time"] < events[1]["time"]
