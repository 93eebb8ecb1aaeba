"""What the README and the pages that it points to claim is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.cli import main
from tests.parity.table import PAGE as PARITY
from tests.parity.table import in_page

REPOSITORY = Path(__file__).parent.parent
PIPELINE = REPOSITORY / "docs/how_to/pipeline.md"


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


def test_the_table_of_cases_is_what_the_parity_tests_run() -> None:
    text = PARITY.read_text()
    assert text == in_page(text), "python -m tests.parity.table --write"


def test_the_links_in_the_readme_lead_somewhere() -> None:
    """Also to the heading, where one is named."""
    for target in re.findall(r"\]\(([^)]+)\)", (REPOSITORY / "README.md").read_text()):
        name, _, anchor = target.partition("#")
        assert (REPOSITORY / name).is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (REPOSITORY / name).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings], target


def test_the_diff_trains_before_and_after() -> None:
    """Both sides of it, on a model and data as a script has them."""
    block = re.search(r"```diff\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert block is not None
    ends = []
    for side in "-+":
        lines = [line[1:] for line in block[1].splitlines() if line[0] in (side, " ") and "…" not in line]
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        names = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loss_fn": nn.MSELoss(),
            "train_data": DataLoader(data, batch_size=8, shuffle=True),
        }
        before = nn.MSELoss()(model(data.tensors[0]), data.tensors[1]).item()
        exec("\n".join(lines), names)
        ends.append(nn.MSELoss()(model(data.tensors[0]), data.tensors[1]).item() / before)
    assert max(ends) < 1


def test_the_schedule_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = PIPELINE.read_text()
    command = re.search(r"^lockstep (config show .*--schedule.*)$", text, re.MULTILINE)
    assert command is not None
    assert main(command[1].split()) == 0
    assert f"```text\n{capsys.readouterr().out}```" in text


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["pipeline", "hybrid"])
def test_the_trainers_train(trainer: str, tmp_path: Path) -> None:
    """The commands as they stand, with fewer steps."""
    text = PIPELINE.read_text().replace("\\\n", "")
    command = re.search(rf"^lockstep (train trainers/{trainer}\.yaml .*)$", text, re.MULTILINE)
    assert command is not None
    few = ["training.max_steps=2", "training.batch_size=1", "--output-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "lockstep", *command[1].split(), *few], cwd=REPOSITORY, check=False)
    assert done.returncode == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2
