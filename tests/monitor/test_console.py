"""What people see: plain lines, or a bar on a terminal."""

from pathlib import Path

import pytest

from lockstep.config import MonitorConfig
from lockstep.monitor.sinks import Console, SinkContext, duration, number, step_line
from tests.launch.shared import on_a_terminal

_ROW = {"step": 10, "loss": 2.34567, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 12345.6, "step_seconds": 0.25}


def test_a_plain_line_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(SinkContext(MonitorConfig(), None, 300, 0))
    console.on_step(_ROW)
    console.on_step({**_ROW, "step": 20, "loss": "nan", "skipped": True})
    console.on_eval({"step": 20, "eval_loss": 2.0, "time": 1.0})
    console.close()
    first, second, evaluation = capsys.readouterr().out.splitlines()
    assert first == "step 10/300  loss 2.3457  grad 0.5000  lr 0.001  12,346 tokens/s  0.25 s/step"
    assert second.startswith("step 20/300  loss nan  ")
    assert "skipped" in second
    assert second.endswith(" left")
    assert evaluation == "step 20  eval_loss 2.0000"


def test_numbers_and_times() -> None:
    assert [duration(s) for s in (5, 65, 3661)] == ["0:05", "1:05", "1:01:01"]
    assert [number(n) for n in (1, 0.12345, float("inf"), "nan")] == ["1.0000", "0.1235", "inf", "nan"]
    assert step_line(_ROW, None, None).startswith("step 10  ")
    images = {**_ROW, "tokens_per_second": None, "samples_per_second": 1234.5}
    assert "  1,234 samples/s  " in step_line(images, None, None)
    assert "  0.123 samples/s  " in step_line({**images, "samples_per_second": 0.1234}, None, None)


_LIVE = """
import sys, time
from pathlib import Path
from lockstep.config import MonitorConfig
from lockstep.launch.worker import to_log
from lockstep.monitor.sinks import Console, SinkContext
with to_log(Path("rank-0.log"), on_console=(True, True), descriptors=True):
    console = Console(SinkContext(MonitorConfig(), None, 3, 0))
    for step in (1, 2, 3):
        console.on_step({"step": step, "loss": 1.5, "grad_norm": 1.0, "lr": 0.1})
        print("the program says", step)
        time.sleep(0.15)
    console.close()
    print("afterwards")
"""


def test_a_terminal_gets_a_bar_and_the_log_plain_lines(tmp_path: Path) -> None:
    text = on_a_terminal(tmp_path, "-c", _LIVE, TERM="xterm")
    assert "step 3/3" in text
    assert "━" in text, "the bar"
    assert "the program says 2" in text
    assert "afterwards" in text
    assert (tmp_path / "rank-0.log").read_text().splitlines() == [
        "step 1/3  loss 1.5000  grad 1.0000  lr 0.1",
        "the program says 1",
        "step 2/3  loss 1.5000  grad 1.0000  lr 0.1  0:00 left",
        "the program says 2",
        "step 3/3  loss 1.5000  grad 1.0000  lr 0.1  0:00 left",
        "the program says 3",
        "afterwards",
    ]
