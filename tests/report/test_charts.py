"""Ticks, units, and the memory of a profile."""

import json
from pathlib import Path

import pytest
import torch

from lockstep.monitor.profiling import as_markdown, combine, summarise
from lockstep.report.charts import log_ticks, moments
from lockstep.report.page import page_data
from lockstep.report.read import read_run
from tests.report.shared import write_run


def test_ticks_are_few_and_plain_numbers() -> None:
    assert log_ticks([0.6, 21.0]) == [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
    assert log_ticks([1e-4, 1e3, None, 0.0]) == [1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
    assert log_ticks([None, 0.0]) == []
    assert moments(0.2)[1] == " ms"
    assert moments(38.0)[1] == " s"


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
