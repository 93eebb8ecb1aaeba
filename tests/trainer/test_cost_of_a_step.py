"""What a step costs besides the model's own work, in what does not depend on the machine: calls of
functions; and how far a reader who follows a batch, or a model, goes from file to file.
"""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.contestants import CONTESTANTS, EVERY, Net, Rows, Size, Task
from benchmarks.hops import (
    ON_META,
    PLACED,
    STRATEGIES,
    handed_again,
    walk_of_a_model,
    walk_of_a_step,
)
from tests.ranks import run_ranks

SETTLED = 2 * EVERY  # steps before those that count
COUNTED = 4 * EVERY
# The model is looked at for side effects in every hundredth step, which are among these.
SETTLED_BEFORE_A_LOOK = 9 * EVERY


class _EnoughError(Exception):
    """Ends a contestant, which trains for ever."""


def calls_of_steps(name: str, folder: Path, settled: int) -> list[int]:
    """Calls of Python and C functions in the training thread, from one forward pass to another.

    They are counted for each ten steps, one of which is logged.
    """
    steps = calls = 0
    found: list[int] = []

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def before_forward(*_: Any) -> None:
        nonlocal steps, calls
        steps += 1
        if steps < settled or steps % EVERY:
            return
        sys.setprofile(None)
        if steps > settled:
            found.append(calls)
        if steps == settled + COUNTED:
            raise _EnoughError
        calls = 0
        sys.setprofile(count)

    size = Size(width=16, depth=4, batch=8, block=0)
    model = Net(size)
    model.register_forward_pre_hook(before_forward)
    try:
        with pytest.raises(_EnoughError):
            CONTESTANTS[name](Task(model, Rows(size.width), size, 1, folder))
    finally:
        sys.setprofile(None)
    return found


# strategy → (jumps, files) that a batch may take from the loader to the update; only ever lowered
FAR = {"single": (26, 20), "ddp:2": (30, 22), "fsdp:2": (40, 28), "pipeline:2": (37, 28)}


class Costs(NamedTuple):
    """Calls of a step, and of a look for side effects."""

    by_hand: float
    ours: float
    of_a_look: float


def costs(folder: Path) -> Costs:
    # The smallest count leaves out what the clock brings about: memory is read once a second.
    by_hand = min(calls_of_steps("hand-written", folder, SETTLED))
    ours = min(calls_of_steps("lockstep", folder, SETTLED))
    with_a_look = max(calls_of_steps("lockstep", folder, SETTLED_BEFORE_A_LOOK))
    walk(folder, "single")
    return Costs(by_hand / EVERY, ours / EVERY, with_a_look - ours)


def walk(folder: Path, strategy: str) -> None:
    if strategy in STRATEGIES:
        walk_of_a_step(STRATEGIES[strategy], str(folder / strategy))
    walk_of_a_model(PLACED[strategy], str(folder / f"{strategy} placed"))


def walks(folder: Path) -> None:
    for strategy in PLACED:
        if strategy != "single":
            walk(folder, strategy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(scope="module")
def found(folder: Path) -> Costs:
    # In a process of its own: once something was compiled, torch makes 16 more calls in a step of a
    # fused optimizer.
    (result,) = run_ranks(costs, 1, folder)
    return result


@pytest.fixture(scope="module")
def walked(folder: Path, found: Costs) -> Path:
    run_ranks(walks, 2, folder)
    return folder


def test_a_step_makes_fewer_calls_than_the_hand_written_loop(found: Costs) -> None:
    # 0.88 with torch 2.13; 0.89 with a build for CUDA (2.14), which looks for devices in each step
    most = 0.895 if torch.backends.cuda.is_built() else 0.885
    assert found.ours <= most * found.by_hand, found


def test_a_look_for_side_effects_makes_few_calls(found: Costs) -> None:
    assert 0 < found.of_a_look <= 11 * found.ours, found  # 7.4 with torch 2.13


@pytest.mark.parametrize("strategy", FAR)
def test_a_batch_goes_through_few_files_from_the_loader_to_the_update(
    strategy: str, walked: Path
) -> None:
    found = json.loads((walked / strategy).read_text())
    jumps = [f"{came_from} → {into} ({name})" for came_from, into, name in found["jumps"]]
    most_jumps, most_files = FAR[strategy]
    assert "step.py → parallel/parallel_model.py (forward_backward)" in jumps
    assert len(jumps) <= most_jumps, "\n".join(jumps)
    assert len(set(found["entries"])) <= most_files, found["entries"]


@pytest.mark.parametrize("strategy", PLACED)
def test_no_file_is_handed_a_model_more_than_once_while_it_is_placed(
    strategy: str, walked: Path
) -> None:
    found = json.loads((walked / f"{strategy} placed").read_text())
    assert found["handed"]["parallel/place.py"] == ["trainer/placed_model.py: place"]
    assert set(handed_again(found)) == (ON_META if "meta" in strategy else set())
