"""A few rounds of the bench that kills (`make chaos`): its own answers are checked too.

The quick run has one kill, in tests/trainer/test_resume.py.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from benchmarks import chaos_live
from benchmarks.chaos import CASES, Case, bench, forked, started, undisturbed

Fresh = Callable[..., Any]


@pytest.fixture(scope="module")
def fresh() -> Iterator[Fresh]:
    """Call a function in another process: a launcher is forked there, and forks of one with
    threads, as this, hang.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda function, *args, **more: pool.submit(function, *args, **more).result()


@pytest.fixture(scope="module")
def expected(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    digests: dict[str, str] = fresh(
        undisturbed, tmp_path_factory.mktemp("whole"), ("fsdp",), forked, 30
    )
    return digests


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_few_kills_lose_nothing(case: Case, expected: dict[str, str], fresh: Fresh) -> None:
    report = fresh(bench, 1, 7, case, kills=1, steps=30, strategies=("fsdp",), expected=expected)
    assert not report.wrong
    assert report.rounds >= 1
    assert report.checkpoints_proved >= 5


@pytest.mark.full
def test_live_recovery_loses_nothing() -> None:
    report = chaos_live.bench(2, 7, topologies=("hybrid",), kinds=("update", "kill"))
    assert not report.wrong
    assert report.rounds.total() >= 2


@pytest.mark.full
def test_with_the_launcher_itself(fresh: Fresh) -> None:
    report = fresh(bench, 1, 7, kills=1, steps=60, strategies=("ddp",), launch=started)
    assert not report.wrong
    assert report.rounds >= 1
