"""The table of daily tasks: each cell of ours runs, and takes no more lines than the leanest of the
others.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from tests.docs.blocks import REPOSITORY, blocks_in

PAGE = REPOSITORY / "docs/daily.md"
SETUP = blocks_in(PAGE)[0].body


def rows() -> list[tuple[str, list[str], list[str]]]:
    """(task, our lines, their lines) of each row."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and "`" in cells[1]:
            found.append((cells[0], *(re.findall(r"`([^`]+)`", cell) for cell in cells[1:])))
    return found


def test_there_are_thirty() -> None:
    assert len(rows()) == 30


@pytest.mark.parametrize(("task", "ours", "theirs"), rows(), ids=[task for task, *_ in rows()])
def test_a_cell_runs_and_is_no_longer_than_theirs(
    task: str, ours: list[str], theirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchmetrics")
    monkeypatch.chdir(tmp_path)
    assert len(ours) <= len(theirs)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    made: list[Trainer] = []

    class Kept(Trainer):
        """The trainer that the cell makes."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append(self)

    names["Trainer"] = Kept
    if "trainer." in ours[0]:
        exec("trainer = Trainer(model, optimizer, loss_fn)", names)
    exec("\n".join(ours), names)
    if not made:  # a number over ranks needs no trainer
        assert names["mean"] == 1.0
        return
    (trainer,) = made
    if trainer.step.progress.step == 0:
        trainer.train(names["train"], names["val"], epochs=1)
    assert trainer.last_record is not None
    if task == "end with the best model":
        assert trainer.best_checkpoint is not None
        assert trainer.best_checkpoint.name == f"step-{trainer.step.progress.step:08d}"
    if task == "predictions, in order":
        assert names["predictions"].shape == (64, 3)
