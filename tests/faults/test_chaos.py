"""The kill bench, in short: `make chaos` runs a hundred rounds of it for each format, in the background and not."""

import pytest

from benchmarks.chaos import CASES, Case, bench, started


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from benchmarks.chaos import forked, undisturbed

    return undisturbed(tmp_path_factory.mktemp("whole"), ("fsdp",), forked, 30)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_few_kills_lose_nothing(case: Case, expected: dict[str, str]) -> None:
    report = bench(2, 7, case, kills=2, steps=30, strategies=("fsdp",), expected=expected)
    assert not report.wrong
    assert report.rounds >= 2
    assert report.checkpoints_proved >= 10


def test_with_the_launcher_itself() -> None:
    report = bench(1, 7, kills=1, steps=60, strategies=("ddp",), launch=started)
    assert not report.wrong
    assert report.rounds >= 1
