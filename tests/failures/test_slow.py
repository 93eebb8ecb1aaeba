"""Real ranks on a slow disk: saves, evaluations, steps and data that go forward do not hang,
however long they take.
"""

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from lockstep.failures.hang import OtherMachines
from lockstep.heartbeat import writer
from lockstep.heartbeat.files import FORWARD, FORWARD_AT, WRITE_AT, Beat, Write
from tests.faults.tiny import events, steps
from tests.launch.shared import finish, start, wait_for

_CONFIG = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "slowness:data"}
training: {max_steps: 12, batch_size: 4, global_batch_size: 8, eval_steps: 4}
distributed: {device: cpu, strategy: ddp, hang: {factor: 1.5, seconds: 2}, timeout_seconds: 300}
checkpoint: {save_steps: 4, async: ASYNC, storage: {name: "slowness:Slow", args: {root: run/checkpoints}}}
monitor: {log_steps: 1, sinks: [jsonl]}
"""
# The first save, the first evaluation and the first steps are fast: from them the launcher learns
# what is usual.
_SLOWNESS = """
import os, time
from contextlib import contextmanager
from lockstep.checkpoint.posix import PosixStorage
from lockstep.data import Data
from tests.faults.tiny import Points

START = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
READ = []  # the training samples, in order
EVALUATED = set()
WRITTEN = []  # sizes of what was written slowly


class Train(Points):
    deterministic = False

    def __getitem__(self, index):
        READ.append(index)
        if START == 0 and 4 * 5 < len(READ) <= 4 * 7:
            time.sleep(1.0)  # these micro-batches take twice as long as a step may
        return super().__getitem__(index)


class Validation(Points):
    deterministic = False

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if START == 0 and index in EVALUATED:
            time.sleep(0.5)  # so does the second evaluation
        EVALUATED.add(index)
        return super().__getitem__(index)


def data():
    return Data(Train(), Validation())


class Slow(PosixStorage):
    @contextmanager
    def write(self, draft, file):
        is_slow = START == 0 and not draft.startswith("step-00000004")
        if START == 0 and draft.startswith("step-00000012") and file.endswith("state.json"):
            time.sleep(3600)
        if is_slow:
            time.sleep(0.7)
        with super().write(draft, file) as stream:
            yield SlowFile(stream) if is_slow else stream


class SlowFile:
    def __init__(self, stream):
        self.stream = stream

    def write(self, data):
        WRITTEN.append(len(data))
        if len(WRITTEN) <= 16:
            time.sleep(0.5)  # all of them together take far longer than a write may stand still
        return self.stream.write(data)


def late(before, seconds):
    def call(*args):
        if START == 0 and os.path.exists("run/checkpoints/step-00000004"):
            time.sleep(seconds)
        return before(*args)
    return call


os.fsync = late(os.fsync, 0.05)
"""


@pytest.mark.fault(
    "storage: a disk on which a save takes far longer than before",
    "each operation on files is slow, and goes forward; so may be an evaluation, or the samples of"
    " a step",
    "nothing is taken for a hang while bytes are written, samples read or micro-batches run; a"
    " write that has not gone forward for `hang.seconds`, and `hang.factor` × what a whole one"
    " usually takes, is one",
)
@pytest.mark.full
@pytest.mark.parametrize("in_background", [True, False])
def test_what_goes_forward_does_not_hang(tmp_path: Path, in_background: bool) -> None:
    """The last save does not go forward: it alone is found, and made up for after a restart."""
    (tmp_path / "slowness.py").write_text(_SLOWNESS)
    (tmp_path / "tiny.yaml").write_text(_CONFIG.replace("ASYNC", str(in_background).lower()))
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--output-dir", "run")
    ended = finish(
        start(tmp_path, "train", "tiny.yaml", *options, OMP_NUM_THREADS="1"), tmp_path, timeout=500
    )
    assert ended.code == 0, ended.err
    (restart,) = events(tmp_path / "run", "restart")
    assert re.search(r"rank 0 of 2 failed: it hangs in save, after step 12: ", restart["reason"]), (
        restart["reason"]
    )
    assert (
        "the write of the checkpoint has not gone forward" in restart["reason"]
    ) == in_background
    assert "if it was only slow, raise distributed.hang.seconds above 2" in restart["reason"]
    assert steps(tmp_path / "run") == [*range(1, 13)]
    saves = events(tmp_path / "run", "save")
    assert [event["step"] for event in saves] == [4, 8, 12]
    assert saves[1]["time"] < restart["time"], "the write that went forward was taken for a hang"


def test_ranks_of_another_machine_that_go_forward_are_waited_for() -> None:
    """Two launchers share a store. What is written in the background counts only for who waits for
    it.
    """
    store = HashStore()
    here = OtherMachines(store, 0, 2)
    there = OtherMachines(store, 1, 2)
    try:
        began = time.monotonic()
        there.tell([Beat(2, 1, 5, "step", began, write=Write(forward=began))])
        wait_for(lambda: here.newest(writes=True) > began)
        assert here.newest(writes=False) == 0.0
        there.tell([Beat(2, 1, 5, "step", began, forward=began + 1, write=Write(forward=began))])
        wait_for(lambda: here.newest(writes=False) > began)
        assert there.newest(writes=True) == 0.0
    finally:
        here.close()
        there.close()


def test_work_that_goes_forward_often_is_recorded_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the main thread and in the background each; the launcher looks a hundred times less."""
    now = 100.0
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now))
    beat = writer.Heartbeat(tmp_path, 0)
    content = beat._map
    assert content is not None

    def recorded() -> tuple[float, float]:
        return tuple(FORWARD.unpack_from(content, at)[0] for at in (FORWARD_AT, WRITE_AT))

    beat.went_forward()
    assert recorded() == (100.0, 0.0)
    now = 100.009
    beat.went_forward()
    assert recorded() == (100.0, 0.0)
    background = threading.Thread(target=beat.went_forward)
    background.start()
    background.join()
    assert recorded() == (100.0, 100.009)
    now = 100.011
    beat.went_forward()
    assert recorded() == (100.011, 100.009)
