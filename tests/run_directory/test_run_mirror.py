"""A run whose directory is a bucket: another machine with an empty disk goes on with it."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import checkpoint, cli
from lockstep.checkpoint import ObjectStorage
from lockstep.errors import RunError, UsageError
from lockstep.files.object_client import ObjectClient
from lockstep.run_directory import run_mirror
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_lock import Holder
from lockstep.run_directory.run_mirror import Claim, RunMirror, local_folder
from tests import bucket
from tests.bucket import Proxy
from tests.faults.tiny import Points, trainer
from tests.ranks import REPOSITORY

bucket.require_servers()


def train(url: str, steps: int) -> str:
    """Train in the current folder; return the digest of the model."""
    few = {"save_steps": 100}  # the last step is saved in any case
    run = trainer(url, training={"max_steps": steps}, checkpoint=few)  # type: ignore[arg-type]
    run.train(Points())
    newest = checkpoint.newest(ObjectStorage(url))
    assert newest is not None
    return checkpoint.digest(newest)


def rows(url: str, name: str) -> list[dict[str, Any]]:
    text = ObjectClient(url).get(f"records/{name}")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.fault(
    "storage: in a bucket: the machine of a run is gone for good",
    "`--output-dir` is a bucket; another machine with an empty disk resumes",
    "checkpoints, metrics, events and config are in the bucket; the run goes on there and ends in"
    " the bits of a run without interruption; each step is recorded once",
)
def test_another_machine_with_an_empty_disk_goes_on(
    bucket_proxy: Proxy,
    bucket_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machines = [tmp_path / name for name in ("first", "second", "straight")]
    for machine in machines:
        machine.mkdir()
    monkeypatch.chdir(machines[0])
    train(bucket_url, 5)
    monkeypatch.chdir(machines[1])
    digest = train(bucket_url, 12)
    assert [row["step"] for row in rows(bucket_url, "metrics.jsonl")] == list(range(1, 13))
    kinds = [event["kind"] for event in rows(bucket_url, "events.jsonl")]
    assert kinds.count("start") == 2
    assert kinds.count("stop") == 2
    assert f"url: {bucket_url}" in ObjectClient(bucket_url).get("records/config.yaml").decode()
    assert local_folder(bucket_url).is_dir()
    assert not (local_folder(bucket_url) / "checkpoints").exists()

    monkeypatch.chdir(machines[2])
    straight = trainer(Path("run"))
    straight.train(Points())
    assert checkpoint.digest("run/checkpoints/step-00000012") == digest

    capsys.readouterr()
    assert cli.main(["report", bucket_url]) == 0
    assert f"lockstep: {bucket_url}/records/report.html" in capsys.readouterr().out
    assert b"<html" in ObjectClient(bucket_url).get("records/report.html")
    assert cli.main(["report", f"{bucket_url}-empty"]) == 2
    assert f"there is no run in {bucket_url}-empty" in capsys.readouterr().err
    assert cli.main(["report", bucket_url, "-o", "page.html"]) == 0
    assert Path("page.html").exists()
    for command in ("list", "verify", "inspect"):
        assert cli.main(["checkpoint", command, bucket_url]) == 0
    assert "step-00000012: whole" in capsys.readouterr().out
    assert cli.main(["checkpoint", "digest", f"{bucket_url}/step-00000012"]) == 0
    assert digest in capsys.readouterr().out
    assert cli.main(["checkpoint", "export", bucket_url, "--output", "model.safetensors"]) == 0
    assert sorted(path.name for path in machines[2].iterdir()) == [
        "model.safetensors",
        "page.html",
        "run",
    ]


@pytest.mark.full
def test_a_run_goes_on_from_the_bucket_of_another(
    bucket_proxy: Proxy,
    bucket_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run that is named, and one of its checkpoints; the other run is left as it is."""
    monkeypatch.chdir(tmp_path)
    train(bucket_url, 6)
    there = ObjectClient(bucket_url).below("")
    digests = []
    for place in (bucket_url, f"{bucket_url}/step-00000006"):
        folder = tmp_path / f"from-{len(digests)}"
        run = trainer(folder, checkpoint={"resume": place})
        run.train(Points())
        resumed = RunDirectory(folder).read_events()
        assert [e["step"] for e in resumed if e["kind"] == "resume"] == [6]
        digests.append(checkpoint.digest(folder / "checkpoints/step-00000012"))
    straight = trainer(tmp_path / "straight")
    straight.train(Points())
    digests.append(checkpoint.digest(tmp_path / "straight/checkpoints/step-00000012"))
    assert len(set(digests)) == 1
    assert ObjectClient(bucket_url).below("") == there

    for missing in (f"{bucket_url}-empty", f"{bucket_url}/step-00000007"):
        with pytest.raises(UsageError, match=f"there is no checkpoint in {missing}"):
            trainer(tmp_path / "none", checkpoint={"resume": missing}).train(Points())
    (tmp_path / "train.yaml").write_text(CONFIG)
    bucket_proxy.plan = lambda request: (403, "<Error><Code>AccessDenied</Code></Error>")
    # a fork of this process, whose obstore has threads, would wait for them for ever
    monkeypatch.setattr("lockstep.launch.refusals.run_apart", lambda work, _about: work())
    capsys.readouterr()
    assert cli.main(["train", "train.yaml", "--output-dir", "refused", "--resume", bucket_url]) == 2
    assert "these credentials lack a right" in capsys.readouterr().err
    assert not (tmp_path / "refused" / "logs").exists()


CONFIG = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "tests.faults.tiny:Points"}
training: {batch_size: 4, global_batch_size: 8}
distributed: {device: cpu, strategy: ddp}
checkpoint: {save_steps: 2}
monitor: {log_steps: 1, sinks: [jsonl]}
"""


def launched(folder: Path, url: str, steps: int) -> subprocess.Popen[str]:
    """`lockstep train` on two ranks, in a folder of its own."""
    folder.mkdir()
    (folder / "train.yaml").write_text(CONFIG)
    options = ["--output-dir", url, "--nproc-per-node", "2", f"training.max_steps={steps}"]
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", "train.yaml", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_launch_that_is_killed_whole_goes_on_elsewhere(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    run = launched(tmp_path / "first", bucket_url, 1_000_000)
    storage = ObjectStorage(bucket_url)
    while len(storage.names()) < 2:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.2)
    everything = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    for process in everything:
        process.kill()
    run.wait()
    assert run.stdout is not None
    run.stdout.close()
    reached = checkpoint.step_of(storage.names()[-1])
    assert reached is not None

    steps = reached + 5
    again = launched(tmp_path / "second", bucket_url, steps)
    said = again.communicate()[0]
    assert again.returncode == 0, said
    resumed = [e for e in rows(bucket_url, "events.jsonl") if e["kind"] == "resume"]
    assert [event["step"] for event in resumed] == [reached]
    recorded = [row["step"] for row in rows(bucket_url, "metrics.jsonl")]
    assert recorded == list(range(1, steps + 1))
    logs = ObjectClient(bucket_url).below("records/logs")
    assert "records/logs/rank-1.log" in logs

    straight = launched(tmp_path / "straight", f"{bucket_url}-straight", steps)
    assert straight.wait() == 0
    newest = [
        checkpoint.newest(ObjectStorage(url)) for url in (bucket_url, f"{bucket_url}-straight")
    ]
    digests = {checkpoint.digest(path) for path in newest if path is not None}
    assert len(newest) == 2
    assert len(digests) == 1


def mirror_of(url: str, folder: Path) -> RunMirror:
    folder.mkdir(exist_ok=True)
    return RunMirror(ObjectClient(url), folder)


def test_files_that_grow_are_cut_or_go_are_the_same_there(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only parts that have changed are sent."""
    monkeypatch.setattr(run_mirror, "PART_BYTES", 4)
    here = mirror_of(bucket_url, tmp_path / "here")
    folder = tmp_path / "here"
    (folder / "logs").mkdir()
    (folder / "checkpoints/x").mkdir(parents=True)
    (folder / "checkpoints/x/file").write_bytes(b"not copied")
    (folder / "lock.json").write_bytes(b"not copied")
    (folder / "secret").symlink_to("/etc/passwd")
    (folder / "logs/rank-0.log").write_bytes(b"")

    def pushed(content: bytes) -> list[str]:
        (folder / "metrics.jsonl").write_bytes(content)
        bucket_proxy.reset()
        here.push()
        sent = [request for request in bucket_proxy.requests if request.method == "PUT"]
        there = tmp_path / f"there-{len(content)}-{content[:1].decode()}"
        assert mirror_of(bucket_url, there).fetch()
        found = {path.name: path.read_bytes() for path in there.rglob("*") if path.is_file()}
        assert found == {"metrics.jsonl": content, "rank-0.log": b""}
        return [request.target.rpartition("/")[2] for request in sent]

    assert pushed(b"abcdefghij") == [
        "metrics.jsonl",
        "metrics.jsonl.part-00001",
        "metrics.jsonl.part-00002",
        "rank-0.log",
    ]
    assert pushed(b"abcdefghijklm") == ["metrics.jsonl.part-00002", "metrics.jsonl.part-00003"]
    assert pushed(b"abcdef") == ["metrics.jsonl.part-00001"]
    assert pushed(b"") == ["metrics.jsonl"]
    bucket_proxy.reset()
    here.push()
    assert not [request for request in bucket_proxy.requests if request.method == "PUT"]


def test_a_copy_that_goes_on_is_kept_and_an_old_one_is_replaced(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    client = ObjectClient(bucket_url)
    client.put("records/metrics.jsonl", b"1\n2\n")
    client.put("records/events.jsonl", b"new\n")
    client.put("records/logs/rank-0.log", b"of another machine")
    folder = tmp_path / "here"
    here = mirror_of(bucket_url, folder)
    (folder / "logs").mkdir()
    (folder / "metrics.jsonl").write_bytes(b"1\n2\n3\n")
    (folder / "events.jsonl").write_bytes(b"old\n")
    (folder / "logs/rank-0.log").write_bytes(b"open")
    here.fetch()
    assert (folder / "metrics.jsonl").read_bytes() == b"1\n2\n3\n"
    assert (folder / "events.jsonl").read_bytes() == b"new\n"
    assert (folder / "logs/rank-0.log").read_bytes() == b"open"


def test_names_that_lead_out_of_the_folder_are_left_out() -> None:
    """The bucket may be a stranger's."""
    keys = ("records/../x", "records//x", "records/lock.json", "records/checkpoints/x", "records/a")
    assert run_mirror._files(dict.fromkeys(keys, 0.0)) == {"a": ["records/a"]}


@pytest.mark.fault(
    "storage: in a bucket: two machines run in one prefix",
    "the first one lives, or is gone without a word",
    "the second one is told who writes there; it takes the place of a dead one after 45 s",
)
def test_one_writer_at_a_time(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ObjectClient(bucket_url)
    said: list[str] = []

    def claim() -> Claim:
        return Claim(client, said.append)

    monkeypatch.setattr(run_mirror, "_LOOK", 0.05)
    monkeypatch.setattr(run_mirror, "BEAT_SECONDS", 0.05)
    mine = claim()
    mine.acquire()
    elsewhere = replace(Holder.this_process(), machine="another", host="another-host", token="x")

    # another machine believed this one to be dead
    client.put_new("claims/00000002", run_mirror._as_json(elsewhere))
    assert mine._thread is not None
    mine._thread.join(100)
    with pytest.raises(RunError, match=r"another run has taken over .*another-host"):
        mine.check()

    # it lives
    ended = threading.Event()

    def live() -> None:
        beat = 0
        while not ended.wait(0.02):
            beat += 1
            client.put("claims/00000002", run_mirror._as_json(replace(elsewhere, beat=beat)))

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(UsageError, match=r"another run is writing to .*another-host"):
        claim().acquire()
    ended.set()
    thread.join()
    assert len(said) == 1

    # it is dead
    monkeypatch.setattr(run_mirror, "PATIENCE", 0.2)
    third = claim()
    third.acquire()
    assert third._keys() == ["claims/00000003"]
    third.release()
    monkeypatch.setattr(run_mirror, "PATIENCE", 3600.0)  # one that was released is not waited for
    fourth = claim()
    fourth.acquire()
    fourth.release()


@pytest.mark.fault(
    "storage: in a bucket: the service is down while a run records",
    "records can't be copied, then they can",
    "training goes on; the next copy has everything; one that fails at the end is a warning that"
    " names the folder of this machine",
)
def test_a_service_that_is_down_stops_no_step(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    client = ObjectClient(bucket_url, retry_seconds=0.2)
    here = RunMirror(client, tmp_path, said.append)
    here.acquire()
    (tmp_path / "metrics.jsonl").write_bytes(b"1\n")
    bucket_proxy.plan = lambda request: "drop"
    here.push_or_say()
    assert [str(tmp_path) in line for line in said] == [True]
    bucket_proxy.reset()
    here.push_or_say()
    assert client.get("records/metrics.jsonl") == b"1\n"
    here.release()
    assert len(said) == 1
