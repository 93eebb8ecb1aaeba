"""A case ends alone: it leaves nothing behind, and one that hangs or dies has a verdict within its
limit.
"""

import os
import signal
import threading
import time
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.machine import processes
from lockstep.verify.subject import run_isolated, why_not_ended

LEFT: list[int] = []


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    assert run_isolated(lambda: LEFT.append(1), tmp_path, 0, 60, alone=True)
    assert why_not_ended(tmp_path, 1, 60) is None
    assert LEFT == []


def refuses() -> None:
    raise UsageError("no such layer", fix="name another")


def test_an_error_is_that_of_the_case(tmp_path: Path) -> None:
    assert run_isolated(refuses, tmp_path, 0, 60, alone=True)
    error = why_not_ended(tmp_path, 1, 60)
    assert isinstance(error, UsageError)
    assert "no such layer" in str(error)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_case_that_dies_has_a_reason(tmp_path: Path) -> None:
    assert run_isolated(dies, tmp_path, 0, 60, alone=True)
    assert "SIGKILL" in str(why_not_ended(tmp_path, 1, 60))


def waits() -> None:
    time.sleep(600)


def test_a_case_that_hangs_is_ended_and_placed(tmp_path: Path) -> None:
    began = time.monotonic()
    assert not run_isolated(waits, tmp_path, 0, 1, alone=True)
    assert time.monotonic() - began < 200
    error = str(why_not_ended(tmp_path, 1, 1))
    assert "no answer within 1 s: rank 0 at " in error
    assert "test_isolated.py" in error
    assert " in waits" in error


def test_a_thread_that_waits_for_the_processor_is_told_from_one_that_sleeps() -> None:
    """On a busy machine the first uses no processor either."""
    ready = threading.Event()
    ended = threading.Event()

    def computes() -> None:
        while not ended.is_set():
            ready.set()

    worker = threading.Thread(target=computes)
    worker.start()
    ready.wait()
    found = False
    while not found:  # it never sleeps, so that it is seen as soon as this thread looks
        found = processes.wants_processor(threading.get_native_id())
    ended.set()
    worker.join()
