"""The kill bench, in short: `make chaos` runs a hundred rounds of it."""

from benchmarks.chaos import bench


def test_a_few_kills_lose_nothing() -> None:
    report = bench(rounds=3, seed=7, strategies=("ddp",))
    assert not report.wrong
    assert report.rounds >= 3
    assert report.checkpoints_proved > 10
