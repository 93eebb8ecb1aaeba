"""Ticks, units, and the memory of a profile."""

import json
from pathlib import Path

import pytest
import torch

from lockstep.monitor.profiling import as_markdown, combine, summarise
from lockstep.records import RunDirectory
from lockstep.report.charts import charts, log_ticks, moments
from lockstep.report.page import page_data
from lockstep.report.read import read_run
from tests.report.shared import write_run


def test_ticks_are_few_and_plain_numbers() -> None:
    assert log_ticks([0.6, 21.0]) == [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
    assert log_ticks([1e-4, 1e3, None, 0.0]) == [1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
    assert log_ticks([None, 0.0]) == []
    assert moments(0.2)[1] == " ms"
    assert moments(38.0)[1] == " s"


def test_metrics_of_ones_own_are_drawn_each_and_several_values_of_a_step_are_one_row(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": 1.0 / step, "lr": 0.1, "time": 1.0})
    run.append_metrics({"step": 2, "time": 2.0, "eval_loss": 0.6, "eval_accuracy": 0.5})
    run.append_metrics({"step": 2, "time": 2.0, "mine": 7})
    run.append_metrics({"step": 2, "time": 2.0, "media": {"note": {"kind": "text", "text": "hello"}}})
    run.append_metrics({"step": 3, "time": 2.0, "eval_loss": 0.5, "eval_accuracy": 0.75})
    read = read_run(tmp_path)
    assert [row["step"] for row in read.evaluations] == [2, 3]
    found = {figure["title"]: figure["data"][0] for figure in charts([read])}
    assert (found["eval_accuracy"]["x"], found["eval_accuracy"]["y"]) == ([2, 3], [0.5, 0.75])
    assert found["mine"]["y"] == [7.0]
    assert "time" not in found


def test_memory_of_a_profile_is_followed_and_drawn(tmp_path: Path) -> None:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        held = torch.ones(1 << 20)
        again = held * 2
        del again
        held.add_(1)
    summary = combine([summarise(profiler.events(), 0, 1)], 1, 1)
    curve = [bytes_held for _, bytes_held in summary["memory"]]
    assert max(curve) == pytest.approx(8 << 20, rel=0.01)
    assert curve[-1] == pytest.approx(4 << 20, rel=0.01)
    assert "at most 8 MiB more" in as_markdown(summary)
    run = write_run(tmp_path / "run", steps=60)
    (run.path / "profile").mkdir()
    (run.path / "profile/summary.json").write_text(json.dumps(summary))
    (chart,) = (c for c in page_data([read_run(run.path)])["charts"] if c["id"] == "profile-memory")
    assert max(chart["data"][0]["y"]) == pytest.approx(8.0, rel=0.01)
