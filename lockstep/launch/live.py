"""Lets the ranks that are left go on when others have died: the launcher's side.

`world.py` has the way of it. Loads no torch.

Tests: tests/launch/test_live.py, tests/faults/test_live_recovery.py
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.launch.failures import done_mark
from lockstep.launch.world import LiveWorld

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
        self.world = LiveWorld(0, ())

    def begin(self, ranks: int) -> None:
        """Begin with all ranks, which are about to be started."""
        self._tell(LiveWorld(0, tuple(range(ranks))))

    @property
    def folder(self) -> Path:
        """The folder of the heartbeats now."""
        return self.world.beats(self._beats)

    def go_on_without(self, lost: set[int]) -> bool:
        """Tell the others to go on without these ranks; return whether they can."""
        world = self.world
        left = [rank for rank in (*world.members, *world.spares) if rank not in lost]
        if not lost & set(world.members):  # only spares have died: nobody has to stop for them
            self._tell(
                LiveWorld(world.generation, world.members, tuple(left[len(world.members) :]))
            )
            return True
        if any(self._is_done(rank) for rank in world.members):
            return False  # a rank that has left can't take its part in steps again
        most = self._largest(len(left)) if left else None
        if most is None:
            return False
        following = LiveWorld(
            world.generation + 1, tuple(left[:most]), tuple(left[most:]), tuple(sorted(lost))
        )
        beats = following.beats(self._beats)
        shutil.rmtree(beats, ignore_errors=True)  # of an earlier start of the ranks
        beats.mkdir()
        self._tell(following)
        self._on_change(following)
        return True

    def end_if_done(self) -> None:
        """Let the spares leave once all members have done their work."""
        world = self.world
        if world.spares and not world.ended and all(map(self._is_done, world.members)):
            self._tell(LiveWorld(world.generation, world.members, world.spares, (), ended=True))

    def by_rank(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return the processes of the members by their ranks now."""
        return {rank: pids[first] for rank, first in enumerate(self.world.members)}

    def _is_done(self, rank: int) -> bool:
        return (self._failures / done_mark(rank)).exists()

    def _tell(self, world: LiveWorld) -> None:
        self.world = world
        world.write(self._path)
