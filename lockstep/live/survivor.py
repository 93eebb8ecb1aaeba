"""Takes a rank through the deaths of others: the rank's side of live recovery.

`world.py` has the way of it. Waits for other ranks happen in many places: in Python, in autograd's
threads of C++, in DDP's reducer, in FSDP2. None of them can be polled from outside, and a gloo rank
that is not a neighbour of the dead one would learn of it after its timeout only. So the sockets are
cut instead: gloo then ends every wait on them with "Connection closed by peer", wherever it is.

One wait has no socket: a group that is made waits for each rank to connect, also for one that has
died after it had told its address, and beyond the group's timeout. So groups are made in a thread,
which is left behind then.

Tests: tests/live/test_survivor.py, tests/faults/test_live_recovery.py
"""

import gc
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_DONE, EXIT_PREEMPTED, UsageError, lost_a_peer
from lockstep.heartbeat.files import FOLDER
from lockstep.heartbeat.writer import begin_anew, own_heartbeat
from lockstep.live.world import LiveWorld, looks_of
from lockstep.machine import cores, signals
from lockstep.machine.environment import GENERATION, PER_MACHINE, rank_facts
from lockstep.machine.output import say
from lockstep.process_group import cluster
from lockstep.run_directory import recovery_clock
from lockstep.run_directory.rank_output import show_output
from lockstep.store_threads import answer_within
from lockstep.torch_compat import group_creation

_LOOK_SECONDS = 0.02
# The least time to wait for the launcher's word: after a lost connection, and after another error.
# The kernel closes the connections of a dead process before it tells of its end.
_WORD_SECONDS = 10.0
_WORD_AFTER_ERROR_SECONDS = 1.0
# Looks of the launcher to wait for. One of them may have begun before the error; of several hosts,
# as many as there are words between their launchers.
_LOOKS = 6


def through_deaths(work: Callable[[], int], path: Path) -> int:
    """Run `work()`, and run it again as a rank of the next world when others have died.

    Args:
        work: builds the run, and trains it to its end; returns the exit code.
        path: of the file that the launcher writes.
    """
    survivor = Survivor(path, Path(os.environ[FOLDER]))
    try:
        while True:
            world = None
            try:
                return work()
            except Exception as error:  # whatever a wait that was ended has led to
                world = survivor.world_after(error)
                if world is None:
                    raise
            # here the error is forgotten, and with it the frames that hold the model
            code = survivor.enter(world)
            if code is not None:
                return code
    finally:
        survivor.close()


class Survivor:
    """This process among the ranks of a launch that goes on after deaths.

    Args:
        path: of the file that the launcher writes.
        beats: the folder of the first heartbeats.
    """

    def __init__(self, path: Path, beats: Path) -> None:
        self._path = path
        self._beats = beats
        self._me = rank_facts().rank
        self._entered = 0  # generation of the world that this process is in, or enters
        self._seen = LiveWorld(0, (), ())
        self._stamp: tuple[int, int] = (0, 0)
        # At which this rank has listened for others, in any world. Of two ranks one has connected
        # to the other, so that each connection is cut at one of its ends; what other threads of
        # this process have opened meanwhile stays.
        self._ports: set[int] = set()
        # Held while connections are cut, so that none of the world that is entered can be among
        # them, however long the thread may be kept from running.
        self._leaving = threading.Lock()
        self._closing = threading.Event()
        group_creation.make_each_by(self._make_group)
        # It waits in Python and in C alone, so that the interpreter may end around it.
        self._watch = threading.Thread(target=self._look, name="survivor", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Stop looking for a new world."""
        self._closing.set()
        group_creation.restore()

    def world_after(self, error: BaseException) -> LiveWorld | None:
        """Return the world in which to go on after an error; None: the error is this rank's own."""
        seconds = _seconds_to_wait(error)
        deadline = time.monotonic() + seconds
        seen = self._last_look()
        looks = 0 if seconds else _LOOKS
        while not self._is_over():
            if self._seen.over or (time.monotonic() > deadline and looks >= _LOOKS):
                return None
            time.sleep(_LOOK_SECONDS)
            now = self._last_look()
            looks += now != seen
            seen = now
        return self._seen

    def _last_look(self) -> int:
        """Return when the launcher last found nobody dead (nanoseconds)."""
        with suppress(FileNotFoundError):
            return looks_of(self._path).stat().st_mtime_ns
        return 0

    def enter(self, world: LiveWorld) -> int | None:
        """Become a rank of the world; return the exit code instead if this process is to end."""
        recovery_clock.begin(world.died, world.noticed)
        recovery_clock.end_of("agreed")
        # the groups' other ends are gone: there is nothing to wait for, and nobody to tell
        with suppress(RuntimeError):
            cluster.cleanup()
        cluster.count_worlds_anew()
        # a rank that had its groups and one that waited for them in vain call the next ones alike
        group_creation.begin_anew(world.generation)
        with self._leaving:
            self._entered = world.generation
        gc.collect()  # cycles through the model would hold its memory
        if self._me in world.spares:
            return self._wait_for_a_place()
        rank = [*world.members].index(self._me)
        count = str(len(world.members))
        local_rank, ranks_here = world.on_machine(rank)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": str(ranks_here),
            PER_MACHINE: str(world.each_machine),
            GENERATION: str(world.generation),
            FOLDER: str(world.beats(self._beats)),
        }
        begin_anew()
        cores.bind_again(local_rank, ranks_here)
        if rank == 0:
            show_output()
        say(
            f"{count} ranks go on, this one as rank {rank}: rank"
            f" {', '.join(map(str, world.lost))} has died"
        )
        return None

    def _wait_for_a_place(self) -> int | None:
        """Wait until a world has a place for this spare; return an exit code if none will."""
        asked = threading.Event()
        signals.listen(lambda _number: asked.set())
        while not asked.wait(_LOOK_SECONDS):
            world = self._seen
            if world.ended:
                return EXIT_DONE
            if world.generation > self._entered:
                return self.enter(world)
        return EXIT_PREEMPTED

    def _look(self) -> None:
        """Read the file whenever it changes; cut connections until this rank has left its world."""
        while not self._closing.wait(_LOOK_SECONDS):
            with suppress(OSError, ValueError):
                status = self._path.stat()
                stamp = (status.st_ino, status.st_mtime_ns)
                if stamp != self._stamp:
                    self._seen = LiveWorld.read(self._path)
                    self._stamp = stamp
            with self._leaving:
                if self._is_over():
                    own_heartbeat().note_death()
                    self._cut()

    def _make_group(self, make: Callable[[], Any]) -> Any:
        """Make a group, and note where it listens; give up when a rank has died meanwhile."""
        before = _listening_ports()
        try:
            return answer_within(math.inf, make, given_up=self._is_over)
        finally:
            self._ports |= _listening_ports() - before

    def _is_over(self) -> bool:
        """Return whether the world that this process is in, or enters, is over."""
        return self._seen.generation > self._entered

    def _cut(self) -> None:
        """Shut down all connections to other ranks, and to the store where they meet.

        The store's, because a rank may wait there for one that has died.
        """
        store = int(os.environ.get("MASTER_PORT", "0"))
        for connection in _internet_sockets():
            if _listens(connection):
                continue  # gloo aborts the process when a listener of its ends
            with suppress(OSError):  # it has no other end any more
                if connection.getsockname()[1] in self._ports or (
                    connection.getpeername()[1] == store
                ):
                    connection.shutdown(socket.SHUT_RDWR)


def _seconds_to_wait(error: BaseException) -> float:
    """Return how long an error may come before the launcher's word of the death behind it.

    A wrong use is a rank's own mistake, unless it explains a lost connection: a rank that left for
    the next world is missed by those that are still in this one.
    """
    reason: BaseException | None = error
    seen: list[BaseException] = []  # an error may be raised from itself
    while reason is not None and reason not in seen:
        if lost_a_peer(reason):
            return _WORD_SECONDS
        seen.append(reason)
        reason = reason.__cause__ or reason.__context__
    return 0.0 if isinstance(error, UsageError) else _WORD_AFTER_ERROR_SECONDS


def _internet_sockets() -> Iterator[socket.socket]:
    """Yield the sockets of this process that speak TCP or UDP, each open for the moment (Linux)."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening_ports() -> set[int]:
    """Return the ports at which this process listens."""
    return {
        connection.getsockname()[1] for connection in _internet_sockets() if _listens(connection)
    }
