"""Long work says how far it is: rewritten on a terminal, line by line in a pipe; quick work says
nothing.
"""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.machine import progress
from lockstep.machine.progress import PATIENCE_SECONDS, progress_of
from tests.checkpoint.shared import save

PLANNED = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2}}
data: {name: text, args: {path: long.txt, block_size: 16}}
training: {batch_size: 2, global_batch_size: 8, max_steps: 2}
"""
LONG_WORK = {
    "plan run.yaml --gpus 1 --gpu-type A100-80GB": "planning: 1 of ",
    "data prepare long.txt --out tokens": "tokens of long.txt: ",
    "checkpoint verify .": "checking step-00000001: ",
    "checkpoint digest .": "reading step-00000001: ",
    "checkpoint export . --output weights.safetensors": "reading step-00000001: ",
    "checkpoint convert . --to torch --output weights.pt": "reading step-00000001: ",
    "checkpoint convert . --to full --output full": "writing full: ",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO, seconds: float) -> str:
    """100 pieces of 0.1 GB that take `seconds` in all."""
    now = [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    with progress_of("exporting step-00000007", 10 * 10**9, stream=stream, clock=clock) as advance:
        for _ in range(100):
            now[0] += seconds / 100
            advance(10**8)
    return stream.getvalue()


def test_quick_work_says_nothing() -> None:
    assert work(io.StringIO(), PATIENCE_SECONDS / 2) == ""
    assert work(Terminal(), PATIENCE_SECONDS / 2) == ""


def test_in_a_pipe_it_is_a_line_every_ten_seconds() -> None:
    lines = work(io.StringIO(), 40).splitlines()
    assert len(lines) == 4
    assert lines[0] == "lockstep: exporting step-00000007: 0.5 of 10.0 GB, 0:38 left"
    assert not any("\r" in line or "\x1b" in line for line in lines)


def test_on_a_terminal_one_line_is_rewritten_and_gone_in_the_end() -> None:
    text = work(Terminal(), 10)
    assert "\n" not in text
    assert text.count("\rlockstep: exporting") > 30
    assert text.endswith("\r\x1b[K")


def test_what_is_no_bytes_has_a_unit_and_ranks_leave_it_to_one() -> None:
    for shows in (True, False):
        stream = io.StringIO()
        now = [0.0]
        with progress_of(
            "planning", 8, unit="layouts", shows=shows, stream=stream, clock=lambda now=now: now[0]
        ) as advance:
            now[0] = 30
            advance(2)
        assert stream.getvalue() == (
            "lockstep: planning: 2 of 8 layouts, 1:30 left\n" if shows else ""
        )


def test_long_work_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal; without patience, for these take no time here. `lockstep verify` says each
    topology it begins.
    """
    save(tmp_path / "checkpoints", 1)
    (tmp_path / "long.txt").write_text("A long text.\n" * 100)
    (tmp_path / "run.yaml").write_text(PLANNED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    for command, shown in LONG_WORK.items():
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            assert main(command.split()) == 0
        assert f"\rlockstep: {shown}" in terminal.getvalue(), command
        assert "\r" not in capsys.readouterr().out, command
