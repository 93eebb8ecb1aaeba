"""Errors under plain `python`: a known one has a note, and a UsageError shows the user's lines
alone.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.flags import apply_flags
from lockstep.errors import UsageError, only_user_code
from lockstep.failures.explanations import add_explanation
from lockstep.machine.environment import WORLD
from tests.forked import Forked
from tests.launch.shared import environment
from tests.ranks import REPOSITORY

SCRIPT = """
import torch
from torch import nn
from lockstep import Trainer

def main():
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), LABELS)
    trainer = Trainer(nn.Linear(4, 3), loss_fn=LOSS, batch_size=8, max_steps=2)
    trainer.train(data)
main()
"""


def run(folder: Path, script: str, **variables: str) -> str:
    """What `python -m own` writes to stderr; it must fail."""
    (folder / "own.py").write_text(script)
    command = [sys.executable, "-m", "own"]
    variables = {"PYTHONPATH": f"{folder}:{REPOSITORY}", "OMP_NUM_THREADS": "1", **variables}
    process = Forked(
        command,
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    return said


def test_a_known_error_is_explained_under_plain_python(tmp_path: Path) -> None:
    said = run(
        tmp_path, SCRIPT.replace("LABELS", "torch.ones(8)").replace("LOSS", "nn.CrossEntropyLoss()")
    )
    assert (
        said.count("lockstep: labels of another dtype\n  why: labels of classes are whole numbers")
        == 1
    )
    assert "do: labels.long() in the dataset" in said


def test_a_usage_error_shows_the_users_lines_alone(tmp_path: Path) -> None:
    script = SCRIPT.replace("LABELS", "torch.ones(8)").replace("LOSS", "nn.CrossEntropyLoss")
    said = run(tmp_path, script)
    assert 'own.py", line 8, in main' in said
    assert "/lockstep/" not in said
    assert "loss_fn is the class CrossEntropyLoss" in said
    assert "/lockstep/" in run(tmp_path, script, LOCKSTEP_TRACEBACK="1")


def test_a_notebook_shows_the_users_lines_alone() -> None:
    """IPython asks an exception for its own lines."""
    with pytest.raises(UsageError) as raised:
        apply_flags({"learnig_rate": 1.0})
    shown = "\n".join(raised.value._render_traceback_())
    assert "write learning_rate" in shown
    assert __file__ in shown
    assert "flags.py" not in shown
    assert only_user_code(None) is None


@pytest.mark.parametrize("world", ["", "world.json"])
def test_a_rank_that_may_survive_does_not_look_its_error_up(
    world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets the error if it goes on; if not, it is explained as the process ends."""
    monkeypatch.setenv(WORLD, world)
    error = RuntimeError("can't start new thread")
    add_explanation(error)
    assert bool(getattr(error, "__notes__", [])) == (not world)
