"""What people see: plain lines, or a bar on a terminal."""

import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Trainer
from lockstep.config import MonitorConfig
from lockstep.monitor.console import Console, bar_line, duration, number, step_line
from lockstep.monitor.sinks import SinkContext
from tests.launch.shared import on_a_terminal

_ROW = {
    "step": 10,
    "loss": 2.34567,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens_per_second": 12345.6,
    "step_seconds": 0.25,
}


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
    assert [number(n) for n in (1, 0.12345, float("inf"), "nan")] == [
        "1.0000",
        "0.1235",
        "inf",
        "nan",
    ]
    assert step_line(_ROW, None, None).startswith("step 10  ")
    images = {**_ROW, "tokens_per_second": None, "samples_per_second": 1234.5}
    assert "  1,234 samples/s  " in step_line(images, None, None)
    assert "  0.123 samples/s  " in step_line({**images, "samples_per_second": 0.1234}, None, None)


def test_a_line_drops_what_does_not_fit() -> None:
    row = {**_ROW, "memory_bytes": 3 * 2**29, "samples_per_second": 5.0}
    narrow = bar_line(row, 300, 65.0, 80)
    assert (
        narrow == "step 10/300  ━───────────────  loss 2.3457  12,346 tokens/s  1.5 GiB  1:05 left"
    )
    wide = bar_line(row, 300, 65.0, 200)
    assert wide.endswith("  lr 0.001  12,346 tokens/s  0.25 s/step  1.5 GiB  1:05 left")
    assert wide.count("━") == 1
    assert wide.count("─") == 39
    assert bar_line({**row, "step": 300}, 300, 0.0, 80).count("━") > 9
    assert bar_line(row, None, None, 80).startswith("step 10  loss 2.3457  ")
    for width in range(12, 200):
        assert len(bar_line(row, 300, 65.0, width)) < width
        assert len(bar_line(row, None, None, width)) < width
        assert len(step_line(row, 300, 65.0, width)) < max(width, 26)


def screen(text: str, columns: int) -> tuple[list[str], list[str]]:
    """Return what a terminal shows in the end, and every bar that was seen meanwhile."""
    lines = [""]
    bars = []
    for part in re.split(r"(\r\n|\n|\r\x1b\[2K)", text):
        if part == "\r\x1b[2K":
            if lines[-1]:
                bars.append(lines[-1])
            lines[-1] = ""
        elif part in ("\n", "\r\n"):
            lines.append("")
        else:
            assert "\x1b" not in part
            assert "\r" not in part
            lines[-1] += part
            assert len(lines[-1]) < columns, "a line that is wrapped is not erased"
    return lines, bars


_LIVE = """
import sys, time
from pathlib import Path
from lockstep.config import MonitorConfig
from lockstep.run_directory.rank_output import to_log
from lockstep.monitor import Monitor
from lockstep.run_directory.records import StepRecord
with to_log(Path("rank-0.log"), on_console=(True, True), descriptors=True):
    monitor = Monitor(MonitorConfig(sinks=["console"], log_steps=2), None, is_main=True, total_steps=4)
    for step in (1, 2, 3, 4):
        time.sleep(0.15)
        monitor.on_step(StepRecord(step=step, loss=step / 2, grad_norm=1.0, lr=0.1, samples=8, tokens=800.0))
        print("the program says", step)
        print("and", end=" ")
        print("warns", step, file=sys.stderr)
        print("goes on")
    monitor.on_log(4, {"said": "a" * 600})
    monitor.close()
    print("afterwards")
"""


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.full)])
def test_a_terminal_gets_a_bar_and_the_log_plain_lines(columns: int, tmp_path: Path) -> None:
    text = on_a_terminal(tmp_path, "-c", _LIVE.replace("600", "20"), columns=columns, TERM="xterm")
    lines, bars = screen(text, columns)
    said = [
        line
        for step in (1, 2, 3, 4)
        for line in (f"the program says {step}", f"warns {step}", "and goes on")
    ]
    log = (tmp_path / "rank-0.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("step")] == [*said, "afterwards", ""]
    shown = [line for line in lines if line.startswith("step") and "said" not in line]
    assert [line.split()[1] for line in shown] == ["1/4", "2/4", "4/4"], "the history stays"
    assert all(("grad" in line) == (columns == 200) for line in shown[1:])
    assert {bar.split()[1] for bar in bars} == {"1/4", "2/4", "3/4", "4/4"}, "it moves each step"
    assert any(bar.startswith("step 3/4  ━") and "loss 1.5" in bar for bar in bars), (
        "a step that is not logged"
    )
    assert all(
        word in bars[-1] for word in ("tokens/s", "left", "MiB" if columns == 200 else "loss")
    )
    assert [line for line in log if line.startswith("step") and "said" not in line][1].endswith(
        " left"
    )
    assert all("grad 1.0000" in line for line in log if "tokens/s" in line), (
        "the log has whole lines"
    )
    assert "━" not in "".join(log)
    assert [line for line in log if not line.startswith("step")].count("goes on") + log.count(
        "and goes on"
    ) >= 4


_STEPS = """
from tests.monitor.test_console import own_loop
own_loop(None)
print("and without")
own_loop(False)
"""


def own_loop(progress: bool | None) -> None:
    trainer = Trainer(nn.Linear(2, 1), loss_fn=nn.MSELoss(), batch_size=4)
    x = torch.randn(24, 2)
    for record in trainer.steps(TensorDataset(x, x.sum(1, keepdim=True)), progress=progress):
        time.sleep(0.06)
        print("mine", record.step)
        if record.step == 5:
            break
    print("after")


@pytest.mark.full
def test_the_callers_own_loop_has_the_bar_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = [*(f"mine {step}" for step in range(1, 6)), "after"]
    lines, bars = screen(on_a_terminal(tmp_path, "-c", _STEPS, columns=80, TERM="xterm"), 80)
    assert lines == [*mine, "and without", *mine, ""], "the loop's own lines stay alone"
    seen = [bar.split()[1] for bar in bars]
    assert set(seen) >= {"2/6", "3/6", "4/6", "5/6"}
    assert seen == sorted(seen), "in the first loop alone"
    assert all("samples/s" in bar for bar in bars[2:])
    own_loop(True)
    plain = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in plain] == ["step 1/6", *mine[:5], "step 5/6", "after"]
