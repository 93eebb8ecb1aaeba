"""The smallest data set, whose ranks die in an update that only some of the ranks have made.

DIE_IN_UPDATE=10:2:1,18:0: holds two deaths, each an update, the rank that dies and ranks that are
behind. The ranks that are named here stand before their update until all others have made theirs;
then the first one dies, and those behind go on once the launcher has said so.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.heartbeat.writer import went_forward
from tests.faults.tiny import Points, events

__all__ = ["Points"]

RANKS = 4
RUN = Path("run")


class Death(NamedTuple):
    """A death in an update, by the ranks' first numbers."""

    update: int
    dies: int
    behind: frozenset[int]


def _deaths(text: str) -> list[Death]:
    found = []
    for one in filter(None, text.split(",")):
        update, dies, *behind = one.split(":")
        found.append(Death(int(update), int(dies), frozenset(map(int, filter(None, behind)))))
    return found


def updates_of(optimizer: Optimizer) -> int:
    """Return the number of updates that an optimizer has made, the loaded ones too."""
    return max(
        (int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0
    )


def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        went_forward()  # it does not hang
        time.sleep(0.01)


def _arm(deaths: list[Death], rank: int) -> None:
    """Have this rank die, be behind or be ahead in each of these updates."""

    def current(update: int) -> tuple[int, Death] | None:
        """Return the death in this update, and its number, if it has not been told yet."""
        for number, death in enumerate(deaths, start=1):
            if death.update == update and len(events(RUN, "recovery")) < number:
                return number, death
        return None

    def others_are_ahead(death: Death) -> bool:
        dead = {earlier.dies for earlier in deaths if earlier.update <= death.update}
        others = set(range(RANKS)) - dead - death.behind
        return all(Path(f"ahead-{death.update}-{other}").exists() for other in others)

    def before(optimizer: Optimizer, *_: Any) -> None:
        found = current(updates_of(optimizer) + 1)
        if found is None:
            return
        number, death = found
        if rank in {death.dies, *death.behind}:
            _wait_until(lambda: others_are_ahead(death))
        if rank == death.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank in death.behind:
            _wait_until(lambda: len(events(RUN, "recovery")) >= number)

    def after(optimizer: Optimizer, *_: Any) -> None:
        update = updates_of(optimizer)
        found = current(update)
        if found is not None and rank not in found[1].behind:
            Path(f"ahead-{update}-{rank}").touch()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


if "DIE_IN_UPDATE" in os.environ and "RANK" in os.environ:
    _arm(_deaths(os.environ["DIE_IN_UPDATE"]), int(os.environ["RANK"]))
