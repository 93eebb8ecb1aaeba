"""The scaling study: what it runs, what it says, what it draws."""

import os
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.report import scaling
from lockstep.report.page import render
from tests.forked import lockstep
from tests.ranks import REPOSITORY
from tests.report.browser import Page, browser


def _fresh(command: list[str], environment: dict[str, str], out: Any, err: Any) -> Any:
    return Popen(command, env=environment, stdout=out, stderr=err)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"name": "transformer"},
                "data": {"name": "python-docs"},
                "training": {"batch_size": 4},
            }
        )
    )
    return path


def test_weak_keeps_a_ranks_work_and_strong_the_whole(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []

    def measured(_config: Path, overrides: list[str], ranks: int, *_: Any) -> tuple[float, float]:
        batch = next(
            o.partition("=")[2] for o in overrides if o.startswith("training.global_batch_size")
        )
        asked.append((ranks, batch))
        return 100.0 * ranks * 0.9 ** (ranks - 1), 0.1

    monkeypatch.setattr(scaling, "_measure", measured)
    said: list[str] = []
    points = scaling.study(config, [], [4, 1, 2], steps=5, start=_fresh, log=said.append)
    assert asked == [(1, "4"), (2, "8"), (4, "16"), (1, "16"), (2, "16"), (4, "16")]
    weak = [point for point in points if point.kind == "weak"]
    assert [round(p.speedup, 2) for p in weak] == [1.0, 1.8, 2.92]
    assert weak[1].efficiency == pytest.approx(0.9)
    assert len(said) == 6
    text = scaling.as_markdown(points, "lockstep bench scaling tiny.yaml", "2 cores")
    assert "| weak | 2 | 180.0 | 0.1000 | 1.80 × | 90% | 1.8–1.9 × |" in text
    assert scaling.EXPECTED[16] == (12.0, 14.0)


@pytest.mark.skipif(
    browser() is None, reason="NO BROWSER: install chromium, or pages are not tested"
)
def test_the_picture_draws(tmp_path: Path) -> None:
    points = [scaling.Point("weak", n, 100.0 * n * 0.95, 0.1, n * 0.95) for n in (1, 2, 4, 8)]
    path = tmp_path / "scaling.html"
    path.write_text(render(scaling.page_of(points, "Scaling of tiny.yaml", "now", "2 cores")))
    with Page() as page:
        page.open(path.as_uri())
        assert page.complaints == []
        assert page.ask("document.querySelectorAll('.figure .line').length") == 6
        assert "What to do next" not in page.ask("document.body.textContent.split('{')[0]")


def test_what_makes_no_sense_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", str(config), "--ranks", "1,x"]) == 2
    assert "--ranks" in capsys.readouterr().err
    assert main(["bench", "speed", str(config)]) == 2
    assert main(["bench", "scaling", str(config), "--ranks", "0,2"]) == 2


_MARKED = """
import os
from pathlib import Path

from benchmarks.chaos_data import Tokens


class Marked(Tokens):
    def __init__(self):
        super().__init__()
        with Path(os.environ["MARKS"]).open("a") as marks:
            marks.write(Path("/proc/self/cmdline").read_text().replace(chr(0), " ") + chr(10))
"""


def test_its_runs_are_forks_of_what_it_has_imported(tmp_path: Path) -> None:
    (tmp_path / "marked.py").write_text(_MARKED)
    (tmp_path / "tiny.yaml").write_text(
        "model: {name: transformer, args: {n_layer: 1, n_embd: 8, n_head: 1}}\n"
        "data: {name: 'marked:Marked'}\n"
        "training: {batch_size: 2}\n"
    )
    marks = tmp_path / "marks"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}",
        "MARKS": str(marks),
    }
    words = ["bench", "scaling", "tiny.yaml", "--ranks", "1", "--steps", "2"]
    done = lockstep(words, tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strong     1 ranks" in done.stdout
    assert (tmp_path / "scaling.md").exists()
    ranks = marks.read_text().splitlines()
    assert len(ranks) == 2
    assert not any(" train " in words for words in ranks), "it would be a fresh process's command"


def test_a_run_that_fails_says_why_once(tmp_path: Path, config: Path) -> None:
    words = ["bench", "scaling", str(config), "data.name=nothing:Here", "--ranks", "1"]
    done = lockstep(words, tmp_path, os.environ)
    assert done.returncode == 1
    assert done.stderr.count("the run on 1 ranks failed") == 1
    assert "nothing" in done.stderr


@pytest.mark.full
def test_ranks_that_sleep_scale_though_there_are_no_cores_for_them(tmp_path: Path) -> None:
    """Two real ranks, each with its own sleep: twice the samples in hardly more time."""
    config = REPOSITORY / "benchmarks/sleeping.yaml"
    folder = tmp_path / "runs"
    folder.mkdir()
    rates = [
        scaling._measure(
            config, [f"training.global_batch_size={4 * ranks}"], ranks, 8, folder, _fresh
        )[0]
        for ranks in (1, 2)
    ]
    assert 10 < rates[0] < 20.1, "4 samples of 50 ms"
    assert 1.3 < rates[1] / rates[0] < 2.1
