"""Finding a step that takes far longer than those before, and which rank holds the others up.

The launcher of a machine reads its ranks' heartbeats. When none came for too long, every rank writes its Python stacks
(faulthandler answers a signal even while Python waits in C) and its last collectives; the rank that is behind is the
one that was stopped, does not answer, has done the fewest steps, has begun the fewest collectives, or is not waiting in
torch. Ranks that go on while they are asked were slow, on a busy machine: they are left alone.
"""

import json
import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.heartbeat import DUMP, Beat, read_beats
from lockstep.launch.failures import Failure, short_path

STACKS_SIGNAL = signal.SIGQUIT  # `kill -QUIT` of a rank writes its stacks at any time
_ANSWER_SECONDS = 2.0
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_TORCH = re.compile(r"/torch/|<frozen ")
_OURS = re.compile(r"/lockstep/|/torch/|/site-packages/|/lib/python\d|<frozen ")


def stacks_file(logs: Path, rank: int) -> Path:
    """Where a rank's stacks go."""
    return logs / f"rank-{rank}.stacks.txt"


@dataclass
class HangWatch:
    """Looks at the heartbeats of one machine's ranks.

    Attributes:
        folder: where the heartbeats are.
        logs: where stacks and collectives go.
        factor, seconds: a step hangs after `factor` × the median, and at least `seconds`; factor None: never.
        patience: seconds for what has no median: first steps, evaluations, saves.
    """

    folder: Path
    logs: Path
    factor: float | None
    seconds: float
    patience: float
    _last: dict[int, Beat] = field(default_factory=dict)
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _stopped_since: float | None = None
    _looked: float = 0.0

    def restart(self) -> None:
        """Ranks are started anew."""
        self._last.clear()
        self._stopped_since = None

    def look(self, pids: Mapping[int, int], world_size: int) -> Failure | None:
        """Whether the ranks hang; the failure of the one that is behind, once all have written what they know.

        Args:
            pids: global rank → process, of this machine.
        """
        beats = [beat for beat in read_beats(self.folder) if pids.get(beat.rank) == beat.process]
        if not beats:
            return self._look_without_beats(pids, world_size)
        for beat in beats:
            before = self._last.get(beat.rank)
            if before is not None and before.phase == beat.phase == "step" and beat.step > before.step:
                self._durations.append((beat.time - before.time) / (beat.step - before.step))
            self._last[beat.rank] = beat
        running = [beat for beat in beats if beat.phase != "done"]
        limit = self._limit(running)
        if limit is None or len(beats) < len(pids):
            return None
        since = min(beat.time for beat in running)
        stood = time.monotonic() - since
        if stood <= limit:
            return None
        silent, stopped = self._ask(pids)
        if not stopped and self._all_moved(running):
            return None
        return self._tell(running, pids, world_size, stood, silent, stopped)

    def _look_without_beats(self, pids: Mapping[int, int], world_size: int) -> Failure | None:
        """Of a script that tells no steps, one thing can be seen: some of its ranks are stopped, and others wait."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return None
        self._looked = now
        stopped = _stopped(pids)
        if not stopped or len(stopped) == len(pids):  # all: somebody has suspended the job
            self._stopped_since = None
            return None
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since < self.seconds:
            return None
        self._ask(pids)
        rank = min(stopped)
        return Failure(
            rank, world_size, "hang", f"it hangs: a signal stopped it {now - self._stopped_since:.0f} s ago",
            where=_place(_newest_stack(stacks_file(self.logs, rank))), why="SIGSTOP, or a debugger that holds it",
            host=socket.gethostname(), time=time.time(),
            fix=f"every rank's stacks are in {self.logs}/rank-*.stacks.txt",
        )  # fmt: skip

    def _all_moved(self, before: list[Beat]) -> bool:
        newest = {beat.rank: beat.time for beat in read_beats(self.folder)}
        return all(newest.get(beat.rank, 0.0) > beat.time for beat in before)

    def _limit(self, running: list[Beat]) -> float | None:
        if self.factor is None or not running:
            return None
        if any(beat.phase != "step" for beat in running) or not self._durations:
            return max(self.patience, self.seconds)
        return max(self.seconds, self.factor * median(self._durations))

    def _tell(
        self, beats: list[Beat], pids: Mapping[int, int], world_size: int, stood: float, silent: set[int],
        stopped: set[int],
    ) -> Failure:  # fmt: skip
        stacks = {rank: _newest_stack(stacks_file(self.logs, rank)) for rank in pids}
        begun = {rank: self._collectives(rank) for rank in pids}
        answers = pids.keys() - silent - stopped
        done = {beat.rank: beat.step for beat in (*beats, *read_beats(self.folder))}
        in_torch = {rank for rank, stack in stacks.items() if stack and _TORCH.search(stack[0][0])}
        behind = min(
            beats,
            key=lambda b: (
                b.rank not in stopped, b.rank in answers, done[b.rank], begun[b.rank][0], b.rank in in_torch, b.rank
            ),
        )  # fmt: skip
        usual = f"{median(self._durations):.3g} s" if self._durations else "not known yet"
        others = sorted({begun[b.rank][1] for b in beats if b is not behind and begun[b.rank][1]})
        why = "it was stopped by a signal (SIGSTOP)" if behind.rank in stopped else None
        if why is None and behind.rank in silent:
            why = "it does not answer signals: it sits in the kernel, on a disk or a device"
        if why is None and others:
            why = f"the last collective that the others began is {', '.join(others)}"
        return Failure(
            behind.rank, world_size, "hang",
            f"it hangs in step {behind.step}: no step for {stood:.0f} s, where one usually takes {usual}",
            where=_place(stacks[behind.rank]), why=why, host=socket.gethostname(), time=time.time(),
            fix=f"every rank's stacks are in {self.logs}/rank-*.stacks.txt, its last collectives in rank-*.flight.json",
        )  # fmt: skip

    def _ask(self, pids: Mapping[int, int]) -> tuple[set[int], set[int]]:
        """Have every rank write its stacks and collectives.

        Returns:
            the ranks that stayed silent until resumed, and those of all that a signal had stopped.
        """
        stopped = _stopped(pids)
        before = {rank: _size(stacks_file(self.logs, rank)) for rank in pids}
        (self.folder / DUMP).touch()
        for pid in pids.values():
            _send(pid, STACKS_SIGNAL)
        silent = self._wait(before, pids, _ANSWER_SECONDS)
        stopped |= _stopped(pids)  # or while it was asked
        for rank in silent | stopped:
            _send(pids[rank], signal.SIGCONT)  # a stopped one then answers, from where it stands; all end soon
        self._wait(before, pids, _ANSWER_SECONDS)
        return silent, stopped

    def _wait(self, before: Mapping[int, int], pids: Mapping[int, int], seconds: float) -> set[int]:
        deadline = time.monotonic() + seconds
        while True:
            silent = {rank for rank in pids if _size(stacks_file(self.logs, rank)) <= before[rank]}
            told = all((self.folder / f"flight-{rank}.json").exists() for rank in pids)
            if (not silent and told) or time.monotonic() > deadline:
                time.sleep(0.05)  # the last line is being written
                return silent
            time.sleep(0.05)

    def _collectives(self, rank: int) -> tuple[int, str]:
        """How many collectives a rank has begun, and the newest; its record moves to the logs."""
        path = self.folder / f"flight-{rank}.json"
        try:
            data = path.read_bytes()
            trace = json.loads(data)
        except (OSError, ValueError):
            return 0, ""
        (self.logs / f"rank-{rank}.flight.json").write_bytes(data)
        status = trace.get("pg_status", {}).values()
        count = sum(int(group.get("last_enqueued_collective", 0)) for group in status)
        entries: list[dict[str, Any]] = trace.get("entries", [])
        entries.sort(key=lambda entry: int(entry.get("time_created_ns", 0)))
        return count, str(entries[-1].get("profiling_name", "")) if entries else ""


def _newest_stack(path: Path) -> list[tuple[str, int, str]]:
    """The main thread's frames in the newest dump, innermost first: (file, line, function)."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    blocks = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)
    return [(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(blocks[-1])]


def _place(stack: list[tuple[str, int, str]]) -> str | None:
    """The user's own frame if there is one, else the innermost."""
    if not stack:
        return None
    own = next((frame for frame in stack if not _OURS.search(frame[0])), stack[0])
    return f"{short_path(own[0])}:{own[1]} in {own[2]}"


def _stopped(pids: Mapping[int, int]) -> set[int]:
    """The ranks that a signal has stopped: any thread, for the main one may be in the kernel when it comes."""
    return {
        rank for rank, pid in pids.items() if any(_state(path) == "T" for path in Path(f"/proc/{pid}").glob("task/*"))
    }


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
