"""The index of a folder of runs: what it compares, where its links lead, how large it is."""

import json
import warnings
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.report.charts import loss_against
from lockstep.report.index import index_data, runs_in
from lockstep.report.page import best_first
from lockstep.report.read import read_run
from lockstep.run_directory.records import RunDirectory
from tests.report.browser import Page, browser
from tests.report.shared import write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs at two depths, one with a name that must be escaped, one that crashed."""
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / "a", steps=200, ranks=1)
    write_run(
        runs / "search" / "rate 5%25", steps=100, ranks=1, seed=1, **{"training.learning_rate": 0.5}
    )
    write_run(runs / "search" / "crashed", steps=300, ranks=1, ends=False, seed=2)
    (runs / "notes").mkdir()
    assert main(["report", str(runs)]) == 0
    return runs


def test_each_run_has_a_row_a_line_and_a_link_to_its_report(folder: Path) -> None:
    names = ["a", "search/crashed", "search/rate 5%25"]
    assert [path.relative_to(folder).as_posix() for path in runs_in(folder)] == names
    runs = [read_run(path) for path in runs_in(folder)]
    for run, name in zip(runs, names, strict=True):
        run.name = name
    data = index_data(folder, runs, folder)
    table = data["tables"][0]
    assert [row[0]["text"] for row in table["rows"]] == names
    assert table["rows"][2][0]["href"] == "./search/rate%205%2525/report.html"
    assert [row[table["head"].index("status")] for row in table["rows"]] == [
        "done",
        "crashed",
        "done",
    ]
    different = {row[0]: row[1:] for row in data["tables"][1]["rows"]}
    assert different["training.learning_rate"] == ["0.001", "0.001", "0.5"]
    assert {chart["title"] for chart in data["charts"]} == {
        f"Loss against {x}" for x in ("steps", "tokens", "seconds")
    }
    for run in runs:
        assert (run.path / "report.html").exists()


def test_runs_are_ordered_by_the_best_with_their_own_metrics_and_what_python_gave(
    tmp_path: Path,
) -> None:
    for name, lr, best in (("a", 0.1, 0.9), ("b", 0.2, 0.5), ("c", 0.3, 0.7)):
        write_run(tmp_path / name, steps=20, ranks=1)
        records = RunDirectory(tmp_path / name)
        kept = [
            line for line in records.metrics.read_text().splitlines() if "eval_loss" not in line
        ]
        evaluation = json.dumps(
            {"step": 20, "eval_loss": best, "eval_accuracy": 1 - best, "time": 1.0}
        )
        records.metrics.write_text("\n".join([*kept, evaluation, ""]))
        events = [json.loads(line) for line in records.events.read_text().splitlines()]
        for event in events:
            event |= {"given": {"optimizer": f"SGD(lr={lr})"}} if event["kind"] == "start" else {}
        records.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    runs = best_first([read_run(path) for path in runs_in(tmp_path)])
    data = index_data(tmp_path, runs, tmp_path)
    head = data["tables"][0]["head"]
    rows = data["tables"][0]["rows"]
    assert [row[0]["text"] for row in rows] == ["b", "c", "a"]
    assert [row[head.index("eval_accuracy")] for row in rows] == ["0.5", "0.3", "0.1"]
    different = {row[0]: row[1:] for row in data["tables"][1]["rows"]}
    assert different["optimizer (in Python)"] == ["SGD(lr=0.2)", "SGD(lr=0.3)", "SGD(lr=0.1)"]


def test_tokens_and_seconds_are_those_up_to_the_step(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=100, ranks=1)  # logged every second step, 16384 tokens each
    run = read_run(tmp_path / "a")
    steps, tokens, seconds = (figure["marks"][0]["x"] for figure in loss_against([run]))
    assert tokens == [16384 * step for step in steps]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(run.rows[-1]["time"] - run.events[0]["time"], rel=1e-5)


def test_the_page_of_many_runs_is_small(tmp_path: Path) -> None:
    for number in range(30):
        write_run(tmp_path / f"run-{number:02}", steps=200, ranks=1, seed=number)
        (tmp_path / f"run-{number:02}" / "report.html").touch()
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").stat().st_size < 1_000_000


def test_a_report_is_made_anew_when_its_run_went_on(folder: Path) -> None:
    report = folder / "a" / "report.html"
    before = report.stat().st_mtime_ns
    assert main(["report", str(folder), "-o", str(folder / "notes" / "compared.html")]) == 0
    assert report.stat().st_mtime_ns == before
    assert "./../a/report.html" in (folder / "notes" / "compared.html").read_text()
    (folder / "a" / "metrics.jsonl").touch()
    assert main(["report", str(folder)]) == 0
    assert report.stat().st_mtime_ns > before


def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a run directory, and there is none in it" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--live"]) == 2


if browser() is None:
    warnings.warn(
        "no Chromium here: the index is NOT tested in a browser (apt-get install chromium)",
        stacklevel=1,
    )


@pytest.mark.skipif(
    browser() is None, reason="NO BROWSER: install chromium, or pages are not tested"
)
def test_it_draws_in_a_browser_and_shows_values_under_the_pointer(folder: Path) -> None:
    with Page(390) as page:
        address = (folder / "index.html").as_uri()
        page.open(address)
        assert page.ask("document.querySelectorAll('.plot .line').length") == 9
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
        page.resize(1280)
        # drawn anew at another width
        page.until("document.querySelector('.plot .figure').clientWidth > 800")
        page.ask(
            "document.querySelector('.plot .figure').dispatchEvent(new PointerEvent('pointermove'))"
            " || 0"
        )
        assert "steps" in page.ask("document.querySelector('.tip').textContent")
        page.open(page.ask("document.querySelector('td a').href"))
        # the best comes first
        assert page.ask("document.querySelector('h1').textContent") == "crashed"
        assert [asked for asked in page.requests if not asked.startswith(("file:", "data:"))] == []
        assert page.complaints == []
