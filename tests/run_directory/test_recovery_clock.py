"""The parts of a recovery follow each other, and add up to the time since the death."""

import time

import pytest

from lockstep.run_directory import recovery_clock


def test_parts_add_up_to_the_time_since_the_first_death() -> None:
    died = time.monotonic() - 3.0
    recovery_clock.begin(died, died + 1.0)
    recovery_clock.end_of("agreed")
    # another rank dies meanwhile
    recovery_clock.begin(died + 2.5, died + 2.75)
    recovery_clock.end_of("agreed")
    parts = recovery_clock.take()
    assert list(parts) == ["interrupted", "noticed", "agreed"]
    assert parts["interrupted"] == pytest.approx(2.5)
    assert parts["noticed"] == pytest.approx(0.25)
    assert 3.0 <= sum(parts.values()) <= time.monotonic() - died


def test_nothing_is_timed_without_a_death() -> None:
    recovery_clock.end_of("groups")
    assert recovery_clock.take() == {}
