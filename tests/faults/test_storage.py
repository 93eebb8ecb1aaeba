"""Storage that refuses, for a while or for good, while a run trains."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import AsyncSaver, commit
from lockstep.errors import RunError, UsageError
from tests.faults.tiny import Points, events, steps, trainer
from tests.launch.conftest import Launch, launch  # noqa: F401
from tests.launch.shared import script, wait_for
from tests.ranks import run_ranks

BOTH = pytest.mark.parametrize("in_background", [True, False], ids=["async", "sync"])


def saved(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]


@pytest.fixture
def in_the_way(tmp_path: Path) -> Path:
    """A file where the folder of checkpoints should be: every save fails, as with a mount that is
    gone.
    """
    path = tmp_path / "checkpoints"
    path.write_text("")
    return path


@BOTH
@pytest.mark.fault(
    "storage: it refuses for a moment",
    "a save fails; half a second later the storage is back",
    "the save is tried again after 0.5 s, 1 s, 2 s …, `checkpoint.retries` times, and said in"
    " events.jsonl; training went on meanwhile where the save is in the background",
)
def test_a_passing_refusal(tmp_path: Path, in_the_way: Path, in_background: bool) -> None:
    def give_way_after_a_try() -> None:
        while not events(tmp_path, "save_retry"):
            time.sleep(0.02)
        in_the_way.unlink()

    run = trainer(tmp_path, checkpoint={"save_steps": 6, "retries": 4, "async": in_background})
    threading.Thread(target=give_way_after_a_try, daemon=True).start()
    run.train(Points())
    assert saved(tmp_path) == ["step-00000006", "step-00000012"]
    assert events(tmp_path, "save_retry")
    assert not events(tmp_path, "save_failed")


@BOTH
@pytest.mark.fault(
    "storage: it refuses for long, `on_failure: continue`",
    "every try of a save fails, and a later save succeeds",
    "training goes on with a warning and an event; the next save is tried as usual; the last good"
    " checkpoint stays",
)
def test_a_long_refusal_is_survived(tmp_path: Path, in_background: bool) -> None:
    folder = tmp_path / "checkpoints"
    gone = tmp_path / "gone"
    read = 0

    class Breaking(Points):
        def __getitem__(self, index: int) -> dict[str, object]:  # type: ignore[override]
            nonlocal read
            read += 1
            if read == 3 * 8 + 1:  # the samples of the fourth step: the save of the second ends
                wait_for((folder / "step-00000002").is_dir)
                folder.rename(gone)
                folder.write_text("")
            if folder.is_file() and len(events(tmp_path, "save_failed")) >= 2:
                folder.unlink()
                gone.rename(folder)
            return super().__getitem__(index)  # type: ignore[return-value]

    run = trainer(
        tmp_path, checkpoint={"save_steps": 2, "async": in_background, "save_total_limit": 8}
    )
    run.train(Breaking())
    failed = {event["step"] for event in events(tmp_path, "save_failed")}
    assert len(failed) >= 2
    assert not {"step-00000004", "step-00000006"} & set(saved(tmp_path))
    assert {"step-00000002", "step-00000012"} <= set(saved(tmp_path))
    assert steps(tmp_path) == list(range(1, 13))


@BOTH
@pytest.mark.fault(
    "storage: it refuses for long, `on_failure: stop`",
    "every try of a save fails",
    "the run stops with exit code 1 and says what the storage said",
)
def test_stop_when_the_config_says_so(
    tmp_path: Path, in_the_way: Path, in_background: bool
) -> None:
    run = trainer(
        tmp_path, checkpoint={"save_steps": 2, "on_failure": "stop", "async": in_background}
    )
    with pytest.raises(RunError, match="the checkpoint of step 2 was not written"):
        run.train(Points(seconds=0.01))
    assert run.step.progress.step < 12


@pytest.mark.fault(
    "storage: the last save fails",
    "the storage refuses the save at the end of a run",
    "the run fails with exit code 1, whatever `on_failure` says: nothing is called done that is not"
    " on disk",
)
def test_the_last_save_must_succeed(tmp_path: Path, in_the_way: Path) -> None:
    with pytest.raises(RunError, match="the checkpoint of step 12 was not written"):
        trainer(tmp_path, checkpoint={"save_steps": 50}).train(Points())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.fault(
    "storage: the disk fills up while training",
    "there is room for some checkpoints and not for more",
    "the checkpoints that are there stay whole, nothing half-written stays, training goes on and"
    " says so",
)
def test_a_disk_that_fills_up(small_disk: Path) -> None:
    with pytest.raises(RunError, match="No space left"):  # the last one
        trainer(small_disk).train(Points())
    assert len(events(small_disk, "save_failed")) >= 2
    assert len(saved(small_disk)) >= 1
    for path in (small_disk / "checkpoints").iterdir():
        assert path.name in saved(small_disk)
        assert not checkpoint.verify(path)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.fault(
    "storage: the disk of the logs is full",
    "a rank fails for it, and its log can't take the traceback",
    "the launcher names the rank and the error as it does on an empty disk; no traceback, no second"
    " message",
)
def test_a_full_disk_does_not_hide_its_own_message(small_disk: Path, launch: Launch) -> None:  # noqa: F811
    """The log and the restart's event are on the full disk; so is the folder of the log at the
    second start.
    """
    runs = small_disk.parent / "runs"
    runs.symlink_to(small_disk)
    text = (
        "if RANK == 1:\n    with open('runs/filler', 'ab', buffering=0) as file:\n        while"
        " True:\n"
    )
    script(small_disk.parent, text + "            file.write(bytes(4096))\ntime.sleep(30)\n")
    ended = launch("--nproc-per-node", "2", "--max-restarts", "1", "script.py")
    assert ended.code == 1
    told = "rank 1 of 2 failed: OSError: [Errno 28] No space left on device"
    assert ended.err.count(told) == 2, ended.err  # once for the restart
    assert "Traceback" not in ended.err + ended.out
    assert "the whole traceback is in" not in ended.err


@pytest.mark.fault(
    "storage: a slow write",
    "a save takes longer than the steps between saves",
    "one save is under way at a time; the next waits for it, and how long is in events.jsonl",
)
def test_a_slow_write_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = commit.write_once
    wait = AsyncSaver.wait
    is_waited_for = threading.Event()

    def slowly(*args: object) -> None:
        is_waited_for.clear()
        assert is_waited_for.wait(200)
        time.sleep(0.3)
        once(*args)  # type: ignore[arg-type]

    def noted(saver: AsyncSaver) -> object:
        is_waited_for.set()
        return wait(saver)

    monkeypatch.setattr(commit, "write_once", slowly)
    monkeypatch.setattr(AsyncSaver, "wait", noted)
    trainer(tmp_path, checkpoint={"save_steps": 4}).train(Points())
    assert saved(tmp_path) == ["step-00000004", "step-00000008", "step-00000012"]
    assert max(event["waited_for_previous"] for event in events(tmp_path, "save_stall")) > 0.1


def test_the_best_is_kept(tmp_path: Path) -> None:
    """`keep_best`: the least metric's checkpoint outlives rotation, also over a restart."""
    keep = {"save_total_limit": 1, "keep_best": "loss"}
    training = {"batch_size": 4, "global_batch_size": 8, "eval_steps": None}
    run = trainer(
        tmp_path, checkpoint=keep, training=training | {"max_steps": 6, "learning_rate": 0.0}
    )
    run.train(Points())
    resumed = trainer(
        tmp_path, checkpoint=keep, training=training | {"max_steps": 12, "learning_rate": 0.3}
    )
    resumed.resume("auto")
    resumed.train(Points(huge=tuple(range(96))))
    rows = {row["step"]: row["loss"] for row in run.state.output.directory.read_metrics()}  # type: ignore[union-attr]
    best = min((2, 4, 6), key=lambda step: rows[step])
    assert saved(tmp_path) == [f"step-{best:08}", "step-00000012"]


@pytest.mark.fault(
    "configuration: `keep_best` names no metric",
    "`checkpoint.keep_best: acuracy`",
    "refused at start with exit code 2, naming the metrics there are",
)
def test_an_unknown_metric(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="acuracy"):
        trainer(tmp_path, checkpoint={"keep_best": "acuracy"}).train(Points())


@pytest.mark.fault(
    "process: a run goes back to an earlier checkpoint",
    "`--resume PATH` names an older checkpoint than the newest, or `never`",
    "later checkpoints are set aside under names from which no run resumes, later metrics are"
    " dropped: each step is there once",
)
def test_going_back(tmp_path: Path) -> None:
    trainer(tmp_path).train(Points())
    again = trainer(tmp_path)
    again.resume(str(tmp_path / "checkpoints/step-00000006"))
    assert saved(tmp_path) == [f"step-{s:08}" for s in (2, 4, 6)]
    again.train(Points())
    assert saved(tmp_path)[-1] == "step-00000012"
    assert steps(tmp_path) == list(range(1, 13))
    afresh = trainer(tmp_path)
    afresh.resume("never")
    assert saved(tmp_path) == []
    afresh.train(Points())
    assert steps(tmp_path) == list(range(1, 13))


# ---- two hosts that share no folder, as two folders ----


def not_shared(folder: str) -> dict[str, object]:
    import torch.distributed as dist

    mine = Path(folder, f"host-{dist.get_rank()}")
    said: dict[str, object] = {}
    try:
        trainer(mine, distributed={"device": "cpu", "strategy": "fsdp"}).train(Points())
    except UsageError as error:
        said["sharded"] = str(error)
    full = {"format": "full", "save_steps": 6, "async": True}
    for in_background in (True, False):
        run = trainer(
            mine / str(in_background),
            distributed={"device": "cpu", "strategy": "fsdp"},
            checkpoint=full | {"async": in_background},
        )
        run.train(Points())
        said[f"saved {in_background}"] = saved(mine / str(in_background))
    again = trainer(
        mine / "True",
        distributed={"device": "cpu", "strategy": "fsdp"},
        checkpoint=full,
        training={"max_steps": 14, "batch_size": 4, "global_batch_size": 8, "eval_steps": None},
    )
    again.resume("auto")
    said["resumed"] = again.step.progress.step
    again.train(Points())
    said["skipped"] = again.step.progress.skipped
    return said


@pytest.mark.fault(
    "storage: hosts that do not share the run directory",
    "each host has a folder of its own by the same name",
    "found at start: `format: sharded` is refused with exit code 2 and what to do; `format: full`"
    " is gathered and written by rank 0, and handed out to the hosts on resume",
)
def test_storage_that_is_not_shared(tmp_path: Path) -> None:
    first, second = run_ranks(not_shared, 2, str(tmp_path))
    for said in (first, second):
        assert "the hosts do not share" in str(said["sharded"])
        assert "checkpoint.format: full" in str(said["sharded"])
        assert said["resumed"] == 12
    assert first["saved True"] == first["saved False"] == ["step-00000006", "step-00000012"]
    assert second["saved True"] == []
    one, other = (tmp_path / f"host-0/{kind}/checkpoints/step-00000012" for kind in (True, False))
    assert checkpoint.digest(one) == checkpoint.digest(other)
    shutil.rmtree(tmp_path)
