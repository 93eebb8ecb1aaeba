"""Looks at the learning rates of a training loop, and at the schedules that set them.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.verify.loop.findings import LoopLog
from lockstep.verify.loop.made import MadeObjects
from lockstep.verify.own_lines import own_line


class ScheduleChecks:
    """Looks at schedules: whose learning rates they set, and how often they are stepped."""

    def __init__(self, log: LoopLog, made: MadeObjects) -> None:
        self._log = log
        self._made = made
        self._stepped_at: dict[int, str] = {}  # id of a schedule → where it was stepped last

    def stepped(self, schedule: LRScheduler) -> None:
        """Note where a schedule is stepped."""
        if self._log.looks:
            self._stepped_at[id(schedule)] = own_line()

    def check(self, optimizer: Optimizer, others: list[Any], passes: int) -> None:
        """Find rates that no schedule has set, and schedules that are stepped wrongly.

        `others` are the optimizers that have stepped before, `passes` the backward passes so far.
        """
        schedules = [s for s in self._made.of_kind(LRScheduler) if s.last_epoch > 0]
        for schedule in schedules:
            rates = [float(rate) for rate in schedule.get_last_lr()]
            mine = [float(group["lr"]) for group in optimizer.param_groups]
            if (
                _steps(schedule, optimizer)
                and len(rates) == len(mine)
                and len(schedules) == 1
                and rates != mine
            ):
                text = (
                    f"the optimizer steps with learning rate {mine[0]:.6g}, and its schedule says"
                    f" {rates[0]:.6g}"
                )
                fix = "let nothing but the schedule set the learning rate"
                self._log.find("learning rate schedule", text, fix)
        optimizers = (optimizer, *others)
        if schedules and not any(
            _steps(schedule, each) for schedule in schedules for each in optimizers
        ):
            text = "the schedule changes the learning rate of an optimizer that never steps"
            fix = "make the schedule for the optimizer that steps"
            line = self._made.line_of(schedules[-1])
            self._log.find("learning rate schedule", text, fix, line)
        stepped = max((schedule.last_epoch for schedule in schedules), default=0)
        updates = self._log.steps + 1
        if updates > 1 and passes >= 1.5 * updates and stepped >= passes - 1 > updates:
            text = (
                f"the schedule was stepped {stepped} times in {updates} optimizer steps: once for"
                " each micro-batch"
            )
            fix = "step it once for each optimizer.step()"
            line = self._stepped_at.get(id(schedules[-1]), "")
            self._log.find("learning rate schedule", text, fix, line)


def _steps(schedule: LRScheduler, optimizer: Optimizer) -> bool:
    """Return whether a schedule belongs to an optimizer.

    It may also belong to a wrapper around the optimizer, which has its groups.
    """
    return (
        schedule.optimizer is optimizer or schedule.optimizer.param_groups is optimizer.param_groups
    )
