"""What a step costs besides the model's own work, in what does not depend on the machine: calls of
functions; and how far a reader who follows a batch goes from file to file.
"""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.contestants import CONTESTANTS, EVERY, Net, Rows, Size, Task
from benchmarks.hops import walk_of_a_step
from tests.ranks import run_ranks

# steps, of which every tenth is logged
SETTLED = 2 * EVERY
COUNTED = 2 * EVERY


class _EnoughError(Exception):
    """Ends a contestant, which trains for ever."""


def calls_of_a_step(name: str, folder: Path) -> float:
    """Calls of Python and C functions in the training thread, from one forward pass to the next."""
    steps = calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def before_forward(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == SETTLED:
            sys.setprofile(count)
        if steps == SETTLED + COUNTED:
            sys.setprofile(None)
            raise _EnoughError

    size = Size(width=16, depth=4, batch=8, block=0)
    model = Net(size)
    model.register_forward_pre_hook(before_forward)
    try:
        with pytest.raises(_EnoughError):
            CONTESTANTS[name](Task(model, Rows(size.width), size, 1, folder))
    finally:
        sys.setprofile(None)
    return calls / COUNTED


def costs(folder: Path) -> tuple[float, float, dict[str, Any]]:
    by_hand = calls_of_a_step("hand-written", folder)
    ours = calls_of_a_step("lockstep", folder)
    walk_of_a_step({}, str(folder / "walk.json"))
    return by_hand, ours, json.loads((folder / "walk.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float, dict[str, Any]]:
    # In a process of its own: once something was compiled, torch makes 16 more calls in a step of a
    # fused optimizer.
    folder = tmp_path_factory.mktemp("costs")
    (result,) = run_ranks(costs, 1, folder)
    return result


def test_a_step_makes_fewer_calls_than_the_hand_written_loop(
    found: tuple[float, float, dict[str, Any]],
) -> None:
    by_hand, ours, _ = found
    assert ours <= 0.88 * by_hand, (ours, by_hand)  # 0.87 with torch 2.13


def test_a_batch_goes_through_few_files_from_the_loader_to_the_update(
    found: tuple[float, float, dict[str, Any]],
) -> None:
    _, _, walk = found
    jumps = [f"{came_from} → {into} ({name})" for came_from, into, name in walk["jumps"]]
    assert "step.py → parallel/parallel_model.py (forward_backward)" in jumps
    assert len(jumps) <= 27, "\n".join(jumps)
    assert len(set(walk["entries"])) <= 21, walk["entries"]
