"""Lockstep on an accelerator that works late on purpose: the same training, no race, no wait that
is not marked.

And it finds what is planted. `docs/hardware.md` says what is shown here, and what no simulation
shows.
"""

import tempfile
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.sampled import chosen, quick_and_full
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


# Only in `full`: as others, with another setting.
ONLY_FULL = (
    *(
        f"as on the CPU: {name}"
        for name in (
            "fused",
            "clipped by value",
            "scaled losses",
            "clipped adaptively",
            "bf16",
            "dp",
            "recomputed",
            "recomputed in runs",
            "pinned batches",
            "skipping bad numbers",
        )
    ),
    *(
        f"as one process: {name}"
        for name in (
            "ddp, equal bits",
            "fsdp, equal bits",
            "pipeline",
            "pipeline, equal bits",
            "fsdp, recomputed",
        )
    ),
    "diloco",
)


def some(names: list[str]) -> list[Any]:
    """Return all; in the quick run are those that are not like others, and one planted mistake in
    three.
    """
    planted = [name for name in names if name.startswith("found: ")]
    left_out = {*ONLY_FULL, *planted} - {*planted[::3]}
    return quick_and_full(names, [name for name in names if name not in left_out])


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, str]:
    names = [name for name in chosen(request, "name") if name in ALONE]
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, str] = run_ranks(cases.main, 1, folder, names)[0]
        return found


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    names = [name for name in chosen(request, "name") if name in TOGETHER]
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(rank_cases.main, 2, folder, names)


@pytest.mark.parametrize("name", some(ALONE))
def test_one_process(alone: dict[str, str], name: str) -> None:
    assert not alone[name], alone[name]


@pytest.mark.parametrize("name", some(TOGETHER))
def test_two_ranks(together: list[dict[str, str]], name: str) -> None:
    for rank, found in enumerate(together):
        assert not found[name], f"rank {rank}: {found[name]}"


def test_ten_mistakes_are_planted() -> None:
    assert len({*mistakes.ALONE, *mistakes.TOGETHER}) >= 10
