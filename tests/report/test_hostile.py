"""A stranger's run directory: whatever is in it, the page is made, says what it left out, and
nothing else happens.
"""

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.report.page import page_data, render
from lockstep.report.read import read_run
from lockstep.report.sketch import sketch
from lockstep.run_directory.records import RunDirectory, append_line, read_lines
from lockstep.run_directory.run_files import FILE_BYTES, LINE_BYTES
from tests.report.shared import write_run

SECRET = "hunter2"
FILES = ("metrics.jsonl", "events.jsonl", "config.yaml", "ranks.json", "profile/summary.json")
DEEP = "[" * 100_000
BOMB = "a0: &a0 [x, x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))
# each in another of the files in the quick run, all in all of them in `full`
TEXTS = {
    "a loss of great depth": f'{{"step": 1, "time": 1, "loss": {DEEP}',
    "keys of great depth": '{"a":' * 100_000,
    "aliases": BOMB,
    "zeros": "\0" * 99,
    "depth": DEEP,
}
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = write_run(tmp_path / "run", steps=40)
    made.write_ranks({"step": [0.1] * 4, "data": [0.01] * 4}, 40)
    (made.path / "profile").mkdir()
    (made.path / "profile" / "summary.json").write_text(json.dumps({"about": "Steps", "ranks": []}))
    return made


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    """Nothing waits: a test ends within a minute, where a pipe would have it wait for ever."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def page_of(path: Path) -> dict[str, Any]:
    """The page's data, once every reader has looked at the folder."""
    found = read_run(path)
    assert sketch(found)
    data = page_data([found])
    assert render(data)
    for command in (
        ("report", str(path), "-o", str(path.parent / "page.html")),
        ("top", "--once", str(path)),
    ):
        assert cli.main(command) == 0
    return data


def replaced(run: RunDirectory, name: str, make: Callable[[Path], object]) -> None:
    (run.path / name).unlink(missing_ok=True)
    make(run.path / name)


@pytest.mark.fault(
    "hostile: links in a run directory",
    "`config.yaml`, `metrics.jsonl`, `media/` or an image in it is a link to a file of the"
    " reader's",
    "not followed: nothing of the file is in the page, which says what it left out",
)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.promise("No other link in it is followed, neither to read nor to write.")
def test_links_are_not_followed(run: RunDirectory, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    row = {
        "step": 1,
        "time": 1.0,
        "loss": 1.0,
        "kind": "start",
        "layout": SECRET,
        "about": SECRET,
        SECRET: 1.0,
    }
    secret.write_text(json.dumps(row) + "\n")
    replaced(run, name, lambda path: path.symlink_to(secret))
    data = page_of(run.path)
    assert SECRET not in json.dumps(data)
    if name != "ranks.json":  # which `top` alone reads, as if it were not there
        assert f"{name} is a link, or in one" in data["not_read"]


def test_a_folder_that_is_a_link_is_not_followed(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "private"
    elsewhere.mkdir()
    (elsewhere / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + SECRET.encode())
    (elsewhere / "summary.json").write_text(json.dumps({"about": SECRET}))
    for name in ("a", "b"):
        media = {name: {"kind": "image", "file": "media/1.png", "size": [1, 1]}}
        append_line(run.metrics, {"step": 1, "time": 1.0, "media": media})
    (run.path / "profile" / "summary.json").unlink()
    (run.path / "profile").rmdir()
    (run.path / "profile").symlink_to(elsewhere)
    run.media.symlink_to(elsewhere)
    data = page_of(run.path)
    assert "profile/summary.json is a link, or in one" in data["not_read"]
    assert SECRET not in json.dumps(data)
    assert not [item for shown in data["samples"] for item in shown["items"]]
    run.media.unlink()
    run.media.mkdir()
    (run.media / "1.png").symlink_to(elsewhere / "1.png")
    assert not [item for shown in page_of(run.path)["samples"] for item in shown["items"]]


@pytest.mark.promise("The folder itself may be a link")
def test_a_run_directory_may_be_a_link_itself(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path)
    assert page_of(tmp_path / "runs" / "run")["not_read"] == []


@pytest.mark.fault(
    "hostile: pipes and devices in a run directory",
    "opening or reading one would wait for ever, or have no end",
    "left out, at once, by `report` and `top`",
)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.promise("Only ordinary files are read")
def test_pipes_are_not_opened(run: RunDirectory, name: str) -> None:
    replaced(run, name, os.mkfifo)
    data = page_of(run.path)
    if name != "ranks.json":
        assert f"{name} is not an ordinary file" in data["not_read"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("name", FILES)
def test_devices_are_not_read(run: RunDirectory, name: str) -> None:
    try:
        # /dev/zero
        replaced(run, name, lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)))
    except PermissionError:
        pytest.skip("this container makes no devices")
    page_of(run.path)


@pytest.mark.fault(
    "hostile: records of great depth, aliases that stand for billions, lines without end",
    "100,000 brackets, a YAML bomb, a file of many gigabytes without a line break",
    "left out, in little memory; the page is made of what is left, and says so",
)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            name, text, id=f"{name}, {what}", marks=() if at == place else pytest.mark.full
        )
        for at, name in enumerate(FILES)
        for place, (what, text) in enumerate(TEXTS.items())
    ],
)
@pytest.mark.promise("of a record only so many levels")
def test_depth_and_aliases(run: RunDirectory, name: str, text: str) -> None:
    (run.path / name).write_text(
        text + "\n" + (run.path / name).read_text() if name.endswith("l") else text
    )
    data = page_of(run.path)
    if name == "config.yaml":
        assert any("config.yaml" in note for note in data["not_read"])


@pytest.mark.promise("lines of gigabytes cost seconds and little memory.")
@pytest.mark.parametrize("part", [16, pytest.param(4, marks=pytest.mark.full)])
def test_a_line_without_end(run: RunDirectory, part: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with run.metrics.open("ab") as file:
        file.truncate(run.metrics.stat().st_size + FILE_BYTES // part)
    data = page_data([read_run(run.path)])
    assert any(
        f"lines of metrics.jsonl that have more than {LINE_BYTES:,} bytes" in note
        for note in data["not_read"]
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    assert data["charts"]


@pytest.mark.parametrize("said", [{}, {"reason": ""}, {"reason": "\n"}])
def test_a_restart_that_gives_no_reason_is_on_the_page(
    run: RunDirectory, said: dict[str, str]
) -> None:
    run.append_event("restart", left=1, **said)
    assert "The ranks were restarted once" in str(page_of(run.path))


@pytest.mark.fault(
    "hostile: escapes of terminals in records",
    "names of hosts, layouts or events that would move the cursor, or write into the clipboard",
    "printed as `\\x1b`, by `top`, `report` and `checkpoint`, and in every error",
)
@pytest.mark.promise("in the terminal, control characters are shown as `\\x1b`.")
def test_no_escape_reaches_the_terminal(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [{"rank": 0, "host": ESCAPES, "device": ESCAPES}]
    run.append_event("start", layout=ESCAPES, ranks=ranks, total_steps=40, lines=[ESCAPES])
    run.append_event("restart", reason=ESCAPES, left=1)
    run.append_event("straggler", host=ESCAPES, phase=ESCAPES, text=ESCAPES, rank=0, step=3)
    strange = run.path.with_name(f"run{ESCAPES[:4]}")
    os.rename(run.path, strange)
    page_of(strange)
    assert cli.main(["report", str(strange / "none\x1b[2J")]) == 2
    shown = "".join(capsys.readouterr())
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown)
    assert r"\x1b[2J" in shown


JUNK: tuple[Any, ...] = (
    None,
    True,
    "nan",
    "text",
    "\ud800",
    -1,
    0,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [1],
    [[1, 2], [3]],
    {"a": 1},
    ["x"] * 4,
    [None] * 4,
    [1.0] * 4,
    {"x": [1, 2, 3, 4]},
    [{"rank": "x"}],
    [{}],
    2**63,
    "9" * 5000,
)


@pytest.mark.fault(
    "hostile: records with anything in the place of a number",
    "texts, lists, NaN, numbers of 400 digits, where figures, steps, dates and names belong; bytes"
    " that are no UTF-8",
    "what does not fit is left out; the page is made",
)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.promise(
    "What does not fit, such as a text where a number belongs, is left out. The page is made all"
    " the same"
)
def test_anything_in_the_place_of_anything(run: RunDirectory, seed: int) -> None:
    """Each round, a tenth of the values at any place of the records is replaced."""
    noise = random.Random(seed)
    files = [run.metrics, run.events]
    original = {path: [*read_lines(path)] for path in files}
    profile = {
        "about": "",
        "verdict": "",
        "memory": [[0.0, 1.0]],
        "ranks": [{"rank": 0, "shares": {"idle": 0.1}}],
        "operators": [{"name": "mm", "seconds": 1.0, "share": 0.1, "calls": 2.0}],
    }

    def mutated(value: Any) -> Any:
        if noise.random() < 0.1:
            return noise.choice(JUNK)
        if isinstance(value, dict):
            return {key: mutated(inside) for key, inside in value.items()}
        return [mutated(inside) for inside in value] if isinstance(value, list) else value

    for _ in range(12):
        for path in files:
            path.write_text("\n".join(json.dumps(mutated(row)) for row in original[path]) + "\n")
            with path.open("ab") as file:
                file.write(
                    b'\xff\xfe{"step": 3}\n{"step": 4, "time": 1, "kind": "\xff", "loss":'
                    b' 1}\n{"broken'
                )
        (run.path / "profile" / "summary.json").write_text(json.dumps(mutated(profile)))
        (run.path / "ranks.json").write_text(
            json.dumps(mutated({"step": [0.1] * 4, "data": [0.01] * 4, "peak": [1]}))
        )
        page_of(run.path)


@pytest.mark.fault(
    "hostile: names that a report writes are links",
    "`report.html`, or a temporary name that could be guessed, is a link to a file of the reader's",
    "the file is untouched: temporary names can't be guessed, and only an earlier page is replaced",
)
@pytest.mark.promise("No other link in it is followed, neither to read nor to write.")
@pytest.mark.promise("Temporary files have names that nobody can guess.")
def test_nothing_is_written_through_a_link(run: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in (".report.html.tmp", ".index.html.tmp", ".ranks.json.tmp", "metrics.jsonl.tmp"):
        (run.path / name).symlink_to(mine)
    assert cli.main(["report", str(run.path)]) == 0
    assert cli.main(["report", str(run.path)]) == 0, "an earlier page is replaced"
    run.write_ranks({"step": [0.1]}, 1)
    run.drop_after(10)
    (run.path / "report.html").unlink()
    (run.path / "report.html").symlink_to(mine)
    assert cli.main(["report", str(run.path)]) == 2
    assert "exists already" in capsys.readouterr().err
    os.utime(run.metrics)
    assert cli.main(["report", str(tmp_path)]) == 0, "one folder does not stop the page of all"
    assert mine.read_text() == "mine"
    for name in ("metrics.jsonl", "events.jsonl"):
        replaced(run, name, lambda path: path.symlink_to(mine))
        with pytest.raises(OSError, match=r"Too many levels|ordinary"):
            append_line(run.path / name, {"step": 1})
    assert mine.read_text() == "mine"


@pytest.mark.promise("Nothing that exists is written over, except what Lockstep itself wrote")
def test_what_a_user_names_is_not_written_over(
    run: RunDirectory, tmp_path: Path, capsys: Any
) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    assert cli.main(["report", str(run.path), "-o", str(mine)]) == 2
    assert "mine.html exists already" in capsys.readouterr().err
    assert mine.read_text() == "mine"
