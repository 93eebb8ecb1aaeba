"""SIGUSR2 asks for a profile; the handler is put back when the run is over; a taken signal is left alone."""

import json
import os
import signal
from pathlib import Path

import pytest

from lockstep.config import config_from
from lockstep.records import RunDirectory
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model


class AsksOnce(Tokens):
    """Sends the signal while the third sample is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitem__(self, index: int) -> object:  # type: ignore[override]
        self.reads += 1
        if self.reads == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return super().__getitem__(index)


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 10, **settings: object) -> RunDirectory:
    monkeypatch.setattr("lockstep.monitor.figures.SECONDS_BETWEEN", 0.0)
    config = config_from({
        "training.batch_size": 2, "training.global_batch_size": 4, "training.max_steps": steps,
        "precision.mode": "fp32",
        "training.eval_steps": None, "checkpoint.save_strategy": "none", "monitor.sinks": [], "monitor.log_steps": 1,
        "monitor.callbacks": ["lockstep.monitor:DistributedMonitor"], **settings,
    })  # fmt: skip
    Trainer(language_model("transformer"), config=config, output_dir=folder).train(AsksOnce())
    return RunDirectory(folder)


def test_a_signal_asks_for_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", monkeypatch)
    assert [event["kind"] for event in run.read_events()].count("profile") == 1
    summary = json.loads((run.path / "profile/summary.json").read_text())
    assert summary["last"] - summary["first"] == 2
    assert "compute" in (run.path / "profile/summary.md").read_text()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert "ranks: peak" in capsys.readouterr().out, "DistributedMonitor says what the rank holds"


def test_a_schedule_in_the_config_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`profile: {wait: 2, warmup: 1, active: 2}` traces steps 4 and 5: the schedule advances with each step."""
    taken: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: taken.append(number))
    try:
        run = train(tmp_path / "run", monkeypatch, 6, **{"monitor.profile": {"wait": 2, "warmup": 1, "active": 2}})
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert taken == [signal.SIGUSR2], "the user's own handler stays"
    summary = json.loads((run.path / "profile/summary.json").read_text())
    assert (summary["first"], summary["last"]) == (4, 5)
    assert len(list((run.path / "profile").glob("*.json.gz"))) == 1
