"""Lets ranks on several hosts go on when others have died: the launchers' side.

The launchers tell each other through the store where they meet:

    each launcher   what it has seen of its ranks: killed, failed, done; and that it lives itself
    the first one   (of the machine of rank 0) who goes on, for all of them: a `LiveWorld`
    each launcher   writes it into the file of its own ranks; the rest is as on one machine

A launcher that says nothing for `SILENT_SECONDS` is taken for lost, with its ranks. One that hears
nothing for so long, because the first one or the host of the store is gone, ends its ranks: nobody
could tell them who goes on. A launcher that reads that it was taken for lost does so, too.

Loads no torch.

Tests: tests/live/test_hosts.py, tests/faults/test_live_hosts.py
"""

import json
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import RunError, UsageError, first_line
from lockstep.failures.failure import done_mark
from lockstep.live.ranks import LiveRanks, Seen
from lockstep.live.world import LiveWorld
from lockstep.store_threads import StoreThread

SILENT_SECONDS = 10.0  # after which a launcher that says nothing is taken for lost
_EXCHANGE_SECONDS = 0.03  # between two words with the store
_BEAT_SECONDS = 0.3  # a launcher says that it lives at least so often
_GAP_SECONDS = 1.0  # counts at most, of a time in which this launcher itself was not running
_LOOKS_FOR_FILE = 25  # a network file system may show a new file a moment later
_LOOK_SECONDS = 0.2
_KEY = "lockstep/live"


@dataclass
class _LauncherReport:
    """Holds the words of one launcher to the others."""

    beat: int = 0  # grows as long as it lives
    looks: int = 0  # after which it had found none of its ranks dead
    killed: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    refusal: str | None = None  # why its ranks don't go on without others any more


class LiveHosts(LiveRanks):
    """Decides with the launchers of other hosts which ranks go on, and tells those of this host.

    Arguments are those of `LiveRanks`. `meet` comes before each `begin`.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._store: Any = None
        self._number = 0  # of this launcher
        self._machine_of: dict[int, int] = {}  # rank → its launcher
        self._thread: StoreThread | None = None
        self._lock = threading.Lock()  # of the file, and of `world`
        self._report = _LauncherReport()
        self._heard: dict[int, _LauncherReport] = {}
        self._silent: dict[int, float] = {}  # launcher → seconds in which it has said nothing
        self._answered = 0  # times that the store has answered
        self._seen_answers = 0
        self._unanswered = 0.0  # seconds
        self._looked_at = time.monotonic()
        self._cut_off: str | None = None  # why this launcher hears of no other any more
        self._closed = False  # the store was closed: its host's launcher has ended
        self._looks_of_all: dict[int, int] = {}
        self._rounds = 0  # looks of all launchers
        self._round_began = time.monotonic()

    def meet(self, store: Any, number: int, count: int, ranks: Sequence[int]) -> None:
        """Learn whose ranks are where, before they are started.

        Args:
            store: of this start of the ranks.
            number: of this launcher.
            count: of launchers.
            ranks: those that this launcher starts.

        Raises:
            UsageError: the launchers do not share the run directory.
        """
        self.close()
        self._store = store
        self._number = number
        self._require_shared(store, number, count)
        # what others read of this launcher is there from now on
        store.set(f"{_KEY}/said/{number}", json.dumps(vars(_LauncherReport())))
        if number == 0:
            store.set(f"{_KEY}/world", "")
            store.set(f"{_KEY}/rounds", "0")
        store.set(f"{_KEY}/ranks/{number}", json.dumps(list(ranks)))
        theirs = [json.loads(store.get(f"{_KEY}/ranks/{each}")) for each in range(count)]
        self._machine_of = {rank: each for each, some in enumerate(theirs) for rank in some}

    def _require_shared(self, store: Any, number: int, count: int) -> None:
        """Raise a UsageError unless each launcher sees the folder of the first one's marks."""
        key = f"{_KEY}/shared"
        mark = self._failures / f"shared-{secrets.token_hex(8)}"
        if number == 0:
            mark.touch()
            store.set(key, mark.name)
        mark = self._failures / store.get(key).decode()
        for _ in range(_LOOKS_FOR_FILE):
            if mark.exists():
                break
            time.sleep(_LOOK_SECONDS)
        store.set(f"{key}/{number}", str(int(mark.exists())))
        seen = [int(store.get(f"{key}/{each}")) for each in range(count)]
        mark.unlink(missing_ok=True)
        if not all(seen):
            raise UsageError(
                "on_failure: continue needs a run directory that all machines share",
                where=f"distributed.on_failure, and {self._failures.parent.parent}",
                why="ranks that go on without rank 0 write on where it has written",
                fix="choose an --output-dir that all machines mount; or write on_failure: restart,"
                " and start with --max-restarts N",
            )

    def begin(self, ranks: int) -> None:
        """Begin with all ranks of all hosts, and talk to the other launchers from now on.

        Args:
            ranks: number of those of this host.
        """
        self._report = _LauncherReport()
        others = [each for each in set(self._machine_of.values()) if each != self._number]
        self._heard = {each: _LauncherReport() for each in others}
        self._silent = dict.fromkeys(others, 0.0)
        self._cut_off = None
        self._closed = False
        self._unanswered = 0.0
        self._looked_at = self._round_began = time.monotonic()
        self._looks_of_all = {}
        self._rounds = 0
        super().begin(len(self._machine_of))
        self._thread = StoreThread(self._talk, "live-hosts")

    def close(self) -> None:
        """Talk to the others no more."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    @property
    def lost_machines(self) -> set[int]:
        """The launchers that were taken for lost."""
        return set(self.world.gone)

    @property
    def keeps_copies(self) -> bool:
        """Return whether this launcher saves the newest copy in memory when the launch fails.

        The first one does. If it has ended, which its store shows, the next one: where only the
        link is cut, the others may train on.
        """
        others = set(self._machine_of.values()) - {0, *self.world.gone}
        return self._number == 0 or (self._closed and self._number == min(others))

    # ---- in the thread that watches the ranks ----

    def look(self, seen: Seen) -> bool:
        """Tell the others what was seen of this host's ranks; return whether ranks go on.

        Raises:
            RunError: this launcher hears of no other any more, or was taken for lost.
        """
        self._require_others()
        report = self._report
        report.killed = sorted({*report.killed, *seen.killed})
        report.done = [
            rank for rank in self._local_ranks if (self._failures / done_mark(rank)).exists()
        ]
        if not seen.failed:
            report.looks += 1
        elif seen.failed != seen.killed:
            return False
        world = self.world
        if world.over:
            return False
        if seen.failed:  # the first launcher says who goes on
            return True
        has_place = any(rank in self._local_ranks for rank in (*world.members, *world.spares))
        return seen.running or (not has_place and not world.ended)

    @property
    def _local_ranks(self) -> list[int]:
        return [rank for rank, machine in self._machine_of.items() if machine == self._number]

    def give_up(self) -> None:
        """Tell all ranks that none goes on without others any more, unless they have ended well."""
        world = self.world
        own = set(self._local_ranks) & {*world.members, *world.spares}
        ended_well = {*self._report.done, *(world.spares if world.ended else ())}
        if world.over or own <= ended_well:
            return
        self._report.refusal = self.refusal or ""
        super().give_up()

    def _require_others(self) -> None:
        """Raise a RunError where no other launcher can say any more who goes on."""
        now = time.monotonic()
        waited = min(now - self._looked_at, _GAP_SECONDS)
        self._looked_at = now
        answered = self._answered
        self._unanswered = 0.0 if answered != self._seen_answers else self._unanswered + waited
        self._seen_answers = answered
        fix = "start the command again on all machines: the run goes on from its newest checkpoint"
        if self._number in self.world.gone:
            raise RunError(
                "the other machines have gone on without this one",
                why=f"its launcher gave no sign of life for {SILENT_SECONDS:g} s",
                fix="if it was only slow, start the command again on all machines",
            )
        if self.world.over:
            return
        if self._cut_off is not None or self._unanswered > SILENT_SECONDS:
            raise RunError(
                "the launcher of rank 0's machine, which says who goes on after deaths, is gone, or"
                " the machine where the launchers meet",
                why=self._cut_off or f"no answer for {SILENT_SECONDS:g} s: the link is cut",
                fix=fix,
            )

    # ---- in the thread that talks to the others ----

    def _talk(self, thread: StoreThread) -> None:
        """Say what this launcher has seen, and hear or decide who goes on, until it is closed."""
        sent = ""
        said_at = before = time.monotonic()
        leads = self._number == 0
        try:
            if leads:
                self._publish()
            while not thread.closing.wait(_EXCHANGE_SECONDS):
                now = time.monotonic()
                report = self._report
                text = json.dumps([report.looks, report.killed, report.done, report.refusal])
                if text != sent or now - said_at > _BEAT_SECONDS:
                    report.beat += 1
                    self._store.set(f"{_KEY}/said/{self._number}", json.dumps(vars(report)))
                    sent = text
                    said_at = now
                self._hear(min(now - before, _GAP_SECONDS))
                before = now
                if leads:
                    self._decide()
                else:
                    self._follow()
                self._answered += 1
        except (RuntimeError, ValueError) as error:  # the host of the store is gone
            self._closed = isinstance(error, RuntimeError)
            self._cut_off = first_line(error)

    def _hear(self, elapsed: float) -> None:
        """Read what other launchers say; on others than the first one, what that one says."""
        gone = self.world.gone
        of = [each for each in self._heard if each not in gone and 0 in (self._number, each)]
        texts = self._store.multi_get([f"{_KEY}/said/{each}" for each in of]) if of else []
        for each, text in zip(of, texts, strict=True):
            report = _LauncherReport(**json.loads(text))
            is_new = report.beat != self._heard[each].beat
            self._heard[each] = report
            self._silent[each] = 0.0 if is_new else self._silent[each] + elapsed

    def _decide(self) -> None:
        """Say who goes on, as the first launcher."""
        world = self.world
        reports = {self._number: self._report, **self._heard}
        silent = {each for each, seconds in self._silent.items() if seconds > SILENT_SECONDS}
        refusals = [report.refusal for report in reports.values() if report.refusal is not None]
        if world.over or refusals:
            if not world.over:
                self.refusal = refusals[0]
                super().give_up()
            self._publish()
            return
        ranks = {*world.members, *world.spares}
        lost = {rank for report in reports.values() for rank in report.killed}
        lost |= {rank for rank, machine in self._machine_of.items() if machine in silent}
        lost &= ranks
        new_gone = silent - set(world.gone)
        if new_gone:
            with self._lock:
                self.world = replace(world, gone=tuple(sorted({*world.gone, *silent})))
        if lost:
            if not self.go_on_without(lost):
                self._report.refusal = self.refusal
                super().give_up()
        elif new_gone:
            self.tell(self.world)
        elif not silent or silent <= set(world.gone):
            self._note_look(reports)
            self.end_if_done()
        if self.world is not world:
            self._publish()

    def _note_look(self, reports: Mapping[int, _LauncherReport]) -> None:
        """Note a look of all launchers that have ranks, once each has looked again."""
        machines = {self._machine_of[rank] for rank in (*self.world.members, *self.world.spares)}
        looks = {each: reports[each].looks for each in machines}
        running = [each for each in machines if not self._are_done(each)]
        if running and all(looks[each] > self._looks_of_all.get(each, 0) for each in running):
            self._looks_of_all = looks
            self._rounds += 1
            self._store.set(f"{_KEY}/rounds", str(self._rounds))
            self._note_round()

    def _are_done(self, machine: int) -> bool:
        ranks = {rank for rank in self.world.members if self._machine_of[rank] == machine}
        return ranks <= {rank for rank in ranks if self._is_done(rank)}

    def _note_round(self) -> None:
        """Note that all ranks ran when the round before this one was over."""
        self.all_ran(self._round_began)
        self._round_began = time.monotonic()

    def _publish(self) -> None:
        world = replace(self.world, refusal=self.refusal)
        self._store.set(f"{_KEY}/world", world.text)

    def _follow(self) -> None:
        """Hear who goes on, and tell this host's ranks."""
        if self._silent.get(0, 0.0) > SILENT_SECONDS:
            raise ValueError(f"no sign of life for {SILENT_SECONDS:g} s")
        text, rounds = self._store.multi_get([f"{_KEY}/world", f"{_KEY}/rounds"])
        if int(rounds) != self._rounds:
            self._rounds = int(rounds)
            self._note_round()
        if not text:
            return
        announced = LiveWorld.of_text(text.decode())
        self.refusal = announced.refusal
        world = self.world
        if announced.generation > world.generation:
            # clocks of machines are not compared
            announced = replace(announced, died=self._looked, noticed=time.monotonic())
            if self._number not in announced.gone:
                announced.beats(self._beats).mkdir(exist_ok=True)
        else:
            announced = replace(announced, died=world.died, noticed=world.noticed)
        announced = replace(announced, over=announced.over or world.over, refusal="")
        if announced.text != world.text:
            if self._number in announced.gone:
                self.world = announced  # these ranks are ended: they are told nothing more
            else:
                self.tell(announced)

    # ---- what differs from one machine ----

    def _is_done(self, rank: int) -> bool:
        return any(rank in report.done for report in (self._report, *self._heard.values()))

    def end_if_done(self) -> None:
        """Let spares, and launchers whose ranks are lost, leave once all have done their work."""
        world = self.world
        if not world.ended and all(map(self._is_done, world.members)):
            self.tell(replace(world, lost=(), ended=True))

    def _place(self, world: LiveWorld) -> LiveWorld:
        return replace(world, machines=tuple(self._machine_of[rank] for rank in world.members))

    def _each_machine(self, ranks: Sequence[int]) -> int:
        return math.gcd(*Counter(self._machine_of[rank] for rank in ranks).values())

    def tell(self, world: LiveWorld) -> None:
        """Tell the ranks of this machine who goes on."""
        with self._lock:
            super().tell(world)
