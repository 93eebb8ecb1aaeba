"""Ends the ranks of a script that wait for each other, and writes where each of them waits.

A thread in each rank looks whether the rank computes. When none has used the processor for a while,
no collective will end any more: each rank writes what it has recorded, and where its main thread
is, and ends once all have. What ranks say to each other are files in the task's folder, since a
collective would not return.

Tests: tests/verify/test_script.py
"""

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress

from lockstep.failures.failure import short_path
from lockstep.machine.processes import descendants, is_running, wants_processor
from lockstep.verify.own_lines import is_own
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.task import ScriptTask

_PATIENCE = 15.0  # seconds for which no rank may compute; longer than a script sleeps on purpose
_POLL = 0.5
_BUSY = 0.05  # share of the processor from which on a rank computes
# A thread that wants the processor in most of so many looks computes, and has to wait for its turn;
# one that sleeps in a loop is seen now and then.
_LOOKS = 8


class ScriptHangWatch:
    """Watches one rank, from a thread of its own."""

    def __init__(self, task: ScriptTask, rank: int, world: int, record: ScriptRecord) -> None:
        self._task = task
        self._rank = rank
        self._world = world
        self._record = record
        self._is_started = False
        self._script_has_ended = False

    def start(self) -> None:
        """Begin to watch; the thread that calls is the one whose place is told."""
        if not self._is_started:
            self._is_started = True
            main = threading.get_ident()
            threading.Thread(target=self._end_if_hanging, args=(main,), daemon=True).start()

    def script_has_ended(self) -> None:
        """Note that nothing of the script is left to run."""
        self._script_has_ended = True

    def _end_if_hanging(self, main: int) -> None:
        """End the process once no rank has computed for a while, and write where it waits.

        No rank ends before all have written: the end of one is an error in the others.
        """
        while True:
            self._wait_until_all_idle()
            self._task.write_record(self._rank, self._record)
            hang_file = self._task.hang_file(self._rank)
            hang_file.write_text(json.dumps(self._location(main)))
            while self.are_idle():
                if all(map(self._has_written, range(self._world))):
                    os._exit(0)
                time.sleep(_POLL / 10)
            hang_file.unlink()  # one computes after all

    def _wait_until_all_idle(self) -> None:
        """Mark this rank as idle while it has not computed for a while, until all ranks are."""
        mark = self._task.idle_file(self._rank)
        idle_since = time.monotonic()
        used = time.process_time()
        wanting: deque[bool] = deque(maxlen=_LOOKS)
        while not self.are_idle():
            time.sleep(_POLL)
            now = time.process_time()
            wanting.append(wants_processor(threading.get_native_id()))
            is_busy = now - used > _BUSY * _POLL or sum(wanting) > _LOOKS / 2
            if self._script_has_ended:
                is_busy = False  # what runs is this package's: it waits for the other ranks
            if is_busy or any(map(is_running, descendants(os.getpid()))):
                idle_since = time.monotonic()
                mark.unlink(missing_ok=True)
            elif time.monotonic() - idle_since > _PATIENCE and not mark.exists():
                mark.write_text(str(os.getpid()))
            used = now

    def are_idle(self) -> bool:
        """Return whether no rank has computed for a while."""
        return all(self._task.idle_file(rank).exists() for rank in range(self._world))

    def _has_written(self, rank: int) -> bool:
        """Return whether a rank has written where it waits, or has ended."""
        process = ""
        with suppress(FileNotFoundError):  # it computes again
            process = self._task.idle_file(rank).read_text()
        has_ended = bool(process) and not is_running(int(process))
        return has_ended or self._task.hang_file(rank).exists()

    def _location(self, main: int) -> str:
        """Return the script's own line at which the main thread waits; empty if none is left."""
        frames = traceback.extract_stack(sys._current_frames()[main])
        # the innermost is where it waits
        own = [frame for frame in frames if is_own(frame.filename)]
        if not own or self._script_has_ended:
            return ""
        return f"{short_path(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}"
