"""Threads that are inside of C++ when Python ends: it ends with its own code all the same."""

import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import lockstep
from lockstep.store_threads import answer_within
from tests.launch.shared import environment
from tests.ranks import free_port

# Each thread goes in and out of C++ without a pause, so that it is certain to come back while the
# interpreter ends, unless it is ended before. One asks for two seconds at most, as a store may.
_TALKING = """
import os, sys, time
import torch.distributed as dist
from lockstep.launch.rendezvous_handlers import Membership
from lockstep.store_threads import StoreThread
from lockstep.verify import watch
from lockstep.verify.training_checks import TrainingChecks

port = int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

def ask(seconds=1.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        store.check(["key"])
    return 0

def talk(thread):
    while not thread.closing.is_set():
        store.check(["key"])

if sys.argv[1] == "thread":
    StoreThread(talk, "talk")
elif sys.argv[1] == "membership":
    membership = Membership(ask)
    membership._asked_at = 0.0
    membership()
else:  # a rank that has far more to tell than the others have read
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.get_rank = lambda: 1
    dist.get_world_size = lambda: 2
    ranks = watch._Ranks(TrainingChecks())
    for step in range(50_000):
        ranks.send(step, {})
time.sleep(0.3)
sys.exit(3)
"""


# in the quick run a launcher does, in tests/failures/test_hang.py
@pytest.mark.full
@pytest.mark.parametrize("kind", ["thread", "membership", "watch"])
def test_a_process_whose_threads_talk_to_a_store_ends_with_its_own_code(kind: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _TALKING, kind, str(free_port())],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = process.communicate(timeout=300)
    assert process.returncode == 3, err


# The files that start a plain thread, and what it does: it waits in Python or C.
_PLAIN = {
    "process_group/caught_errors.py": "looks at the other ranks' heartbeats",
    "checkpoint/background.py": "writes a checkpoint; Python waits for it before it ends",
    "checkpoint/host_disk.py": "answers other hosts, from a disk",
    "launch/spawn.py": "waits for another process",
    "live/survivor.py": "reads a file, and shuts sockets down",
    "monitor/sinks.py": "calls sinks, which the monitor closes",
    "run_directory/run_lock.py": "writes to the lock's file",
    "machine/signals.py": "reads from a pipe",
    "submit/ray_machine.py": "reads what a launcher says",
    "verify/script/observed/hangs.py": "looks at processes",
}


def test_other_threads_never_call_a_store() -> None:
    """A new one is written down above, or is a `StoreThread`."""
    package = Path(lockstep.__path__[0])
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\bthreading\.(Thread|Timer)\(", path.read_text())
    }
    assert found == set(_PLAIN)


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    """As of a store behind a broken link; an answer, and an error, are handed on."""
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        answer_within(0.05, never.wait)
    with pytest.raises(TimeoutError):
        answer_within(60, never.wait, given_up=lambda: True)
    never.set()
    assert answer_within(60, lambda: 3) == 3
    with pytest.raises(ValueError, match="gone"):
        answer_within(60, partial(_fail, "gone"))


def _fail(why: str) -> None:
    raise ValueError(why)
