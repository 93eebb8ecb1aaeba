"""Finding ranks that hang, and which of them holds the others up.

The launcher of a machine reads its ranks' heartbeats: which call each rank is in (a step, a save, an evaluation, a
reduction), since when, and how long such calls took before. Four things are looked for:

    a rank or a data worker that a signal has stopped       noticed after `seconds`, whatever is under way
    a call that takes far longer than those before          `factor` × the median of its kind, at least `seconds`
    a call of which nobody knows how long it takes          after `patience`
    a call in which ranks wait for one that is elsewhere    after `seconds`, where that one waits in a collective of its
                                                            own, or the run was told to stop

Then every rank writes its Python stacks (faulthandler answers a signal even while Python waits in C) and its last
collectives; the rank that is behind is the one that was stopped, does not answer, has done the fewest steps, has begun
the fewest calls and collectives, or is not waiting in torch. Ranks that go on while they are asked were slow, on a busy
machine: they are left alone.
"""

import json
import os
import signal
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.heartbeat import DUMP, Beat, Call, read_beats, read_limits
from lockstep.launch.failures import Failure
from lockstep.launch.processes import Stopped, is_running, is_stopped, stopped_processes
from lockstep.launch.stacks import Stack, newest_stack, stacks_file

STACKS_SIGNAL = signal.SIGQUIT  # `kill -QUIT` of a rank writes its stacks at any time
_ANSWER_SECONDS = 2.0
_STATES_SECONDS = 0.5  # between two looks at the states of processes


@dataclass
class _Answers:
    """What ranks told when they were asked.

    Attributes:
        silent: those that did not answer.
        stopped: those that a signal had stopped meanwhile.
        stacks: by rank.
        begun: how many collectives each has begun, and the name of its newest.
    """

    silent: set[int]
    stopped: set[int]
    stacks: dict[int, Stack]
    begun: dict[int, tuple[int, str]]


@dataclass
class HangWatch:
    """Looks at the heartbeats of one machine's ranks.

    Attributes:
        folder: where the heartbeats are.
        logs: where stacks and collectives go.
        factor, seconds: a call hangs after `factor` × the median of its kind, and at least `seconds`; factor None:
            only what is stopped is found.
        patience: seconds for what has no median: first steps, the first evaluation, the first save.
    """

    folder: Path
    logs: Path
    factor: float | None
    seconds: float
    patience: float
    _durations: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=50)))
    _known: dict[int, int] = field(default_factory=dict)  # rank → the newest call whose duration was taken
    _stopped_since: dict[Stopped, float] = field(default_factory=dict)
    _looked: float = 0.0
    _asked: float = 0.0
    _told_to_stop: float | None = None

    def restart(self) -> None:
        """Ranks are started anew."""
        self._known.clear()
        self._stopped_since.clear()
        self._told_to_stop = None

    def look(self, pids: Mapping[int, int], world_size: int, *, told_to_stop: bool = False) -> Failure | None:
        """Whether the ranks hang; the failure of the one that is behind, once all have written what they know.

        Args:
            pids: global rank → process, of this machine.
            told_to_stop: whether a signal was passed on to them.
        """
        if told_to_stop:
            self._told_to_stop = self._told_to_stop or time.monotonic()
        self.factor, self.seconds, self.patience = read_limits(self.folder) or (
            self.factor, self.seconds, self.patience,
        )  # fmt: skip
        beats = [beat for beat in read_beats(self.folder) if pids.get(beat.rank) == beat.process]
        self._learn(beats)
        return (
            self._look_for_stopped(beats, pids, world_size)
            or self._look_for_long_calls(beats, pids, world_size)
            or self._look_for_ranks_elsewhere(beats, pids, world_size)
        )

    def _learn(self, beats: list[Beat]) -> None:
        """How long calls take, by their names."""
        for beat in beats:
            for call in beat.calls:
                if call.ended and call.number > self._known.get(beat.rank, 0):
                    self._durations[call.name].append(call.ended - call.begun)
                    self._known[beat.rank] = call.number

    # ---- what a signal has stopped ----

    def _look_for_stopped(self, beats: list[Beat], pids: Mapping[int, int], world_size: int) -> Failure | None:
        now = time.monotonic()
        if now - self._looked >= _STATES_SECONDS:
            self._looked = now
            found = stopped_processes(pids)
            if len({one.rank for one in found if not one.is_worker}) == len(pids):
                found = []  # somebody has suspended the job
            self._stopped_since = {one: self._stopped_since.get(one, now) for one in found}
        long = [one for one, since in self._stopped_since.items() if now - since >= self.seconds]
        if not long:
            return None
        one = min(long, key=lambda one: (one.is_worker, self._stopped_since[one]))
        stood = now - self._stopped_since[one]
        told = self._ask(pids)
        doing = next((_doing(beat) for beat in beats if beat.rank == one.rank), "")
        return self._failure(
            one.rank, world_size, f"it hangs{doing}: a signal stopped {one} {stood:.0f} s ago",
            where=told.stacks[one.rank].place, why="it was stopped by a signal (SIGSTOP), or a debugger holds it",
        )  # fmt: skip

    # ---- what takes too long ----

    def _look_for_long_calls(self, beats: list[Beat], pids: Mapping[int, int], world_size: int) -> Failure | None:
        running = [beat for beat in beats if beat.phase != "done" or beat.inside]
        waiting = [beat for beat in running if _since(beat) is not None]
        if self.factor is None or not waiting or len(waiting) < len(running) or len(beats) < len(pids):
            return None
        now = time.monotonic()
        slowest = min(waiting, key=lambda beat: _since(beat) or now)
        limit = self._limit(waiting)
        stood = now - (_since(slowest) or now)
        if stood <= limit:
            return None
        told = self._ask(pids)
        if not told.stopped and self._all_moved(waiting):
            return None
        return self._tell(waiting, world_size, stood, told)

    def _limit(self, waiting: list[Beat]) -> float:
        """Of the call that may take longest: ranks that are behind may be in the one before."""
        assert self.factor is not None
        kinds = {_kind(beat) for beat in waiting}
        if any(beat.phase == "first" for beat in waiting) or any(not self._durations.get(kind) for kind in kinds):
            return max(self.patience, self.seconds)
        return max(self.seconds, *(self.factor * median(self._durations[kind]) for kind in kinds))

    def _all_moved(self, before: list[Beat]) -> bool:
        newest = {beat.rank: _last_sign(beat) for beat in read_beats(self.folder)}
        return all(newest.get(beat.rank, 0.0) > _last_sign(beat) for beat in before)

    def _tell(self, waiting: list[Beat], world_size: int, stood: float, told: _Answers) -> Failure:
        done = {beat.rank: (beat.step, _calls(beat)) for beat in (*waiting, *read_beats(self.folder))}
        behind = min(
            waiting,
            key=lambda beat: (
                beat.rank not in told.stopped, beat.rank not in told.silent, done[beat.rank],
                told.begun[beat.rank][0], told.stacks[beat.rank].in_torch, beat.rank,
            ),
        )  # fmt: skip
        kind, rank = _kind(behind), behind.rank
        known = self._durations.get(kind)
        usual = f"{median(known):.3g} s" if known else "not known yet"
        others = sorted({told.begun[beat.rank][1] for beat in waiting if beat is not behind} - {""})
        why = "it was stopped by a signal (SIGSTOP)" if rank in told.stopped else None
        if why is None and rank in told.silent:
            why = "it does not answer signals: it sits in the kernel, on a disk or a device"
        if why is None and others:
            why = f"the last collective that the others began is {', '.join(others)}"
        what = f"it hangs{_doing(behind)}: no {_unit(kind)} for {stood:.0f} s, where one usually takes {usual}"
        return self._failure(rank, world_size, what, where=told.stacks[rank].place, why=why)

    # ---- who waits for a rank that is elsewhere ----

    def _look_for_ranks_elsewhere(self, beats: list[Beat], pids: Mapping[int, int], world_size: int) -> Failure | None:
        """Some ranks wait in a call, and others are in code of their own: do these wait in a collective there?

        Ranks that were told to stop and do not move either wait in C, where no signal reaches Python.
        """
        now = time.monotonic()
        waiting = [beat for beat in beats if _since(beat) is not None]
        signs = [_last_sign(beat) for beat in beats]
        if self._told_to_stop is not None:
            signs.append(self._told_to_stop)
        elsewhere = {rank for rank, pid in pids.items() if is_running(pid)} - {beat.rank for beat in waiting}
        if self.factor is None or not elsewhere or not signs or (not waiting and self._told_to_stop is None):
            return None
        stood = now - max(signs)
        if stood <= self.seconds or now - self._asked <= self.seconds:
            return None
        told = self._ask(pids)
        guilty = [rank for rank in sorted(elsewhere) if told.stacks[rank].in_collective]
        if not guilty and stood <= max(self.patience, self.seconds):
            return None  # it computes something of its own, and may take its time
        rank = guilty[0] if guilty else min(elsewhere)
        what = "it waits in a collective which the others have not entered" if guilty else "it keeps the others waiting"
        others = sorted({str(beat.calls[-1]) for beat in waiting if beat.inside and beat.calls})
        why = f"the others wait in {', '.join(others)}" if others else None
        if not waiting:
            why = "it was told to stop, and a collective that waits for others does not hear of that"
        return self._failure(
            rank, world_size, f"it hangs: {what}, for {stood:.0f} s now", where=told.stacks[rank].place, why=why,
            fix="all ranks must make the same calls: take it out of `if is_main_process:`; ",
        )  # fmt: skip

    # ---- asking ----

    def _failure(
        self, rank: int, world_size: int, what: str, *, where: str | None, why: str | None, fix: str = ""
    ) -> Failure:  # fmt: skip
        return Failure(
            rank, world_size, "hang", what, where=where, why=why, host=socket.gethostname(), time=time.time(),
            fix=f"{fix}every rank's stacks are in {self.logs}/rank-*.stacks.txt, its last collectives in "
            "rank-*.flight.json",
        )  # fmt: skip

    def _ask(self, pids: Mapping[int, int]) -> _Answers:
        """Have every rank write its stacks and collectives; one that is stopped answers when it is let go on."""
        self._asked = time.monotonic()
        stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}
        before = {rank: _size(stacks_file(self.logs, rank)) for rank in pids}
        for rank in pids:
            (self.folder / f"flight-{rank}.json").unlink(missing_ok=True)
        (self.folder / DUMP).touch()
        for rank, pid in pids.items():
            if stacks_file(self.logs, rank).exists():  # it can answer: the signal would end one that has just begun
                _send(pid, STACKS_SIGNAL)
        silent = self._wait(before, pids, _ANSWER_SECONDS)
        stopped |= {rank for rank, pid in pids.items() if is_stopped(pid)}  # or while it was asked
        for rank in silent | stopped:
            _send(pids[rank], signal.SIGCONT)  # a stopped one then answers, from where it stands; all end soon
        self._wait(before, pids, _ANSWER_SECONDS)
        stacks = {rank: newest_stack(self.logs, rank) for rank in pids}
        return _Answers(silent, stopped, stacks, {rank: self._collectives(rank) for rank in pids})

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


_STEPS = ("train", "steps")  # each step is a call of the loop that takes it


def _under_way(beat: Beat) -> Call | None:
    """The innermost call that a rank is in."""
    return next((call for call in reversed(beat.calls) if not call.ended), None) if beat.inside else None


def _since(beat: Beat) -> float | None:
    """Since when a rank is in Lockstep's code, where it may wait for others; None: it is in code of its own."""
    call = _under_way(beat)
    if call is not None:
        return call.begun
    return _last_sign(beat) if beat.phase in ("step", "first") else None


def _last_sign(beat: Beat) -> float:
    return max([beat.time, *(max(call.begun, call.ended) for call in beat.calls)])


def _calls(beat: Beat) -> int:
    return beat.calls[-1].number if beat.calls else 0


def _kind(beat: Beat) -> str:
    call = _under_way(beat)
    if call is not None:
        return call.name
    return next((call.name for call in reversed(beat.calls) if call.name in _STEPS), "train")


def _unit(kind: str) -> str:
    return "step" if kind in _STEPS else kind


def _doing(beat: Beat) -> str:
    kind = _kind(beat)
    return f" in step {beat.step}" if kind in _STEPS else f" in {kind}, after step {beat.step}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
