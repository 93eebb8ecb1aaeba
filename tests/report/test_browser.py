"""The page in a real browser: it draws, says nothing in anger, and asks nobody for anything."""

import json
import random
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch

from lockstep.config import MonitorConfig
from lockstep.monitor import Monitor
from lockstep.report.page import make_server, page_data, render, write
from lockstep.report.read import read_run
from lockstep.run_directory.records import append_line
from tests.report.browser import Page, browser
from tests.report.shared import BEGUN, step_row, write_profile, write_run

pytestmark = pytest.mark.skipif(
    browser() is None, reason="NO BROWSER: install chromium, or pages are not tested"
)
if browser() is None:
    warnings.warn(
        "no Chromium here: the report is NOT tested in a browser (apt-get install chromium)",
        stacklevel=1,
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a whole run, of one that crashed at once, of one that crashed, and of three
    compared.
    """
    folder = tmp_path_factory.mktemp("pages")
    rich = write_run(folder / "rich", killed_at=268)
    write_profile(rich)
    write_run(folder / "other", steps=300, data=0.001, slow_from=None, seed=1)
    write_run(folder / "crashed", steps=120, ranks=1, ends=False)
    begun = write_run(folder / "begun", steps=2, ranks=1, ends=False)
    begun.metrics.write_text('{"step": 1, "loss": "nan", "lr": 0')
    begun.config.write_text("name: <script>throw new Error('markup was run')</script>\n")
    made = {}
    for name, runs in {
        "rich": ["rich"],
        "crashed": ["crashed"],
        "begun": ["begun"],
        "compared": ["rich", "other", "crashed"],
    }.items():
        made[name] = folder / f"{name}.html"
        write(render(page_data([read_run(folder / run) for run in runs])), made[name])
    return made


# The figures of the open page with other marks than its data have.
NOT_DRAWN = """
shown.charts.filter((chart) => {
  const count = (kind) => document.querySelectorAll(`#chart-${chart.id} .figure .${kind}`).length;
  const wanted = { line: 0, area: 0, bar: 0, dot: 0 };
  for (const { kind, x } of chart.marks) {
    if (kind === "line" || kind === "area") wanted[kind] += 1;
    if (kind === "bar") wanted.bar += x.length;
    if (kind === "dots") wanted.dot += x.length;
  }
  const cells = chart.marks.some(({ kind }) => kind === "heat");
  return (count("heat") > 0) !== cells || Object.entries(wanted).some(([kind, number]) => count(kind) !== number);
}).map((chart) => chart.id)
"""


def only_itself(page: Page, address: str) -> None:
    outside = [
        asked for asked in page.requests if asked != address and not asked.startswith("data:")
    ]
    assert outside == [], "no request leaves the page"
    assert page.complaints == []


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(1280, False, id="light"),
        pytest.param(1280, True, id="dark", marks=pytest.mark.full),
        pytest.param(390, False, id="phone"),
    ],
)
def test_pages_draw_without_an_error_or_a_request(
    pages: dict[str, Path], width: int, dark: bool
) -> None:
    with Page(width, dark=dark) as page:
        for name, path in pages.items():
            page.requests.clear()
            address = path.as_uri()
            page.open(address)
            only_itself(page, address)
            assert page.ask("shown.charts.length > 3") or name == "begun", f"{name} has charts"
            assert page.ask(NOT_DRAWN) == [], name
            assert page.ask("document.documentElement.scrollWidth <= innerWidth"), (
                f"{name} is not wider than the screen"
            )
            background = page.ask("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, background[4:-1].split(","))) < 200) == dark


def test_the_page_follows_the_theme_while_it_is_open(pages: dict[str, Path]) -> None:
    with Page() as page:
        page.open(pages["rich"].as_uri())
        colour = "getComputedStyle(document.querySelector('#chart-throughput .line')).stroke"
        before = page.ask(colour)
        page._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark"}],
        )
        page.until(f"{colour} != {json.dumps(before)}")
        assert page.complaints == []


def test_what_a_run_says_is_text_and_never_markup(pages: dict[str, Path]) -> None:
    with Page() as page:
        page.open(pages["begun"].as_uri())
        assert page.complaints == []
        assert "<script>throw" in page.ask("document.querySelector('pre').textContent")


def test_live_follows_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=60, ranks=1, ends=False)
    server = make_server([run.path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        with Page() as page:
            page.open(address)
            steps = "document.querySelector('.tile .value').textContent"
            assert page.ask(steps) == "59"
            row = step_row(75, BEGUN + 60, 1, data=0.01, slow=None, noise=random.Random(0))
            append_line(run.metrics, row)
            page.until(f"{steps} == '75'")
            page.requests = [asked for asked in page.requests if asked != address + "data.json"]
            only_itself(page, address)
    finally:
        server.shutdown()
        server.server_close()


def test_texts_images_and_histograms_are_shown_and_bounded(tmp_path: Path) -> None:
    """As `trainer.log` writes them, while the run goes on; a flood of large images does not make a
    large page.
    """
    run = write_run(tmp_path / "run", steps=20, ranks=1, ends=False)
    monitor = Monitor(MonitorConfig(sinks=["jsonl"]), run, is_main=True)
    made = {
        "digits": torch.rand(3, 1, 8, 8),
        "said": "<b>so</b> it goes",
        "weights": torch.randn(500),
    }
    for step in (1, 2, 3, 4, 5, 6):
        monitor.on_log(step, made)
    monitor.flush()
    server = make_server([run.path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        with Page() as page:
            page.open(address)
            assert (
                page.ask(
                    "[...document.querySelectorAll('.sample h3')].map((h) => h.textContent).join()"
                )
                == "digits,said"
            )
            assert (
                page.ask(
                    "[...document.querySelectorAll('.sample img')].map((i) =>"
                    " i.naturalWidth).join()"
                )
                == "24,24,24,24"
            )
            assert (
                page.ask("document.querySelector('.sample pre').textContent") == "<b>so</b> it goes"
            )
            assert "2 more in run/media/" in page.ask(
                "document.querySelector('.sample').textContent"
            )
            assert page.ask("document.querySelectorAll('#chart-histogram-0 .line').length") == 4
            monitor.on_log(7, {"said": "more"})
            monitor.close()
            page.until("document.querySelector('.sample pre').textContent == 'more'")
            for step in range(8, 40):
                append_line(
                    run.metrics,
                    {
                        "step": step,
                        "media": {"big": {"kind": "image", "file": f"media/{step}.png"}},
                    },
                )
                (run.media / f"{step}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(150_000))
            append_line(
                run.metrics,
                {"step": 40, "media": {"outside": {"kind": "image", "file": "../config.yaml"}}},
            )
            append_line(
                run.metrics,
                {"step": 40, "media": {"long": {"kind": "text", "text": "long " * 10**5}}},
            )
            page.requests = [asked for asked in page.requests if asked != address + "data.json"]
            only_itself(page, address)
    finally:
        server.shutdown()
        server.server_close()
    whole = render(page_data([read_run(run.path)]))
    assert len(whole) < 10**6
    groups = {group["name"]: group for group in page_data([read_run(run.path)])["samples"]}
    assert (len(groups["big"]["items"]), groups["big"]["note"]) == (4, "28 more in run/media/")
    assert groups["outside"]["items"] == []
    assert groups["long"]["items"][0]["text"].endswith("… (metrics.jsonl has all of it)")


def test_a_figure_answers_the_pointer_and_prints(pages: dict[str, Path]) -> None:
    """Values under the pointer, names that hide, a part enlarged, and one figure drawn as wide as
    paper.
    """
    with Page() as page:
        page.open(pages["rich"].as_uri())

        def mouse(
            kind: str, chart: str, part: float = 0.5, mark: str = ".figure", **more: object
        ) -> str:
            """Move or press it over a mark of a figure, `part` of its width from its left; return
            what is shown.
            """
            page.ask(
                f"document.querySelector('#chart-{chart} {mark}').scrollIntoView({{block:"
                " 'center'})"
            )
            box = (
                f"JSON.stringify(document.querySelector('#chart-{chart}"
                f" {mark}').getBoundingClientRect())"
            )
            place = json.loads(page.ask(box))
            page._call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place["x"] + part * place["width"],
                y=place["y"] + place["height"] / 2,
                **more,
            )
            tip = f"document.querySelector('#chart-{chart} .tip')"
            if kind == "mouseMoved":
                figure = json.loads(page.ask(box.replace(mark, ".figure")))
                beside = json.loads(page.ask(f"JSON.stringify({tip}.getBoundingClientRect())"))
                assert figure["y"] < beside["y"] < figure["y"] + 30, (
                    "it is at the figure's upper edge"
                )
                assert figure["x"] <= beside["x"] < beside["right"] <= figure["right"]
            return str(page.ask(f"{tip}.innerText"))

        shown = mouse("mouseMoved", "loss", 0.51)
        assert shown.startswith("step 30")
        assert "training: 1." in shown
        assert "evaluation: 1." in shown
        assert "forward and backward: " in mouse("mouseMoved", "phases")
        assert "checkpoints: 3.6 s" in mouse("mouseMoved", "time", mark=".bar")
        assert "save, step 100, step-00000100" in mouse(
            "mouseMoved", "timeline", mark="[style*=c3]"
        )
        assert re.search(r"step \d+\s+rank [12]: 1", mouse("mouseMoved", "ranks"))
        lines = "document.querySelectorAll('#chart-loss .line').length"
        assert page.ask(lines) == 3
        page.ask("document.querySelector('#chart-loss .keys button').click()")
        assert page.ask(lines) == 1, "each logged step and the mean are hidden together"
        page.ask("document.querySelector('#chart-loss .keys button').click()")
        ticks = (
            "[...document.querySelectorAll('#chart-loss text')].map((text) =>"
            " text.textContent).join()"
        )
        whole = page.ask(ticks)
        mouse("mousePressed", "loss", 0.4, button="left", clickCount=1)
        mouse("mouseMoved", "loss", 0.5, button="left")
        mouse("mouseReleased", "loss", 0.5, button="left", clickCount=1)
        assert "250,255,260" in page.ask(ticks)
        page.ask(
            "document.querySelector('#chart-loss .figure').dispatchEvent(new"
            " MouseEvent('dblclick')) && 0"
        )
        assert page.ask(ticks) == whole
        for event, widths in (("beforeprint", range(500, 720)), ("afterprint", range(900, 1240))):
            page.ask(f"dispatchEvent(new Event('{event}')) && 0")
            assert page.ask("document.querySelector('#chart-loss .figure').clientWidth") in widths
        assert page.complaints == []


def test_a_figure_answers_the_keyboard(pages: dict[str, Path]) -> None:
    with Page() as page:
        page.open(pages["rich"].as_uri())
        focused = "document.activeElement.closest('.plot')"
        page.ask("document.querySelector('#chart-ranks .figure').focus()")

        def press(key: str) -> str:
            page._call("Input.dispatchKeyEvent", type="keyDown", key=key)
            return str(page.ask(f"{focused}.querySelector('.tip').innerText"))

        assert re.search(r"step \d+\s+rank 2: 1", before := press("ArrowRight"))
        assert re.search(r"step \d+\s+rank 1: 1", press("ArrowUp"))
        press("ArrowDown")
        assert press("ArrowLeft") != before
        steps = f"[...{focused}.querySelectorAll('text')].map((text) => text.textContent).join()"
        whole = page.ask(steps)
        press("+")
        assert page.ask(steps) != whole, (
            "a part is enlarged, and the figure drawn anew has the focus"
        )
        press("Escape")
        assert page.ask(steps) == whole
        assert page.complaints == []


def test_the_page_of_a_long_and_wide_run_is_small_and_draws(tmp_path: Path) -> None:
    """100,000 logged steps of 64 ranks."""
    run = read_run(write_run(tmp_path / "run", ranks=64).path)
    run.rows = [
        {**run.rows[i * len(run.rows) // 100_000], "step": i, "time": BEGUN + i}
        for i in range(100_000)
    ]
    write(render(page_data([run])), target := tmp_path / "report.html")
    assert 200_000 < target.stat().st_size < 1_000_000
    with Page(390) as page:
        page.open(target.as_uri())
        only_itself(page, target.as_uri())
        assert page.ask(NOT_DRAWN) == []
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")


def test_ticks_are_few_and_plain_numbers(pages: dict[str, Path]) -> None:
    with Page() as page:
        page.open(pages["crashed"].as_uri())
        assert page.ask("ticksOf(0.5, 50, 5, true)") == [0.5, 1, 2, 5, 10, 20, 50]
        assert page.ask("ticksOf(1e-4, 1e3, 5, true)") == [1e-4, 1e-3, 0.01, 0.1, 1, 10, 100, 1000]
        assert page.ask("ticksOf(0.5, 2, 5, true)") == [0.5, 1, 1.5, 2]
        assert page.ask("ticksOf(0, 38, 5, false)") == [0, 10, 20, 30]
        assert (
            page.ask("ticksOf(0.0029, 0.0031, 5, false).map((tick) => spelled(tick, {}))")[0]
            == "0.0029"
        )
        assert page.ask("spelled(0.0237, {percent: true})") == "2.37%"
        assert page.ask("spelled(1638400, {unit: '/s'})") == "1.638 M/s"


def test_a_request_would_be_noticed(tmp_path: Path) -> None:
    """The watch itself: a page that asks for something, or throws, is caught."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<html data-drawn=1><img src='http://127.0.0.1:9/x.png'><script>console.error('oh'); throw"
        " Error('no')</script>"
    )
    with Page() as page:
        page.open(bad.as_uri())
        page.settle()
        assert any("x.png" in asked for asked in page.requests)
        assert json.dumps(page.complaints).count("oh") == 1
        assert any("no" in said for said in page.complaints)
