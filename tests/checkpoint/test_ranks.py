"""Saving on several ranks and loading on others."""

from pathlib import Path

import pytest

from lockstep import checkpoint
from tests.checkpoint import rank_cases
from tests.checkpoint.shared import Snapshot, blank, known_model
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return directory, run_ranks(rank_cases.on_four, 4, directory)


def test_digest_is_that_of_the_whole_tensors(saved: tuple[Path, list[list[str]]]) -> None:
    expected = checkpoint.digest_tensors(sorted(known_model().items()))
    assert saved[1] == [[expected] * 3] * 4


def test_two_ranks_load_what_four_saved(saved: tuple[Path, list[list[str]]]) -> None:
    run_ranks(rank_cases.on_two, 2, saved[0])


def test_one_process_loads_what_four_ranks_saved(saved: tuple[Path, list[list[str]]]) -> None:
    for step in (1, 2, 3):
        target = blank(Snapshot(known_model()))
        checkpoint.load(saved[0] / f"step-{step:08d}", target, only=["model"])
        assert all((target.model[name] == tensor).all() for name, tensor in known_model().items())
