"""The ranks that go on after deaths, as the launcher tells them: a file in the ranks' folder.

The way of live recovery (`distributed.on_failure: continue`); on several machines their launchers
agree first (`live_hosts.py`):

    launcher   a rank's process has died → the largest number of ranks that the config allows for
               those that are left → a `LiveWorld` of the next generation, written into the file
    each rank  a thread sees the file → it cuts this process's connections to other ranks, so that
               every wait for them ends, in Python and in C++ → the step ends with an error
               → groups are destroyed → rank and world size are those of the new world
               → the run is built again: the same `place`, the same load, from memory
    spares     ranks without a place in the new world wait for the next one, or for the end

A death while this goes on makes one more generation, and all of it begins again.

`live.py` is the launcher's side, `survivor.py` a rank's. Loads no torch.

Tests: tests/live/test_ranks.py, tests/faults/test_live_recovery.py
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.run_directory.run_files import replace_file


def looks_of(path: Path) -> Path:
    """Return the file that the launcher touches after each look that finds nobody dead.

    A rank with an error waits for such looks: on a busy machine seconds say nothing.

    Args:
        path: of the file with the world.
    """
    return path.with_suffix(".looks")


@dataclass(frozen=True)
class LiveWorld:
    """The processes that train, by the ranks with which they were started, in their new order."""

    generation: int  # number of times that ranks have died since all were started
    members: Sequence[int]
    spares: Sequence[int] = ()
    lost: Sequence[int] = ()  # those whose death has led to it
    ended: bool = False  # the members have done their work: spares may leave
    over: bool = False  # nobody goes on without others any more: the launcher ends the ranks
    died: float = 0.0  # when the lost ranks died, at the earliest (seconds, monotonic)
    noticed: float = 0.0  # when the launcher saw it
    machines: Sequence[int] = ()  # of several: the members', in their order
    gone: Sequence[int] = ()  # machines that were lost as a whole
    refusal: str = ""  # why nobody goes on

    def write(self, path: Path) -> None:
        """Replace what the file says."""
        replace_file(path, self.text)

    @classmethod
    def read(cls, path: Path) -> "LiveWorld":
        """Return what the file says."""
        return cls.of_text(path.read_text())

    @property
    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "LiveWorld":
        """Return what such a text says."""
        return cls(**json.loads(text))

    def on_machine(self, rank: int) -> tuple[int, int]:
        """Return a member's number among those of its machine, and how many they are.

        Args:
            rank: of the member in this world.
        """
        if not self.machines:
            return rank, len(self.members)
        own = self.machines[rank]
        return [*self.machines[:rank]].count(own), [*self.machines].count(own)

    @property
    def each_machine(self) -> int:
        """The largest number of which each machine has a multiple of the members."""
        return math.gcd(*Counter(self.machines).values()) or len(self.members)

    def beats(self, folder: Path) -> Path:
        """Return the folder of its members' heartbeats: each generation counts its calls anew."""
        return folder if self.generation == 0 else folder / f"generation-{self.generation}"
