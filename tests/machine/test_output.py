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

from lockstep import Trainer
from lockstep.machine import output
from tests.ranks import REPOSITORY


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


def closed() -> io.StringIO:
    """A stream that the program has closed."""
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "none": lambda: None,
    "closed": closed,
    "full": Full,
    "only writes": OfUser,
    "without ×": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_run_ends_well_whatever_its_output_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    out: Any = STREAMS[stream]()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    batch = (torch.ones(2, 3), torch.ones(2, 1))
    run = tmp_path / "run"
    trainer = Trainer(nn.Linear(3, 1), loss_fn=nn.MSELoss(), max_steps=3, output_dir=str(run))
    trainer.log({"note": "a text"})
    trainer.train([batch])
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 3
    if isinstance(out, OfUser):
        assert "step 3/3" in out.text
    if stream == "without ×":
        assert b"on 1 \\xd7 cpu" in out.buffer.getvalue()


def test_what_is_closed_is_opened_on_nothing() -> None:
    code = (
        "import os; from lockstep.machine.output import prepare_streams; prepare_streams();"
        " import sys; print('lost'); os.write(2, b'lost'); file = open('x', 'w');"
        " sys.exit(file.fileno())"
    )
    line = f'cd "$(mktemp -d)" && {sys.executable} -c "{code}" <&- >&- 2>&-'
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(["bash", "-c", line], env=environment, timeout=600)
    assert ended.returncode > 2  # the file has none of the three numbers


def test_a_command_writes_what_an_encoding_lacks_as_escapes() -> None:
    code = (
        "from lockstep.machine.output import prepare_streams; prepare_streams();"
        " print('2 \\u00d7 cpu')"
    )
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONIOENCODING": "ascii",
    }
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=600)
    assert ended.stdout == b"2 \\xd7 cpu\n", ended.stderr


def test_the_first_failure_of_a_stream_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    output.say("one", "two")
    output.say("three")
    told = capsys.readouterr().err
    assert told.count("no output can be written (No space left on device)") == 1
