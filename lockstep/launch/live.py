"""Lets the ranks that are left go on when others have died: the launcher's side.

`world.py` has the way of it. Loads no torch.

Tests: tests/launch/test_live.py, tests/faults/test_live_recovery.py
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.launch.failures import done_mark
from lockstep.launch.world import LiveWorld, looks_of

# Returns the largest number of ranks, up to the given one, that can train; None: no number can.
LargestWorld = Callable[[int], int | None]


class LiveRanks:
    """Decides which ranks go on, and tells them.

    Args:
        path: of the file that they read.
        beats: the folder of the first heartbeats.
        failures: where ranks mark that their work is done.
        largest: chooses how many ranks go on.
        on_change: is called with each new world.
    """

    def __init__(
        self,
        path: Path,
        beats: Path,
        failures: Path,
        largest: LargestWorld,
        on_change: Callable[[LiveWorld], None],
    ) -> None:
        self._path = path
        self._beats = beats
        self._failures = failures
        self._largest = largest
        self._on_change = on_change
        self._looked = time.monotonic()  # when all processes ran that were not lost before
        self.world = LiveWorld(0, ())
        self.refusal = ""  # why the others could not go on

    def begin(self, ranks: int) -> None:
        """Begin with all ranks, which are about to be started."""
        self.refusal = ""
        for beats in self._beats.glob("generation-*"):  # of an earlier start of the ranks
            shutil.rmtree(beats, ignore_errors=True)
        self._tell(LiveWorld(0, tuple(range(ranks))))

    @property
    def folder(self) -> Path:
        """The folder of the heartbeats now."""
        return self.world.beats(self._beats)

    def all_ran(self, when: float) -> None:
        """Note that all ranks ran then that were not lost before (seconds, monotonic)."""
        self._looked = when
        looks_of(self._path).touch()

    def go_on_without(self, lost: set[int]) -> bool:
        """Tell the others to go on without these ranks; return whether they can.

        If not, `refusal` says why.
        """
        noticed = time.monotonic()
        world = self.world
        left = [rank for rank in (*world.members, *world.spares) if rank not in lost]
        if not lost & set(world.members):  # only spares have died: nobody has to stop for them
            self._tell(
                LiveWorld(world.generation, world.members, tuple(left[len(world.members) :]))
            )
            return True
        if done := [rank for rank in world.members if self._is_done(rank)]:
            self.refusal = f"rank {done[0]} has done its work, and can't take part in steps again"
            return False
        most = self._largest(len(left)) if left else None
        if most is None:
            count = f"{len(left)} rank{'s' * (len(left) != 1)}" if left else "no rank"
            self.refusal = f"{count} of {len(world.members) + len(world.spares)} would be left"
            self.refusal += ", and the config can't train on so few" if left else ""
            return False
        following = LiveWorld(
            world.generation + 1,
            tuple(left[:most]),
            tuple(left[most:]),
            tuple(sorted(lost)),
            died=self._looked,
            noticed=noticed,
        )
        following.beats(self._beats).mkdir()
        self._tell(following)
        self._on_change(following)
        return True

    def end_if_done(self) -> None:
        """Let the spares leave once all members have done their work."""
        world = self.world
        if world.spares and not world.ended and all(map(self._is_done, world.members)):
            self._tell(replace(world, lost=(), ended=True))

    def give_up(self) -> None:
        """Tell the ranks that none goes on without others any more."""
        if not self.world.over:
            self._tell(replace(self.world, over=True))

    def by_rank(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return the processes of the members by their ranks now."""
        return {rank: pids[first] for rank, first in enumerate(self.world.members)}

    def _is_done(self, rank: int) -> bool:
        return (self._failures / done_mark(rank)).exists()

    def _tell(self, world: LiveWorld) -> None:
        self.world = world
        world.write(self._path)
