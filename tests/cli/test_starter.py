"""What `lockstep init` and `lockstep new-model` write trains as it stands, and nothing is
overwritten.
"""

import ast
import sys
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.config import load_config
from tests.forked import Forked
from tests.launch.shared import environment


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    return capsys.readouterr().err


def test_what_is_written_trains_and_is_proved(here: Path) -> None:
    for argv in (["init", "text"], ["init", "table", "--script"], ["new-model", "my-model"]):
        assert cli.main(argv) == 0
    commands = {
        "text": ["lockstep", "train", "train.yaml", "--max-steps", "2"],
        "table": ["train"],
        ".": ["pytest", "-q", "test_my_model.py"],
    }
    started = {
        folder: Forked(
            [sys.executable, "-m", *command],
            cwd=here / folder,
            env=environment(),
            stdout=-1,
            stderr=-2,
            text=True,
        )
        for folder, command in commands.items()
    }
    said = {folder: process.communicate(timeout=500)[0] for folder, process in started.items()}
    for folder, process in started.items():
        assert process.returncode == 0, said[folder]
    assert "step 2/2" in said["text"]
    accuracy = said["table"].rpartition("eval_accuracy ")[2].split()[0]
    assert float(accuracy) > 0.7, said["table"]


@pytest.mark.promise("Nothing that exists is written over, except what Lockstep itself wrote")
def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / ".git").touch()
    assert cli.main(["init", "mine"]) == 0, "hidden files are no hindrance"
    assert capsys.readouterr().out.splitlines()[1] == "  cd mine"
    message = refused(capsys, "init", "mine")
    assert "mine has files already: text, train.yaml" in message
    assert "lockstep init DIR" in message
    assert cli.main(["new-model", "bird"]) == 0
    assert "bird.py, bird.yaml, test_bird.py is here already" in refused(
        capsys, "new-model", "bird"
    )


@pytest.mark.parametrize("name", ["3d", "class", "a b", "_"])
def test_a_model_has_a_name_that_python_can_import(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not a name for a Python module" in refused(capsys, "new-model", name)
    assert list(here.iterdir()) == []


def test_a_project_reads_data_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "book.txt").write_text("words " * 400)
    (here / "rows'.csv").write_text("a,b\n1,x\n")
    assert cli.main(["init", "text", "--data", "book.txt"]) == 0
    assert load_config(here / "text" / "train.yaml").data.args["path"] == "../book.txt"
    assert cli.main(["init", "table", "--script", "--data", "rows'.csv"]) == 0
    text = (here / "table" / "train.py").read_text()
    ast.parse(text)
    assert """Table("../rows'.csv")""" in text
    assert "there is no file nowhere.txt" in refused(
        capsys, "init", "other", "--data", "nowhere.txt"
    )
    assert not (here / "other").exists()
