"""Lets the ranks that are left go on when others have died: the launcher's side.

`world.py` has the way of it. Loads no torch.

Tests: tests/live/test_ranks.py, tests/faults/test_live_recovery.py
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.failures.failure import done_mark
from lockstep.live.world import LiveWorld, looks_of

# Returns whether so many ranks can train. Each machine has a multiple of the second number.
CanTrain = Callable[[int, int], bool]


@dataclass(frozen=True)
class Seen:
    """Holds the findings of one look at the ranks of a machine."""

    began: float  # when (seconds, monotonic)
    failed: frozenset[int]  # ranks whose processes have ended with an error
    killed: frozenset[int]  # of these, those that a signal has ended, and not for an error
    running: bool  # some rank runs


class LiveRanks:
    """Decides which ranks go on, and tells them.

    Args:
        path: of the file that they read.
        beats: the folder of the first heartbeats.
        failures: where ranks mark that their work is done.
        can_train: says how many ranks can go on.
        on_change: is called with each new world.
    """

    def __init__(
        self,
        path: Path,
        beats: Path,
        failures: Path,
        can_train: CanTrain,
        on_change: Callable[[LiveWorld], None],
    ) -> None:
        self._path = path
        self._beats = beats
        self._failures = failures
        self._can_train = can_train
        self._on_change = on_change
        self._looked = time.monotonic()  # when all processes ran that were not lost before
        self.world = LiveWorld(0, ())
        self.refusal = ""  # why the others could not go on

    def begin(self, ranks: int) -> None:
        """Begin with all ranks, which are about to be started."""
        self.refusal = ""
        for beats in self._beats.glob("generation-*"):  # of an earlier start of the ranks
            shutil.rmtree(beats, ignore_errors=True)
        self.tell(self._place(LiveWorld(0, tuple(range(ranks)))))

    @property
    def folder(self) -> Path:
        """The folder of the heartbeats now."""
        return self.world.beats(self._beats)

    def all_ran(self, when: float) -> None:
        """Note that all ranks ran then that were not lost before (seconds, monotonic)."""
        self._looked = when
        looks_of(self._path).touch()

    def look(self, seen: Seen) -> bool:
        """Return whether ranks go on, if need be without those that were killed.

        An error of a rank's own program would come back on the ranks that are left: it ends them
        all, as does a kill of all of them.
        """
        if not seen.failed:
            self.all_ran(seen.began)
            self.end_if_done()
            return seen.running
        if seen.killed != seen.failed or not self.go_on_without({*seen.killed}):
            return False
        self.end_if_done()
        return True

    def go_on_without(self, lost: set[int]) -> bool:
        """Tell the others to go on without these ranks; return whether they can.

        If not, `refusal` says why.
        """
        noticed = time.monotonic()
        world = self.world
        remaining = [rank for rank in (*world.members, *world.spares) if rank not in lost]
        if not lost & set(world.members):  # only spares have died: nobody has to stop for them
            self.tell(replace(world, spares=tuple(remaining[len(world.members) :]), lost=()))
            return True
        if done := [rank for rank in world.members if self._is_done(rank)]:
            self.refusal = f"rank {done[0]} has done its work, and can't take part in steps again"
            return False
        counts = range(len(remaining), 0, -1)
        fitting = (n for n in counts if self._can_train(n, self._each_machine(remaining[:n])))
        most = next(fitting, None)
        if most is None:
            count = (
                f"{len(remaining)} rank{'s' * (len(remaining) != 1)}" if remaining else "no rank"
            )
            self.refusal = f"{count} of {len(world.members) + len(world.spares)} would be left"
            self.refusal += ", and the config can't train on so few" if remaining else ""
            return False
        following = self._place(
            replace(
                world,
                generation=world.generation + 1,
                members=tuple(remaining[:most]),
                spares=tuple(remaining[most:]),
                lost=tuple(sorted(lost)),
                died=self._looked,
                noticed=noticed,
            )
        )
        following.beats(self._beats).mkdir()
        self.tell(following)
        self._on_change(following)
        return True

    def end_if_done(self) -> None:
        """Let the spares leave once all members have done their work."""
        world = self.world
        if world.spares and not world.ended and all(map(self._is_done, world.members)):
            self.tell(replace(world, lost=(), ended=True))

    def give_up(self) -> None:
        """Tell the ranks that none goes on without others any more."""
        if not self.world.over:
            self.tell(replace(self.world, over=True))

    def by_rank(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return the processes of the members on this machine by their ranks now."""
        members = enumerate(self.world.members)
        return {rank: pids[first] for rank, first in members if first in pids}

    def _is_done(self, rank: int) -> bool:
        return (self._failures / done_mark(rank)).exists()

    def _place(self, world: LiveWorld) -> LiveWorld:
        """Return the world with what is known of its machines."""
        return world

    def _each_machine(self, ranks: Sequence[int]) -> int:
        """Return the largest number of which each machine has a multiple of these ranks."""
        return len(ranks)

    def tell(self, world: LiveWorld) -> None:
        """Write the world into the file that the ranks read."""
        self.world = world
        world.write(self._path)
