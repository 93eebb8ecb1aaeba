"""Sinks beyond files: W&B and MLflow offline, Prometheus on loopback, and that none of them stops a
run.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import MonitorConfig
from lockstep.errors import UsageError
from lockstep.monitor import Monitor, sinks
from lockstep.monitor.sinks import Guarded, scalars
from lockstep.run_directory.records import RunDirectory, StepRecord

_GATHERED = {
    "phases": {"data": [0.1, 0.2, 0.4, 3], "optimizer": [0.01, 0.01, 0.01, 0]},
    "memory": {"peak": [1.0, 2.0, 5.0, 1]},
    "gradient_norms": {"layers.0": 0.5},
}


def record(step: int, **fields: Any) -> StepRecord:
    return StepRecord(
        step=step, loss=2.0 / step, grad_norm=1.0, lr=1e-3, samples=8, tokens=64, **fields
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.config.write_text("training:\n  max_steps: 3\n")
    return directory


def config(**fields: Any) -> MonitorConfig:
    return MonitorConfig.model_validate({"log_steps": 1, "sinks": [], **fields})


def test_a_record_as_scalars() -> None:
    row = record(1, **_GATHERED).as_dict()
    found = scalars(row)
    assert found["loss"] == 2.0
    assert (found["phases/data"], found["phases/data.most"]) == (0.2, 0.4)
    assert found["memory/peak"] == 5.0
    assert found["gradient_norms/layers.0"] == 0.5
    assert not {"step", "time", "skipped"} & set(found)


def test_wandb_offline_goes_to_the_run_directory(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="W&B IS NOT TESTED: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monitor = Monitor(config(sinks=["wandb"]), run, is_main=True)
    for step in (1, 2, 3):
        monitor.on_step(record(step, **_GATHERED))
    monitor.on_eval({"step": 3, "eval_loss": 0.5})
    monitor.close()
    assert run.read_events() == [], "nothing failed"
    (written,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for name in (b"loss", b"phases/data", b"eval_loss"):
        assert name in content


def test_mlflow_without_a_server_goes_to_the_run_directory(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLFLOW IS NOT TESTED: pip install mlflow-skinny")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monitor = Monitor(config(sinks=["mlflow"], experiment="ours"), run, is_main=True)
    for step in (1, 2, 3):
        monitor.on_step(record(step, **_GATHERED))
    monitor.on_eval({"step": 3, "eval_loss": 0.5})
    monitor.close()
    assert run.read_events() == [], "nothing failed"
    client = mlflow.MlflowClient(tracking_uri=(run.path / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params["training.max_steps"] == "3"
    assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "loss")] == [
        (1, 2.0),
        (2, 1.0),
        (3, 2 / 3),
    ]
    assert found.data.metrics["eval_loss"] == 0.5


@pytest.mark.parametrize(("sink", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_missing_library_is_one_warning(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sink: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, sink, None)
    with caplog.at_level(logging.WARNING, "lockstep"):
        monitor = Monitor(config(sinks=[sink, "jsonl"]), run, is_main=True)
        monitor.on_step(record(1))
        monitor.close()
    assert len(caplog.records) == 1
    assert f"pip install {package}," in caplog.text
    assert len(run.read_metrics()) == 1


@pytest.mark.promise(
    "`/metrics` for Prometheus is off unless asked for, and then answers on 127.0.0.1"
)
def test_prometheus_serves_the_newest_record_on_loopback(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    monitor = Monitor(config(sinks=["console"], prometheus={"port": 0}), run, is_main=True)
    try:
        (event,) = run.read_events()
        assert event["address"].startswith("http://127.0.0.1:")
        assert event["address"] in capsys.readouterr().out
        monitor.on_step(record(1))
        monitor.on_step(record(2, **_GATHERED))
        monitor.on_eval({"step": 2, "eval_loss": 0.25})
        with urllib.request.urlopen(event["address"], timeout=100) as answer:
            page = answer.read().decode()
    finally:
        monitor.close()
    assert 'lockstep_step{run="run"} 2.0' in page
    assert 'lockstep_loss{run="run"} 1.0' in page
    assert 'lockstep_eval_loss{run="run"} 0.25' in page
    assert 'lockstep_phase_seconds{phase="data",run="run"} 0.2' in page
    assert 'lockstep_phase_seconds_most{phase="data",run="run"} 0.4' in page
    assert "python_info" not in page
    with pytest.raises(OSError):
        urllib.request.urlopen(event["address"], timeout=2)


def test_a_port_that_is_taken_is_the_users_to_choose(run: RunDirectory) -> None:
    pytest.importorskip("prometheus_client")
    first = Monitor(config(prometheus={"port": 0}), run, is_main=True)
    port = int(run.read_events()[0]["address"].rpartition(":")[2].partition("/")[0])
    with pytest.raises(UsageError, match=r"monitor\.prometheus"):
        Monitor(config(prometheus={"port": port}), run, is_main=True)
    first.close()
    assert Monitor(config(prometheus={"port": port}), None, is_main=False) is not None, (
        "rank 0 serves, nobody else"
    )


def test_a_folder_of_tensorboard_that_is_gone_stops_nothing(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    monitor = Monitor(config(sinks=["tensorboard", "jsonl"]), run, is_main=True)
    monitor.on_step(record(1))
    shutil.rmtree(run.tensorboard)
    for step in (2, 3, 4):
        monitor.on_step(record(step))
    monitor.close()
    assert len(run.read_metrics()) == 4
    assert [event["kind"] for event in run.read_events()] == ["sink_failed"]
    assert len(caplog.records) == 1


def test_a_server_that_takes_long_to_fail_is_asked_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(sinks, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Down:
        calls = 0

        def on_step(self, row: dict[str, Any]) -> None:
            self.calls += 1
            now[0] += 0.02
            raise TimeoutError("the server is away")

        on_eval = on_step

        def close(self) -> None:
            """Nothing is open."""

    events: list[Any] = []
    down = Down()
    guarded = Guarded("the sink", down, lambda kind, **fields: events.append(kind))
    for _ in range(1000):
        guarded.send("on_step", {"step": 1})
        now[0] += 0.001
    assert down.calls == 2, "a twentieth of the time at most, and ever less"
    assert events == ["sink_failed"]


_FILLING = """
import json, resource, sys, time
from pathlib import Path
from lockstep.config import MonitorConfig
from lockstep.run_directory.rank_output import to_log
from lockstep.monitor import Monitor
from lockstep.run_directory.records import RunDirectory, StepRecord
run = RunDirectory(Path(sys.argv[1]))
LIMIT = 40_000
def files_end_at(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
norms = {f"layers.{n}": 0.5 for n in range(20)}
with to_log(run.logs / "rank-0.log", on_console=(True, True), descriptors=True):
    monitor = Monitor(MonitorConfig(log_steps=1, sinks=["console", "jsonl", "tensorboard"]), run, is_main=True)
    def train(first, last):
        for step in range(first, last):
            monitor.on_step(StepRecord(step=step, loss=1.0, grad_norm=1.0, lr=0.1, samples=1, tokens=1,
                                       gradient_norms=norms))
            print("x" * 200)
        monitor.flush()
    files_end_at(LIMIT)  # as a disk that is full: what is over it is not written, in the middle of a line
    train(1, 400)
    print("full", run.metrics.stat().st_size)
    files_end_at(resource.RLIM_INFINITY)
    time.sleep(0.5)
    train(400, 410)
    monitor.close()
"""


def test_a_disk_that_is_full_stops_nothing_and_leaves_whole_lines(run: RunDirectory) -> None:
    """A write that is cut short must not leave half a line for the next one to be glued to."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = subprocess.run(
        [sys.executable, "-c", _FILLING, str(run.path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "full 3" in done.stdout, "just under the limit"
    failed = [event["sink"] for event in run.read_events() if event["kind"] == "sink_failed"]
    assert sorted(failed) == ["the sink jsonl", "the sink tensorboard"], "once each"
    for name in failed:
        assert done.stderr.count(f"{name} failed, training goes on") == 1, done.stderr
    assert done.stdout.count("the log can't be written") == 1
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == [*range(1, 410)], "it goes on when there is room again, and none is lost"
    scalars_ = EventAccumulator(str(run.tensorboard)).Reload().Scalars("loss")
    assert scalars_[-1].step == 409


def test_the_rest_of_a_killed_line_does_not_spoil_the_next(run: RunDirectory) -> None:
    run.append_event("start", step=1)
    with run.events.open("a") as file:
        file.write('{"kind": "sa')
    run.append_event("resume", step=1)
    assert [event["kind"] for event in run.read_events()] == ["start", "resume"]


_WANDB_DOWN = """
import sys, time
from pathlib import Path
from lockstep.config import MonitorConfig
from lockstep.monitor import Monitor
from lockstep.run_directory.records import RunDirectory, StepRecord
run = RunDirectory(Path(sys.argv[1]))
monitor = Monitor(MonitorConfig(log_steps=1, sinks=["wandb", "jsonl"]), run, is_main=True)
since = time.monotonic()
for step in range(1, 51):
    monitor.on_step(StepRecord(step=step, loss=1.0, grad_norm=1.0, lr=0.1, samples=1, tokens=1))
print("steps took", time.monotonic() - since)
monitor.close()
"""


def test_wandb_that_is_down_stops_nothing(run: RunDirectory) -> None:
    """The real library, told to use a server that nobody is behind."""
    pytest.importorskip("wandb", reason="W&B IS NOT TESTED: pip install wandb")
    away = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_MODE": "online",
    }
    done = subprocess.run(
        [sys.executable, "-c", _WANDB_DOWN, str(run.path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **away, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.partition("steps took ")[2].split()[0]) < 30, (
        "the steps do not wait for it"
    )
    assert [event["sink"] for event in run.read_events()] == ["the sink wandb"]
    assert done.stderr.count("lockstep: warning") + done.stderr.count("the sink wandb") >= 1
    assert len(run.read_metrics()) == 50


_WRITER = """
import sys
import time
from pathlib import Path
from lockstep.config import MonitorConfig
from lockstep.monitor import Monitor
from lockstep.run_directory.records import RunDirectory, StepRecord
run = RunDirectory(Path(sys.argv[1]))
monitor = Monitor(MonitorConfig(log_steps=1, sinks=["jsonl"]), run, is_main=True)
norms = {f"layers.{n}": 0.5 for n in range(200)}
for step in range(1, 10**9):
    monitor.on_step(StepRecord(step=step, loss=1.0, grad_norm=1.0, lr=0.1, samples=1, tokens=1, gradient_norms=norms))
    monitor.event("save", step=step)
    time.sleep(0.002)  # a step takes some time; rows of ones that take none would be dropped, and said to be
"""


def test_after_sigkill_there_are_whole_lines_only(run: RunDirectory) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(run.path)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 200
    while not run.metrics.exists() or run.metrics.stat().st_size < 2_000_000:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for path in (run.metrics, run.events):
        text = path.read_text()
        assert text.endswith("\n")
        rows = [json.loads(line) for line in text.splitlines()]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
