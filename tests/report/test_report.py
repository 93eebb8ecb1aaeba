"""What the report reads, says and advises; the drawing is looked at in `test_browser`."""

import http.client
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.errors import UsageError
from lockstep.report import units
from lockstep.report.advice import advise
from lockstep.report.page import make_server, page_data, render
from lockstep.report.read import read_run, smoothed, thinned, typical_step
from lockstep.run_directory.records import append_line
from tests.report.shared import BEGUN, write_run


def found(path: Path) -> str:
    return "\n".join(
        f"{advice.found} {advice.do} {advice.evidence}" for advice in advise(read_run(path))
    )


def test_a_run_is_read_with_its_restart(tmp_path: Path) -> None:
    write_run(tmp_path / "run", killed_at=268)
    run = read_run(tmp_path / "run")
    assert run.status == "done"
    steps, losses = run.series("loss")
    assert steps == sorted(set(steps)), "each step once"
    assert len(losses) == 300
    assert [row["step"] for row in run.evaluations] == [100, 200, 300, 400, 500, 600]
    assert typical_step(run) == pytest.approx(0.083, abs=0.005)
    data = page_data([run])
    assert {c["id"] for c in data["charts"]} >= {
        "loss",
        "throughput",
        "phases",
        "time",
        "ranks",
        "memory",
        "timeline",
    }
    assert data["charts"][0]["rulers"] == [{"x": 200}], "the restart is marked"


def test_numbers_have_three_digits_and_no_exponent() -> None:
    assert units.size(1010 * 2**20) == "1010 MiB"
    assert units.size(1.5 * 2**30) == "1.5 GiB"
    assert units.seconds(0.9996) == "1000 ms"
    assert units.seconds(0.0123) == "12.3 ms"
    assert units.count(999.6e6) == "1000 M"


def test_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(UsageError, match="port 70000 can't be used on this machine"):
        make_server([tmp_path / "run"], 70000)


def test_a_loop_of_ones_own_that_logs_has_not_crashed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50, ends=False)
    run.events.unlink()
    run.config.unlink()
    run.metrics.write_text('{"step": 50, "accuracy": 0.5, "time": 1.0}\n')
    assert read_run(run.path).status == "done"


def test_a_crashed_run_says_how_to_go_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=150, ends=False)
    with run.metrics.open("a") as file:
        file.write('{"step": 151, "loss": 2.')  # killed while it wrote
    assert read_run(run.path).status == "crashed"
    assert read_run(run.path, now=BEGUN + 20).status == "running"
    said = found(run.path)
    assert f"--output-dir {run.path} --resume auto" in said
    assert "the newest checkpoint is of step 100" in said


def test_advice_comes_with_its_evidence(tmp_path: Path) -> None:
    write_run(tmp_path / "slow", data=0.015)
    said = found(tmp_path / "slow")
    assert "waits for data. Raise data.num_workers" in said
    assert "data.num_workers is 0" in said
    assert "Rank 2 on node1 keeps the others waiting, with forward and backward" in said
    assert "step 360" in said
    quick = write_run(tmp_path / "quick", data=0.0005, slow_from=None, **{"data.num_workers": 4})
    assert "waits for data" not in found(quick.path)
    assert "keeps the others waiting" not in found(quick.path)
    append_line(
        quick.events,
        {"kind": "sink_failed", "time": BEGUN, "sink": "the sink wandb", "reason": "away"},
    )
    append_line(quick.events, {"kind": "stop", "time": BEGUN + 99, "step": 600, "reason": "done"})
    assert "The sink wandb failed" in found(quick.path)


def test_advice_on_data_workers_is_about_the_loader_that_was_read(tmp_path: Path) -> None:
    """A script's own DataLoader has its own number of workers, whatever the config says."""
    write_run(tmp_path / "loader", data=0.015, data_workers=3)
    assert "Raise num_workers of the DataLoader, which is 3" in found(tmp_path / "loader")
    write_run(tmp_path / "config", data=0.015, data_workers=2, **{"data.num_workers": 2})
    assert "Raise data.num_workers above 2" in found(tmp_path / "config")


@pytest.mark.parametrize(
    ("sizes", "fits", "does_not"),
    [
        (
            {"replicate": 4},
            ["gradient_accumulation_steps", "ddp.compression"],
            ["fsdp.", "pipeline"],
        ),
        (
            {"shard": 4},
            ["fsdp.accumulate: unsharded", "hybrid_shard"],
            ["ddp.", "gradient_accumulation"],
        ),
        ({"shard": 2, "replicate": 2}, ["fsdp.accumulate: unsharded"], ["ddp.", "hybrid_shard"]),
        ({"pipeline": 4}, ["the pipeline more micro-batches"], ["ddp.", "fsdp."]),
        ({"pipeline": 2, "replicate": 2}, ["the pipeline more micro-batches"], ["ddp.", "fsdp."]),
        ({"tensor": 4}, ["within a host"], ["ddp.", "fsdp.", "pipeline"]),
    ],
)
def test_advice_on_waiting_is_about_the_runs_own_axes(
    tmp_path: Path, sizes: dict[str, int], fits: list[str], does_not: list[str]
) -> None:
    run = write_run(tmp_path / "run", steps=40, slow_from=None)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in rows:
        row.get("phases", {})["communication"] = [0.03, 0.03, 0.03, 0]
    run.metrics.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    events[0]["sizes"] = sizes
    run.events.write_text("\n".join(json.dumps(event) for event in events) + "\n")
    (said,) = [
        advice.do
        for advice in advise(read_run(run.path))
        if "waits for other ranks" in advice.found
    ]
    assert all(word in said for word in fits), said
    assert not any(word in said for word in does_not), said


@pytest.mark.parametrize(
    ("cores", "threads", "said"), [(2, 1, "at most 2 ranks"), (8, 4, "OMP_NUM_THREADS=2")]
)
def test_cores_that_ranks_share_are_named(
    tmp_path: Path, cores: int, threads: int, said: str
) -> None:
    run = write_run(tmp_path / "run", steps=40)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    events[0]["ranks"] = [
        {
            "rank": rank,
            "host": "laptop",
            "device": f"CPU, {threads} threads",
            "cores": cores,
            "threads": threads,
        }
        for rank in range(4)
    ]
    run.events.write_text("\n".join(json.dumps(event) for event in events) + "\n")
    text = found(run.path)
    assert f"laptop has {cores} cores for {4 * threads} threads of 4 ranks" in text
    assert said in text
    assert "waits for other ranks" not in text
    events[0]["ranks"] = events[0]["ranks"][: cores // threads]
    run.events.write_text("\n".join(json.dumps(event) for event in events) + "\n")
    assert "take turns" not in found(run.path)


def test_overfitting_and_numbers_that_are_none_are_seen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=200)
    for step, loss in ((300, 1.5), (400, 1.7), (500, 2.0)):
        append_line(run.metrics, {"step": step, "eval_loss": loss, "time": BEGUN})
    append_line(
        run.metrics, {"step": 501, "loss": "nan", "time": BEGUN, "lr": 0.0, "step_seconds": 0.05}
    )
    said = found(run.path)
    assert "has risen since step 300" in said
    assert "The loss was not a number at step 501" in said
    json.dumps(page_data([read_run(run.path)]), allow_nan=False)


def test_several_runs_are_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=200)
    write_run(tmp_path / "b", steps=200, seed=1, **{"training.learning_rate": 0.5})
    data = page_data([read_run(tmp_path / name) for name in "ab"])
    by_title = {table["title"]: table for table in data["tables"]}
    assert [row[0] for row in by_title["The runs side by side"]["rows"]] == ["a", "b"]
    assert ["training.learning_rate", "0.001", "0.5"] in by_title["Where the configs differ"][
        "rows"
    ]
    loss = next(chart for chart in data["charts"] if chart["id"] == "loss")
    assert {"a", "b"} <= {mark["name"] for mark in loss["marks"]}


def test_the_page_holds_all_that_it_needs(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=60, ranks=1)
    text = render(page_data([read_run(tmp_path / "run")]))
    assert "<!--" not in text.partition("<script>")[0], "every place is filled"
    assert "default-src 'none'" in text
    assert "connect-src 'none'" in text
    for tag in ("<script src", '<link rel="stylesheet', "@import", "<iframe", "<img "):
        assert tag not in text.replace(text[text.index("<script>") : text.rindex("<script>")], "")


def test_the_command_writes_the_page_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=60, ranks=1, ends=False)
    script = (
        "import sys; from lockstep.cli import main; code = main(sys.argv[1:]);"
        " assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "report", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "run: crashed, 59 steps" in done.stdout
    assert "--resume auto" in done.stdout
    assert (tmp_path / "run/report.html").stat().st_size < 200_000
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        with pytest.raises(UsageError, match="is not a run directory"):
            read_run(tmp_path / name)
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_live_is_for_this_machine_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20, ranks=1)
    server = make_server([run.path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert server.server_address[0] == "127.0.0.1"

        def get(path: str, host: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(
                "127.0.0.1", server.server_address[1], timeout=100
            )
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read()

        mine = f"127.0.0.1:{server.server_address[1]}"
        code, body = get("/data.json", mine)
        assert (code, json.loads(body)["title"]) == (200, "run")
        assert get("/data.json", "evil.example:80")[0] == 403, (
            "a name that was made to point here reads nothing"
        )
        assert get("/../config.yaml", mine)[0] == 404
    finally:
        server.shutdown()
        server.server_close()


def test_long_series_keep_their_peaks() -> None:
    values: list[float | None] = [1.0] * 100_000
    values[54_321] = 9.0
    values[70_000] = None
    kept = thinned(values, 1000)
    assert len(kept) <= 1000
    assert 54_321 in kept
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert smoothed([1.0, None, 1.0], 5)[0] == pytest.approx(1.0)
    assert smoothed([1.0, None, 1.0], 5)[1] is None
    ramp = [float(i) for i in range(101)]
    assert smoothed(list(ramp), 10)[50] == pytest.approx(50.0), "it does not trail behind"
