"""The profile of a run's first steps."""

import json
from pathlib import Path

import pytest

from lockstep.config import config_from
from lockstep.run_directory.records import RunDirectory
from lockstep.trainer import Trainer
from tests.parity.toy import Tokens, language_model


def test_the_schedule_of_the_config_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`profile: {wait: 2, warmup: 1, active: 2}` traces steps 4 and 5: the schedule advances with
    each step.
    """
    monkeypatch.setattr("lockstep.monitor.figures.SECONDS_BETWEEN", 0.0)
    config = config_from(
        {
            "training.batch_size": 2,
            "training.global_batch_size": 4,
            "training.max_steps": 6,
            "precision.mode": "fp32",
            "training.eval_steps": None,
            "checkpoint.save_strategy": "none",
            "monitor.sinks": [],
            "monitor.log_steps": 1,
            "monitor.callbacks": ["lockstep.monitor:DistributedMonitor"],
            "monitor.profile": {"wait": 2, "warmup": 1, "active": 2},
        }
    )
    Trainer(language_model("transformer"), config=config, output_dir=tmp_path / "run").train(
        Tokens()
    )
    run = RunDirectory(tmp_path / "run")
    assert [event["kind"] for event in run.read_events()].count("profile") == 1
    summary = json.loads((run.path / "profile/summary.json").read_text())
    assert (summary["first"], summary["last"]) == (4, 5)
    assert "compute" in (run.path / "profile/summary.md").read_text()
    assert len(list((run.path / "profile").glob("*.json.gz"))) == 1
    assert "ranks: peak" in capsys.readouterr().out, "DistributedMonitor says what the rank holds"
