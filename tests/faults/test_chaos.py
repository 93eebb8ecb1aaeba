"""A few rounds of the bench that kills (`make chaos`): its own answers are checked too.

The quick run has one kill, in tests/trainer/test_resume.py.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from benchmarks import chaos_bucket, chaos_live
from benchmarks.chaos import CASES, Case, bench, forked, started, undisturbed
from tests import bucket

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
def test_kills_and_faults_over_a_bucket_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.require_servers()
    for name in bucket.environment(""):
        monkeypatch.setenv(name, "")  # the bench sets them
    report = chaos_bucket.bench(2, 7, kinds=("request", "faults"))
    assert not report.wrong
    assert report.rounds.total() == 2
    assert report.proved >= 10


@pytest.mark.full
def test_what_a_bucket_has_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own answers: a committed checkpoint is deleted, and another one damaged, by the bench."""
    bucket.require_servers()
    for name in bucket.environment(""):
        monkeypatch.setenv(name, "")
    report = chaos_bucket.bench(2, 2, kinds=("lose", "damage"))
    told = "\n".join(report.wrong)
    assert "lost ['step-" in told
    assert "is not whole: model/__0_0.distcp: its checksum is not that" in told
    assert "digest" not in told


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
