"""What the README claims about the tree is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from tests.parity.table import in_readme

REPOSITORY = Path(__file__).parent.parent


def test_the_tree_in_the_readme_is_the_tree() -> None:
    """Each module and package of `lockstep/` is in the tree, and each name in the tree exists."""
    text = (REPOSITORY / "README.md").read_text()
    block = re.search(r"```\nlockstep/\n(.*?)```", text, re.DOTALL)
    assert block is not None
    named = {line.split()[0].rstrip("/") for line in block[1].splitlines() if re.match(r"  \S", line)}
    package = REPOSITORY / "lockstep"
    there = {p.name for p in package.iterdir() if not p.name.startswith(("_", ".")) and p.suffix in ("", ".py")}
    there = {name for name in there if (package / name).is_file() or any((package / name).glob("*.py"))}
    assert named == there | {"__init__.py"}


def test_the_table_of_strategies_is_what_the_parity_tests_run() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert text == in_readme(text), "python -m tests.parity.table --write"


def test_the_schedule_in_the_readme_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "README.md").read_text()
    command = re.search(r"^lockstep (config show .*--schedule.*)$", text, re.MULTILINE)
    assert command is not None
    assert main(command[1].split()) == 0
    assert f"```\n{capsys.readouterr().out}```" in text


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["pipeline", "hybrid"])
def test_the_trainers_in_the_readme_train(trainer: str, tmp_path: Path) -> None:
    """The commands as they stand, with fewer steps."""
    text = (REPOSITORY / "README.md").read_text().replace("\\\n", "")
    command = re.search(rf"^lockstep (train trainers/{trainer}\.yaml .*)$", text, re.MULTILINE)
    assert command is not None
    few = ["training.max_steps=2", "training.batch_size=1", "--output-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "lockstep", *command[1].split(), *few], cwd=REPOSITORY, check=False)
    assert done.returncode == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2
