"""Sound programs of `benchmarks/silent_bugs/sound.py` give no alarm, watched or verified."""

from pathlib import Path

import pytest

import lockstep
from benchmarks.silent_bugs.sound import ON_RANKS, PROGRAMS
from lockstep.verify.command import verify_script
from lockstep.verify.loop.findings import LoopFinding

SCRIPT = Path(__file__).parents[2] / "benchmarks/silent_bugs/sound.py"
BY_HAND = ("regression", "word-language-model-lstm", "word-language-model-transformer")
IN_PROCESSES_OF_ITS_OWN = "mnist-hogwild"  # which the benchmark watches
QUICK = ("time-sequence-prediction",)  # an optimizer with a closure


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != IN_PROCESSES_OF_ITS_OWN])
def test_watched_in_one_process(name: str) -> None:
    found: list[LoopFinding] = []
    with lockstep.observe(every=1, report=found.append) as seen:
        PROGRAMS[name]()
    assert not found
    assert seen.steps or name in BY_HAND  # which write their weights themselves


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in ON_RANKS],
)
def test_verified_on_two_ranks(name: str) -> None:
    (outcome,) = verify_script(str(SCRIPT), [name], [2], steps=3)
    assert outcome.passed, (outcome.failed, outcome.not_judged, outcome.causes)
    assert outcome.steps == 3
