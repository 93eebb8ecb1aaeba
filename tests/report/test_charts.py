"""What is drawn of own metrics and of a profile, and how much of a long run."""

import json
import random
from pathlib import Path

import pytest
import torch

from lockstep.monitor.profiling import as_markdown, combine, summarise
from lockstep.report.charts import charts
from lockstep.report.page import page_data, render
from lockstep.report.read import read_run
from lockstep.run_directory.records import RunDirectory
from tests.report.shared import write_run


def test_metrics_of_ones_own_are_drawn_each_and_several_values_of_a_step_are_one_row(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "loss": 1.0 / step, "lr": 0.1, "time": 1.0})
    run.append_metrics({"step": 2, "time": 2.0, "eval_loss": 0.6, "eval_accuracy": 0.5})
    run.append_metrics({"step": 2, "time": 2.0, "mine": 7})
    run.append_metrics(
        {"step": 2, "time": 2.0, "media": {"note": {"kind": "text", "text": "hello"}}}
    )
    run.append_metrics({"step": 3, "time": 2.0, "eval_loss": 0.5, "eval_accuracy": 0.75})
    read = read_run(tmp_path)
    assert [row["step"] for row in read.evaluations] == [2, 3]
    found = {figure["title"]: figure["marks"][0] for figure in charts([read])}
    assert (found["eval_accuracy"]["x"], found["eval_accuracy"]["y"]) == ([2, 3], [0.5, 0.75])
    assert found["mine"]["y"] == [7]
    assert "time" not in found


def test_memory_of_a_profile_is_followed_and_drawn(tmp_path: Path) -> None:
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
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
    assert max(chart["marks"][0]["y"]) == pytest.approx(8.0, rel=0.01)


def test_a_page_stays_below_a_megabyte_whatever_a_run_recorded(tmp_path: Path) -> None:
    """20,000 steps with 30 metrics of one's own, 8 ranks, images, texts and histograms; then far
    too much of each.
    """
    run = write_run(tmp_path / "long", steps=20_000, ranks=8, log_steps=10, slow_from=10_000)
    noise = random.Random(0)
    picture = random.Random(0).randbytes(60_000)
    rows = [
        {"step": step, **{f"metric {n}": noise.gauss(n, 1) for n in range(30)}}
        for step in range(10, 20_000, 10)
    ]
    (run.media / "1.png").parent.mkdir(exist_ok=True)
    for step in range(200, 20_000, 1800):
        (run.media / f"{step}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + picture)
        media = {f"image {n}": {"kind": "image", "file": f"media/{step}.png"} for n in range(12)}
        media |= {f"text {n}": {"kind": "text", "text": "\u4e2d" * 3000} for n in range(6)}
        edges = [noise.gauss(0, 1) for _ in range(33)]
        media |= {
            f"values {n}": {"kind": "histogram", "counts": [step] * 32, "edges": edges}
            for n in range(6)
        }
        rows.append({"step": step, "media": media})
    with run.metrics.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    read = read_run(run.path)
    data = page_data([read])
    assert 700_000 < len(render(data).encode()) < 1_000_000
    assert "twice as many" in data["left_out"]
    points = [
        len(figure["marks"][0]["x"])
        for figure in data["charts"]
        if figure["title"].startswith("metric")
    ]
    assert len(points) == 30
    assert min(points) > 200
    assert any(group["note"].startswith("10 more") and group["items"] for group in data["samples"])
    (skew,) = (figure for figure in data["charts"] if figure["id"] == "ranks")
    assert len(skew["marks"][0]["z"][0]) == 240
    assert max(skew["marks"][0]["z"][2]) > 1.4 > max(skew["marks"][0]["z"][3]), (
        "a slow rank is not thinned away"
    )

    read.evaluations = [
        {"step": step, **{f"m {n}": 0.1 * n for n in range(500)}} for step in range(1000)
    ]
    for row in read.rows[:2000]:
        row["own_seconds"] = [noise.random() for _ in range(300)]
        row["gradient_norms"] = {f"layers.{n}": noise.random() for n in range(300)}
    read.rows = read.rows[:2000]
    read.config_text = "key: " + "value " * 10_000
    read.events = [
        event | {"kind": kind, "reason": "because " * 999}
        for event in read.events
        for kind in "abcde"
    ]
    data = page_data([read])
    assert len(render(data).encode()) < 1_000_000
    notes = " ".join(figure["note"] for figure in data["charts"])
    for left_out in (
        "440 more metrics",
        "The 64 of 300 ranks",
        "first 64 of 300 layers",
        "events are left out",
    ):
        assert left_out in notes
