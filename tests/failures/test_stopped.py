"""Real ranks that a signal stops where no step has told yet how long it takes: each is named within
seconds.
"""

import json
import re
from pathlib import Path

import pytest

from tests.faults.tiny import events
from tests.launch.shared import finish, start

_CONFIG = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "moments:data"}
training: {max_steps: 8, batch_size: 4, global_batch_size: 8, eval_steps: 2}
distributed: {device: cpu, strategy: fsdp, hang: {seconds: 5}}
checkpoint: {save_steps: 4, async: false}
monitor: {log_steps: 1, sinks: [jsonl]}
"""
_MOMENTS = """
import json, os, signal, time
from lockstep.data import Data
from tests.faults.tiny import Points

START = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])


def stop(start, rank):
    told = f"stopped-{start}.json"
    if (START, RANK) == (start, rank) and not os.path.exists(told):
        with open(told, "w") as file:
            json.dump(time.time(), file)
        os.kill(os.getpid(), signal.SIGSTOP)


class Train(Points):
    def __getitem__(self, index):
        stop(0, 1)
        return super().__getitem__(index)


class Validation(Points):
    def __getitem__(self, index):
        stop(1, 0)
        return super().__getitem__(index)


def data():
    return Data(Train(), Validation())


def sync(descriptor, before=os.fsync):
    stop(2, 1)
    before(descriptor)


os.fsync = sync
"""


@pytest.mark.fault(
    "hang: a rank is stopped (SIGSTOP) in the first step, an evaluation or a save",
    "nobody knows yet how long these take; the others wait in a collective",
    "after `hang.seconds` it is named, with what it was doing and its line, and the ranks are"
    " started again",
)
def test_a_rank_that_is_stopped_is_named_soon_whatever_it_does(tmp_path: Path) -> None:
    (tmp_path / "moments.py").write_text(_MOMENTS)
    (tmp_path / "tiny.yaml").write_text(_CONFIG)
    options = ("--nproc-per-node", "2", "--max-restarts", "3", "--output-dir", "run")
    ended = finish(
        start(tmp_path, "train", "tiny.yaml", *options, OMP_NUM_THREADS="1"), tmp_path, timeout=500
    )
    assert ended.code == 0, ended.err
    found = re.findall(
        r"rank (\d) of 2 failed: it hangs in (\w+).*?: a signal stopped (\S+)", ended.err
    )
    assert found == [("1", "step", "it"), ("0", "evaluate", "it"), ("1", "save", "it")], ended.err
    restarts = events(tmp_path / "run", "restart")
    took = [
        r["time"] - json.loads((tmp_path / f"stopped-{n}.json").read_text())
        for n, r in enumerate(restarts)
    ]
    assert len(took) == 3
    assert max(took) < 120, took  # seconds, on a busy machine
