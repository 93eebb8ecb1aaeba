"""Lockstep on an accelerator that works late on purpose: the same training, no race, no wait that
is not marked.

And it finds what is planted. `docs/hardware.md` says what is shown here, and what no simulation
shows.
"""

import tempfile
from collections.abc import Iterator

import pytest

from tests.ranks import run_ranks
from tests.simulated_device import cases, mistakes, rank_cases

ALONE = [
    *(f"as on the CPU: {name}" for name in cases.ALIKE),
    "a whole run",
    "resumed",
    *(f"found: {mistake.__doc__}" for mistake in mistakes.ALONE),
]
TOGETHER = [
    *(f"as one process: {name}" for name in rank_cases.UNDER),
    "diloco",
    *(f"found: {mistake.__doc__}" for mistake in mistakes.TOGETHER),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        yield run_ranks(cases.main, 1, folder)[0]


@pytest.fixture(scope="module")
def together() -> Iterator[list[dict[str, str]]]:
    with tempfile.TemporaryDirectory() as folder:
        yield run_ranks(rank_cases.main, 2, folder)


@pytest.mark.parametrize("name", ALONE)
def test_one_process(alone: dict[str, str], name: str) -> None:
    assert not alone[name], alone[name]


@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks(together: list[dict[str, str]], name: str) -> None:
    for rank, found in enumerate(together):
        assert not found[name], f"rank {rank}: {found[name]}"


def test_ten_mistakes_are_planted() -> None:
    assert len({*mistakes.ALONE, *mistakes.TOGETHER}) >= 10
