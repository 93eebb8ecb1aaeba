"""A run goes on whatever its standard output is: closed, full, gone, or a user's own object."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Trainer, output


class Full(io.StringIO):
    """A file on a full disk, or a terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class OfUser:
    """A log as people write them, in place of standard output."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


@pytest.mark.parametrize("stream", [None, Full(), OfUser()], ids=["closed", "full", "only writes"])
def test_a_run_ends_well_whatever_its_output_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    run = tmp_path / "run"
    trainer = Trainer(nn.Linear(3, 1), loss_fn=nn.MSELoss(), max_steps=3, output_dir=str(run))
    trainer.log({"note": "a text"})
    trainer.train([batch])
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 3
    if isinstance(stream, OfUser):
        assert "step 3/3" in stream.text


def test_what_is_closed_is_opened_on_nothing() -> None:
    code = (
        "import os; from lockstep.output import open_what_is_closed; open_what_is_closed();"
        " import sys; print('lost'); os.write(2, b'lost'); file = open('x', 'w');"
        " sys.exit(file.fileno())"
    )
    line = f'cd "$(mktemp -d)" && {sys.executable} -c "{code}" <&- >&- 2>&-'
    environment = os.environ | {"PYTHONPATH": str(Path(output.__file__).parents[1])}
    ended = subprocess.run(["bash", "-c", line], env=environment, timeout=600)
    assert ended.returncode > 2  # the file has none of the three numbers


def test_the_first_failure_of_a_stream_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    output.say("one", "two")
    output.say("three")
    told = capsys.readouterr().err
    assert told.count("no output can be written (No space left on device)") == 1
