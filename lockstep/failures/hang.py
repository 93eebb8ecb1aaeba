"""Finds ranks that hang, and the rank that holds the others up.

The launcher of a machine reads its ranks' heartbeats: which call each rank is in, since when, and
how long such calls took before. A call is slow, and does not hang, while its work goes forward:
samples are read, micro-batches run, bytes and files written; work of ranks on other machines
counts, too, since they are waited for. If nothing goes forward for too long, every rank writes its
Python stacks (a thread answers a signal even while Python waits in C) and its last collectives.
The rank that is behind was stopped, does not answer, has done the fewest steps, has begun the
fewest calls and collectives, or does not wait in torch. Ranks that make progress meanwhile were
slow because the machine is busy: they are not killed.
"""

import json
import signal
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.failures import failure as failures
from lockstep.failures.failure import Failure, Stack, Stopped, stacks_file
from lockstep.failures.stacks import FORCED_STACKS_SIGNAL, STACKS_SIGNAL
from lockstep.heartbeat.files import DUMP, Beat, Call
from lockstep.heartbeat.watcher import read_beats, read_limits
from lockstep.machine.processes import core_seconds, is_running, is_stopped, send_signal
from lockstep.process_group.caught_errors import CAUGHT_SECONDS, caught_error
from lockstep.run_directory.run_files import replace_file
from lockstep.store_threads import StoreThread

_ANSWER_SECONDS = 2.0  # for the ranks that run
_LAST_SECONDS = 6.0  # for all: on a busy machine a rank that was stopped takes a while
_STATES_SECONDS = 0.5  # between two reads of the processes' states
# ranks that all wait in collectives, and use no core for so long, wait for each other
_IDLE_SECONDS = 5.0
_IDLE_SHARE = 0.05  # of a core, which threads that wait use


@dataclass
class _Reports:
    silent: set[int]  # ranks that did not answer
    stopped: set[int]  # ranks that a signal had stopped
    stacks: dict[int, Stack]  # by rank
    # by rank, how many collectives it has begun, and the name of the newest
    begun: dict[int, tuple[int, str]]


@dataclass
class HangWatch:
    """Detects hangs from the heartbeats of one machine's ranks."""

    folder: Path  # the heartbeats'
    logs: Path  # the folder for stacks and collectives
    # a call hangs after this times the median of its kind; None: only stopped processes are found
    factor: float | None
    seconds: float  # and at least after these
    # seconds for calls without a median: first steps, the first evaluation, the first save
    patience: float
    others: "OtherMachines | None" = None
    _durations: dict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=50))
    )
    # rank → the newest call whose duration was recorded
    _known: dict[int, int] = field(default_factory=dict)
    # rank → the newest write whose duration was recorded
    _known_writes: dict[int, int] = field(default_factory=dict)
    _stopped_since: dict[Stopped, float] = field(default_factory=dict)
    _spare_stopped_since: dict[int, float] = field(default_factory=dict)
    # rank → idle since, seconds of a core
    _cores_used: dict[int, tuple[float, float]] = field(default_factory=dict)
    _states_read: float = 0.0
    _reports_at: float = 0.0
    _stop_requested_at: float | None = None
    # rank → the one as which its process was started, by which its files in the logs are named
    _first_ranks: Sequence[int] = ()

    def hear_from(self, others: "OtherMachines | None") -> None:
        """Hear when the ranks of other machines go forward; None: there are none any more."""
        if self.others is not None:
            self.others.close()
        self.others = others

    def follow(self, folder: Path, first_ranks: Sequence[int]) -> None:
        """Watch the ranks whose heartbeats are in this folder, from their start.

        Args:
            folder: of the heartbeats.
            first_ranks: the ranks with which their processes were started, in the ranks' order.
        """
        self.folder = folder
        self._first_ranks = first_ranks
        self.restart()

    def restart(self) -> None:
        """Forget what was seen of the ranks: others are started."""
        self._known.clear()
        self._known_writes.clear()
        self._stopped_since.clear()
        self._spare_stopped_since.clear()
        self._cores_used.clear()
        self._stop_requested_at = None

    def check(
        self, pids: Mapping[int, int], world_size: int, *, stop_requested: bool = False
    ) -> Failure | None:
        """Return the failure of the rank that is behind, if ranks hang.

        All ranks have then written their stacks.

        `pids`: this machine's global ranks → processes; `stop_requested`: a stop signal was
        forwarded to them.
        """
        if stop_requested:
            self._stop_requested_at = self._stop_requested_at or time.monotonic()
        if limits := read_limits(self.folder):
            self.factor, self.seconds, self.patience = limits
        beats = [beat for beat in read_beats(self.folder) if pids.get(beat.rank) == beat.process]
        for beat in beats:
            for call in beat.calls:
                if call.ended and call.number > self._known.get(beat.rank, 0):
                    self._durations[call.name].append(call.ended - call.begun)
                    self._known[beat.rank] = call.number
            if beat.write.count > self._known_writes.get(beat.rank, 0):
                self._durations[_WRITE].append(beat.write.seconds)
                self._known_writes[beat.rank] = beat.write.count
        if self.others is not None:
            self.others.tell(beats)
        looks = (
            self._look_for_stopped,
            self._look_for_caught_errors,
            self._look_for_long_calls,
            self._look_for_ranks_elsewhere,
        )
        return next(
            (failure for look in looks if (failure := look(beats, pids, world_size)) is not None),
            None,
        )

    def stopped_spares(self, spares: Mapping[int, int], pids: Mapping[int, int]) -> list[int]:
        """Return the spare ranks that a signal has stopped for too long.

        No other rank waits for them, before the end of the run.

        Args:
            spares: rank → process.
            pids: the same of those that train.
        """
        now = time.monotonic()
        stopped = [rank for rank, pid in spares.items() if is_stopped(pid)]
        if stopped and all(map(is_stopped, pids.values())):
            stopped = []  # somebody has suspended the job
        since = {rank: self._spare_stopped_since.get(rank, now) for rank in stopped}
        self._spare_stopped_since = since
        return [rank for rank, begun in since.items() if now - begun >= self.seconds]

    def _look_for_stopped(
        self, beats: list[Beat], pids: Mapping[int, int], world_size: int
    ) -> Failure | None:
        """Return the failure of a rank or data worker that a signal has stopped for too long."""
        now = time.monotonic()
        if now - self._states_read >= _STATES_SECONDS:
            self._states_read = now
            stopped = failures.stopped_processes(pids)
            if len({process.rank for process in stopped if not process.is_worker}) == len(pids):
                stopped = []  # somebody has suspended the job
            self._stopped_since = {
                process: self._stopped_since.get(process, now) for process in stopped
            }
        long = [
            process for process, since in self._stopped_since.items() if now - since >= self.seconds
        ]
        if not long:
            return None
        process = min(long, key=lambda process: (process.is_worker, self._stopped_since[process]))
        waited = now - self._stopped_since[process]
        reports = self._collect_reports(pids)
        doing = next((_current_call(beat) for beat in beats if beat.rank == process.rank), "")
        what = f"it hangs{doing}: a signal stopped {process} {waited:.0f} s ago"
        why = "it was stopped by a signal (SIGSTOP), or a debugger holds it"
        return self._failure(
            process.rank, world_size, what, where=reports.stacks[process.rank].place, why=why
        )

    def _look_for_caught_errors(
        self, beats: list[Beat], pids: Mapping[int, int], world_size: int
    ) -> Failure | None:
        """Return a failure if a call raised on one rank, which lives on, and others wait in it."""
        if self.factor is None:
            return None
        now = time.monotonic()
        for failed in [beat.failed for beat in beats if beat.failed is not None]:
            waiting = {
                beat.rank: call
                for beat in beats
                for call in beat.calls
                if beat.rank != failed.rank and call.number == failed.number and not call.ended
            }
            signs = [_forward(beat) for beat in beats if beat.rank in waiting]
            waited = now - max(failed.time, *signs, *(call.begun for call in waiting.values()), 0.0)
            if not waiting or waited <= min(self.seconds, CAUGHT_SECONDS):
                continue
            self._collect_reports(pids)
            call = next(iter(waiting.values()))
            what, why, fix = caught_error(failed, call, waiting, waited)
            return self._failure(
                failed.rank, world_size, what, where=failed.line, why=why, fix=f"{fix}; "
            )
        return None

    def _look_for_long_calls(
        self, beats: list[Beat], pids: Mapping[int, int], world_size: int
    ) -> Failure | None:
        """Return the failure of the rank that is behind, if all ranks wait for too long."""
        running = [beat for beat in beats if beat.phase not in ("done", "left") or beat.inside]
        waiting = [beat for beat in running if _since(beat) is not None]
        if (
            self.factor is None
            or not waiting
            or len(waiting) < len(running)
            or len(beats) < len(pids)
        ):
            return None
        now = time.monotonic()
        slowest = min(waiting, key=lambda beat: _since(beat) or now)
        # Ranks that are behind may be in an earlier call: the limit is that of the slowest kind.
        kinds = {_kind(beat) for beat in waiting}
        limit = max(self.seconds, self.patience)
        if all(beat.phase != "first" for beat in waiting) and all(
            self._durations.get(kind) for kind in kinds
        ):
            limit = max(
                self.seconds, *(self.factor * median(self._durations[kind]) for kind in kinds)
            )
        waited = now - max(
            _since(slowest) or now, *map(_forward, waiting), self._forward_elsewhere(waiting)
        )
        if waited <= limit:
            return None
        reports = self._collect_reports(pids)
        newest = {beat.rank: _newest_sign(beat) for beat in read_beats(self.folder)}
        before = {beat.rank: _newest_sign(beat) for beat in waiting}
        if not reports.stopped and all(
            newest.get(rank, 0.0) > sign for rank, sign in before.items()
        ):
            return None
        return self._describe(waiting, world_size, waited, reports)

    def _forward_elsewhere(self, waiting: list[Beat]) -> float:
        if self.others is None:
            return 0.0
        return self.others.newest(writes=any(beat.awaits_write for beat in waiting))

    def _describe(
        self, waiting: list[Beat], world_size: int, waited: float, reports: _Reports
    ) -> Failure:
        """Find the rank that is furthest behind, and describe where it is and why."""
        beats = (*waiting, *read_beats(self.folder))
        done = {
            beat.rank: (beat.step, beat.calls[-1].number if beat.calls else 0) for beat in beats
        }

        def progress(beat: Beat) -> tuple[Any, ...]:
            rank = beat.rank
            answers = rank not in reports.stopped, rank not in reports.silent
            return *answers, done[rank], reports.begun[rank][0], reports.stacks[rank].in_torch, rank

        behind = min(waiting, key=progress)
        kind = _kind(behind)
        rank = behind.rank
        known = self._durations.get(kind)
        usual = f"{median(known):.3g} s" if known else "not known yet"
        others = sorted(
            {reports.begun[beat.rank][1] for beat in waiting if beat is not behind} - {""}
        )
        why = "it was stopped by a signal (SIGSTOP)" if rank in reports.stopped else None
        if why is None and rank in reports.silent:
            why = "it does not answer signals: it sits in the kernel, on a disk or a device"
        if why is None and others:
            why = f"the last collective that the others began is {', '.join(others)}"
        unit = "step" if kind in _STEPS else kind
        what = (
            f"it hangs{_current_call(behind)}: no {unit} for {waited:.0f} s, where one usually"
            f" takes {usual}"
        )
        if kind == _WRITE:
            what = (
                f"it hangs{_current_call(behind)}: the write of the checkpoint has not gone forward"
                f" for {waited:.0f} s, where the whole of it usually takes {usual}"
            )
        fix = f"if it was only slow, raise distributed.hang.seconds above {self.seconds:g}; "
        return self._failure(
            rank, world_size, what, where=reports.stacks[rank].place, why=why, fix=fix
        )

    def _look_for_ranks_elsewhere(
        self, beats: list[Beat], pids: Mapping[int, int], world_size: int
    ) -> Failure | None:
        """Return a failure if a rank waits in a collective outside of Lockstep's code.

        Other ranks wait in a call for it.

        Ranks that were asked to stop and do not make progress wait in C, where no signal reaches
        Python.
        """
        now = time.monotonic()
        waiting = [beat for beat in beats if _since(beat) is not None]
        signs = [_newest_sign(beat) for beat in beats]
        if self._stop_requested_at is not None:
            signs.append(self._stop_requested_at)
        running = {rank for rank, pid in pids.items() if is_running(pid)}
        elsewhere = running - {beat.rank for beat in waiting}
        if (
            self.factor is None
            or not elsewhere
            or not signs
            or (not waiting and self._stop_requested_at is None)
        ):
            return None
        waited = now - max(signs)
        if now - self._reports_at <= self.seconds:
            return None
        is_long = waited > self.seconds
        idle = waited > _STATES_SECONDS and len(pids) == world_size and self._are_idle(pids)
        if not is_long and not idle:
            return None
        reports = self._collect_reports(pids)
        newest = max(map(_newest_sign, read_beats(self.folder)), default=0.0)
        if newest > max(signs):
            return None  # one went on while they were asked
        in_collective = [rank for rank in sorted(elsewhere) if reports.stacks[rank].in_collective]
        if not is_long and not all(stack.in_collective for stack in reports.stacks.values()):
            return None
        if not in_collective and waited <= max(self.patience, self.seconds):
            return None  # it computes in the user's code, which may take time
        rank = in_collective[0] if in_collective else min(elsewhere)
        what = "it keeps the others waiting"
        if in_collective:
            what = "it waits in a collective which the others have not entered"
        others = sorted({str(beat.calls[-1]) for beat in waiting if beat.inside and beat.calls})
        why = f"the others wait in {', '.join(others)}" if others else None
        if not waiting:
            why = (
                "it was asked to stop, but a collective that waits for other ranks cannot be"
                " interrupted"
            )
        fix = "all ranks must make the same calls: take it out of `if is_main_process:`; "
        what = f"it hangs: {what}, for {waited:.0f} s now"
        return self._failure(
            rank, world_size, what, where=reports.stacks[rank].place, why=why, fix=fix
        )

    def _are_idle(self, pids: Mapping[int, int]) -> bool:
        """Return whether no rank has used a core lately."""
        now = time.monotonic()
        for rank, pid in pids.items():
            used = core_seconds(pid)
            since, before = self._cores_used.setdefault(rank, (now, used))
            if used - before > _IDLE_SHARE * max(now - since, 1.0):
                self._cores_used[rank] = now, used
        return all(now - since >= _IDLE_SECONDS for since, _ in self._cores_used.values())

    def _failure(
        self, rank: int, world: int, what: str, *, where: str | None, why: str | None, fix: str = ""
    ) -> Failure:
        """Return the failure of a hang, which says where the stacks are."""
        fix += (
            f"every rank's stacks are in {self.logs}/rank-*.stacks.txt, its last collectives in"
            " rank-*.flight.json"
        )
        host = socket.gethostname()
        now = time.time()
        return Failure(
            rank, world, "hang", what, where=where, why=why, fix=fix, host=host, time=now
        )

    def _collect_reports(self, pids: Mapping[int, int]) -> _Reports:
        """Make every rank write its stacks and collectives.

        A stopped rank writes them once it is continued.
        """
        self._reports_at = time.monotonic()
        stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}
        before = {rank: _size(self._stacks_file(rank)) for rank in pids}
        for rank in pids:
            (self.folder / f"flight-{rank}.json").unlink(missing_ok=True)
        (self.folder / DUMP).touch()
        for rank, pid in pids.items():
            # the handler is there: without it the signal kills a new rank
            if self._stacks_file(rank).exists():
                send_signal(pid, STACKS_SIGNAL)
        silent = self._wait(before, pids, _ANSWER_SECONDS)
        # stopped since the first look
        stopped |= {rank for rank, pid in pids.items() if is_stopped(pid)}
        for rank in silent | stopped:
            # a stopped rank then writes where it stands; all are killed soon
            send_signal(pids[rank], signal.SIGCONT)
        # code in C that keeps Python's lock runs on those that did not answer, or none at all
        keep_the_lock = self._wait(before, pids, _LAST_SECONDS) - stopped
        for rank in keep_the_lock:
            if self._stacks_file(rank).exists():
                send_signal(pids[rank], FORCED_STACKS_SIGNAL)
        if keep_the_lock:
            silent &= self._wait(before, pids, _ANSWER_SECONDS)
        stacks = {rank: failures.newest_stack(self.logs, self._first_rank(rank)) for rank in pids}
        return _Reports(silent, stopped, stacks, {rank: self._collectives(rank) for rank in pids})

    def _first_rank(self, rank: int) -> int:
        return self._first_ranks[rank] if self._first_ranks else rank

    def _stacks_file(self, rank: int) -> Path:
        return stacks_file(self.logs, self._first_rank(rank))

    def _wait(self, before: Mapping[int, int], pids: Mapping[int, int], seconds: float) -> set[int]:
        deadline = time.monotonic() + seconds
        while True:
            silent = {rank for rank in pids if _size(self._stacks_file(rank)) <= before[rank]}
            complete = all((self.folder / f"flight-{rank}.json").exists() for rank in pids)
            # the frames of the main thread come last: a part of a stack names no place, or another
            written = all(
                failures.newest_stack_is_whole(self.logs, self._first_rank(rank)) for rank in pids
            )
            if (not silent and written and complete) or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)

    def _collectives(self, rank: int) -> tuple[int, str]:
        """Return how many collectives a rank has begun, and the newest one's name.

        Move its record to the logs.
        """
        path = self.folder / f"flight-{rank}.json"
        try:
            data = path.read_bytes()
            trace = json.loads(data)
        except (OSError, ValueError):
            return 0, ""
        replace_file(self.logs / f"rank-{self._first_rank(rank)}.flight.json", data)
        status = trace.get("pg_status", {}).values()
        count = sum(int(group.get("last_enqueued_collective", 0)) for group in status)
        entries: list[dict[str, Any]] = trace.get("entries", [])
        entries.sort(key=lambda entry: int(entry.get("time_created_ns", 0)))
        return count, str(entries[-1].get("profiling_name", "")) if entries else ""


class OtherMachines:
    """Tells the launchers of the other machines that ranks here go forward, and hears it of theirs.

    Each launcher counts in the store that they share: clocks of machines are not compared. A thread
    talks to the store, which never answers once the link to it is broken.
    """

    def __init__(self, store: Any, number: int, count: int) -> None:
        self._store = store
        self._mine = f"{_FORWARD_KEY}/{number}"
        self._others = [f"{_FORWARD_KEY}/{other}" for other in range(count) if other != number]
        self._signs = (0.0, 0.0)  # the newest here: of work, of writes
        self._newest = [0.0, 0.0]  # the same elsewhere, by this machine's clock
        self._thread = StoreThread(self._exchange, "other-machines")

    def tell(self, beats: Sequence[Beat]) -> None:
        """Tell of newer signs of this machine's ranks."""
        work = max((beat.forward for beat in beats), default=0.0)
        self._signs = work, max((beat.write.forward for beat in beats), default=0.0)

    def newest(self, *, writes: bool) -> float:
        """Return when work elsewhere last went forward, as far as is known.

        `writes`: in the background, too.
        """
        return max(self._newest) if writes else self._newest[0]

    def close(self) -> None:
        """End the thread, and wait a moment for it."""
        self._thread.close()

    def _exchange(self, thread: StoreThread) -> None:
        """Tell the other machines when ranks here go forward, and hear when theirs do."""
        published = self._signs
        counts = [0, 0]
        heard = [[0, 0] for _ in self._others]
        # the machine that hosts the store is gone, which ends the run
        with suppress(RuntimeError, ValueError):
            while not thread.closing.wait(_TELL_SECONDS):
                signs = self._signs
                if signs != published:
                    counts = [
                        count + (new > old)
                        for count, new, old in zip(counts, signs, published, strict=True)
                    ]
                    published = signs
                    self._store.set(self._mine, json.dumps(counts))
                now = [
                    json.loads(self._store.get(key)) if self._store.check([key]) else [0, 0]
                    for key in self._others
                ]
                for kind in (0, 1):
                    if [pair[kind] for pair in now] != [pair[kind] for pair in heard]:
                        self._newest[kind] = time.monotonic()
                heard = now


_FORWARD_KEY = "lockstep/forward"
_TELL_SECONDS = 1.0
_WRITE = "write"  # the name under which the durations of whole writes in the background are kept
_STEPS = ("train", "steps")  # calls of which each is one step of the loop


def _under_way(beat: Beat) -> Call | None:
    return (
        next((call for call in reversed(beat.calls) if not call.ended), None)
        if beat.inside
        else None
    )


def _since(beat: Beat) -> float | None:
    """Return when a rank entered Lockstep's code, where it may wait for others.

    None if it is in the user's code.
    """
    call = _under_way(beat)
    if call is not None:
        return call.begun
    return _last_sign(beat) if beat.phase in ("step", "first") else None


def _last_sign(beat: Beat) -> float:
    return max([beat.time, *(max(call.begun, call.ended) for call in beat.calls)])


def _forward(beat: Beat) -> float:
    """Return when the work that a rank does, or waits for, last went forward."""
    return max(beat.forward, beat.write.forward) if beat.awaits_write else beat.forward


def _newest_sign(beat: Beat) -> float:
    """Return when a rank last did anything that its heartbeat tells of."""
    return max(_last_sign(beat), _forward(beat))


def _kind(beat: Beat) -> str:
    return _WRITE if beat.awaits_write else _call_name(beat)


def _call_name(beat: Beat) -> str:
    call = _under_way(beat)
    if call is not None:
        return call.name
    return next((call.name for call in reversed(beat.calls) if call.name in _STEPS), "train")


def _current_call(beat: Beat) -> str:
    name = _call_name(beat)
    return f" in step {beat.step}" if name in _STEPS else f" in {name}, after step {beat.step}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
