"""The simulated fleet agrees with a closed formula, and orders the ways to go on as it must."""

import pytest

from benchmarks.fleet import (
    COPIES,
    COPIES_OF_ONE_MACHINE,
    DAY,
    FROM_DISK,
    LIVE,
    SPARES,
    closed_form,
    mean_shares,
    simulate,
)
from lockstep.report.effective_time import PARTS

MEAN_TIME = 3 * 3600.0


def test_a_run_that_goes_on_from_saves_has_the_ratio_of_the_formula() -> None:
    # Recoveries in which failures fall count, too: often here.
    often_hit = 2 * FROM_DISK.restart
    for mean_time in (MEAN_TIME, often_hit):
        found = mean_shares(FROM_DISK, mean_time, days=400, runs=1)
        assert found["trained"] == pytest.approx(closed_form(FROM_DISK, mean_time), rel=0.01)
        assert sum(found.values()) == pytest.approx(1.0)


def test_each_way_loses_less_than_the_one_before_it() -> None:
    ways = (FROM_DISK, SPARES, COPIES, LIVE)
    found = [mean_shares(way, MEAN_TIME, days=200, runs=1) for way in ways]
    ratios = [shares["trained"] for shares in found]
    assert ratios == sorted(ratios)
    assert found[-1]["waited"] > 0 == found[-2]["waited"]
    # Most failures take a machine along, and its copies.
    dying = mean_shares(COPIES_OF_ONE_MACHINE, MEAN_TIME, days=200, runs=1)
    assert dying["lost"] > 5 * found[2]["lost"]
    # A failure loses half of the training between two copies, or more while saves stop training.
    lost = simulate(COPIES, MEAN_TIME, 400 * DAY)["lost"]
    failures = 400 * DAY / MEAN_TIME
    assert lost / failures == pytest.approx(COPIES.copy_every / 2, rel=0.1)


def test_a_seed_fixes_a_run() -> None:
    first, again, other = (simulate(LIVE, MEAN_TIME, DAY, seed=seed) for seed in (3, 3, 4))
    assert tuple(first) == PARTS
    assert first == again != other
