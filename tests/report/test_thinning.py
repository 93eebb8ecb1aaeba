"""A long run is read in a fixed memory: which rows stay, and what is exact all the same."""

import json
import random
from pathlib import Path
from statistics import median

import pytest

from lockstep.report import read
from lockstep.report.page import page_data
from lockstep.report.read import phase_totals, read_run, typical_step
from lockstep.report.thinning import Thinner
from tests.report.shared import write_run


def test_rows_that_fit_are_all_kept() -> None:
    thinner = Thinner(("loss",), budget=10_000)
    for step in (3, 1, 2, 1):
        row = {"step": step, "loss": float(step), f"of {step}": 1}
        thinner.add(step, row, json.dumps(row).encode())
    thinner.add(2, {"step": 2, "loss": 9.0}, b'{"step": 2, "loss": 9.0}')
    assert [row["step"] for row in thinner.rows()] == [1, 2, 3]
    assert thinner.rows()[1] == {"step": 2, "loss": 9.0, "of 2": 1}, "the newest value of each name"
    assert thinner.dropped == 0


def test_memory_is_bounded_and_peaks_stay() -> None:
    noise = random.Random(0)
    thinner = Thinner(("loss", "grad_norm"), budget=20_000)
    losses = [noise.gauss(2, 0.1) for _ in range(20_000)]
    losses[777] = 50.0
    losses[15_001] = -3.0
    norms = [1.0] * 20_000
    norms[9_999] = 400.0
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        row = {"step": step, "loss": loss, "grad_norm": norm}
        thinner.add(step, row, json.dumps(row).encode())
    rows = thinner.rows()
    assert len(json.dumps(rows)) < 25_000
    assert {0, 777, 9_999, 15_001, 19_999} <= {row["step"] for row in rows}
    assert median(row["loss"] for row in rows) == pytest.approx(2, abs=0.1)


def test_many_columns_do_not_keep_it_from_thinning() -> None:
    noise = random.Random(0)
    thinner = Thinner(budget=20_000)
    for step in range(5_000):
        row = {"step": step} | {f"metric {number}": noise.random() for number in range(12)}
        thinner.add(step, row, json.dumps(row).encode())
    assert len(json.dumps(thinner.rows())) < 25_000


def test_sums_over_a_thinned_run_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", killed_at=200)
    whole = read_run(run.path)
    monkeypatch.setattr(read, "_LEAST_BYTES", 60_000)
    thinned = read_run(run.path, among=10_000)
    assert len(thinned.rows) < len(whole.rows) / 2
    assert phase_totals(thinned) == pytest.approx(phase_totals(whole))
    assert typical_step(thinned) == pytest.approx(typical_step(whole), rel=0.05)
    assert min(row["loss"] for row in thinned.rows) == min(row["loss"] for row in whole.rows)
    (note,) = page_data([thinned])["not_read"]
    assert (
        note
        == f"rows of metrics.jsonl: {len(thinned.rows)} of {len(whole.rows)} are looked at, with"
        " the peaks"
    )
