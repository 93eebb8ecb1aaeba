"""What the README and the pages that it points to claim is true."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.cli import main
from tests.parity.table import PAGE as PARITY
from tests.parity.table import in_page
from tests.ranks import run_ranks

REPOSITORY = Path(__file__).parent.parent
PIPELINE = REPOSITORY / "docs/how_to/pipeline.md"


def test_the_table_of_cases_is_what_the_parity_tests_run() -> None:
    text = PARITY.read_text()
    assert text == in_page(text), "python -m tests.parity.table --write"


def test_the_links_in_the_readme_lead_somewhere() -> None:
    """Also to the heading, where one is named."""
    for target in re.findall(r"\]\(([^)]+)\)", (REPOSITORY / "README.md").read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        assert (REPOSITORY / name).is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (REPOSITORY / name).read_text(), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings
            ], target


def sides_of_the_diff() -> tuple[str, str]:
    """The script before and after, as the README has it, without the lines left out."""
    block = re.search(r"```diff\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert block is not None
    before, after = (
        "\n".join(
            line[1:] for line in block[1].splitlines() if line[0] in (side, " ") and "…" not in line
        )
        for side in "-+"
    )
    return before, after


def losses_of(script: str) -> list[float]:
    """The loss of each update of a side of the diff, on a model and data as a script has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(300, 4)  # the last step of an epoch is short
    losses: list[float] = []
    loss_fn = nn.MSELoss()

    class Kept(nn.MSELoss):
        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = super().forward(outputs, targets)
            losses.append(loss.item())
            return loss

    names: dict[str, Any] = {
        "model": model,
        # norms are above 1 at first
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5),
        "loss_fn": Kept() if "backward" in script else loss_fn,
        "dataset": TensorDataset(x, 3 * x.sum(1, keepdim=True)),
        "DataLoader": DataLoader,
        "print": lambda _step, loss: losses.append(loss),
    }
    exec(script, names)
    return losses


def losses_under(strategies: list[str], folder: str) -> dict[str, list[float]]:
    """On every rank: the README's script under each strategy, and a second time, where nothing is
    left to do.
    """
    _, after = sides_of_the_diff()
    found = {}
    for strategy in strategies:
        script = after.replace('strategy="fsdp"', f'strategy="{strategy}"').replace(
            "runs/", f"{folder}/{strategy}/"
        )
        found[strategy] = losses_of(script)
        with pytest.warns(UserWarning, match="no step is left to take: 50 are done"):
            assert losses_of(script) == []
    return found


@pytest.mark.parametrize(
    ("of_one", "of_two"),
    [
        (["single", "fsdp"], ["ddp", "fsdp", "pipeline"]),
        pytest.param(["dp"], ["accelerate"], marks=pytest.mark.full),
    ],
    ids=["most", "the others"],
)
def test_the_diff_gives_the_losses_of_the_plain_loop_under_every_strategy(
    of_one: list[str], of_two: list[str], tmp_path: Path
) -> None:
    """50 updates: a schedule or clipping that nobody asked for would show from the
    first ones on.
    """
    before, after = sides_of_the_diff()
    assert 'strategy="fsdp"' in after
    plain = losses_of(before)
    assert len(plain) == 50
    alone = losses_under(of_one, str(tmp_path / "alone"))
    ranks = run_ranks(losses_under, 2, of_two, str(tmp_path))
    for strategy, losses in [*alone.items(), *ranks[0].items()]:
        assert losses == pytest.approx(plain, rel=1e-6), strategy


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
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *command[1].split(), *few], cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2


def test_what_no_gpu_has_seen_is_said_everywhere_alike() -> None:
    """One GPU has; none of these may say more, or less, than its pages."""
    ran = list((REPOSITORY / "benchmarks/results").glob("gpu*"))
    for page in ("README.md", "docs/hardware.md", "benchmarks/README.md"):
        text = " ".join((REPOSITORY / page).read_text().split())
        assert ("One GPU has run" in text) == bool(ran), page
        assert "No GPU has run" not in text, page
