"""The effective training time ratio: its parts add up to the run's wall time."""

from pathlib import Path

import pytest

from lockstep.report.effective_time import PARTS, effective_time, in_words
from lockstep.report.page import page_data
from lockstep.report.read import read_run, wall_seconds
from tests.report.shared import write_run


def test_parts_add_up_to_wall_time_and_lost_steps_are_not_trained(tmp_path: Path) -> None:
    steady = read_run(write_run(tmp_path / "steady").path)
    killed = read_run(write_run(tmp_path / "killed", killed_at=380).path)
    parts = {run.name: effective_time(run) for run in (steady, killed)}
    for run in (steady, killed):
        assert tuple(parts[run.name]) == PARTS
        assert sum(parts[run.name].values()) == pytest.approx(wall_seconds(run))
    # the same steps were kept, and 80 of them, of about 60 ms, were trained twice
    assert parts["killed"]["trained"] == pytest.approx(parts["steady"]["trained"], rel=0.02)
    assert parts["steady"]["lost"] == 0.0
    assert 80 * 0.05 < parts["killed"]["lost"] < 80 * 0.1
    assert parts["killed"]["recovered"] >= parts["steady"]["recovered"] + 14 - 1.0

    ratio, others = in_words(parts["killed"])
    assert 0 < float(ratio.rstrip("%")) < 100
    assert [part.split()[0] for part in others.split(", ")] == [*PARTS[1:]]
    tiles = page_data([killed])["runs"][0]["tiles"]
    assert ("effective time", ratio, others) in tiles


def test_without_measurements_there_is_no_ratio(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    run = read_run(tmp_path)
    assert effective_time(run) == {}
    assert in_words({}) == ("", "")
