"""Notes what a script makes, registers, steps and seeds around its passes, with its own lines.

Tests: tests/verify/test_own_lines.py, tests/verify/test_script.py
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.verify.own_lines import own_line
from lockstep.verify.script.observed.observed_pass import AppliedConditions, GeneratorStates
from lockstep.verify.script.record import FSDP_CASTS, ScriptRecord
from lockstep.verify.script.task import Conditions


class NotedCalls:
    """Notes calls of one process, and says which of them its conditions leave out.

    Args:
        record: receives what is noted.
        conditions: of the run.
        generators: say whether a pass has begun.
        applied: says whether Lockstep itself seeds.
        is_active: returns whether what happens now is recorded.
    """

    def __init__(
        self,
        record: ScriptRecord,
        conditions: Conditions,
        generators: GeneratorStates,
        applied: AppliedConditions,
        is_active: Callable[[], bool],
    ) -> None:
        self._record = record
        self._conditions = conditions
        self._generators = generators
        self._applied = applied
        self._is_active = is_active
        self.sharded_dtypes: set[str] = set()  # in which FSDP lets layers compute

    def module_sharded(self, dtype: str) -> bool:
        """Note where FSDP is applied, and return whether it may cast to a dtype."""
        self._record.lines.note_sharded(own_line())
        if dtype:
            self.sharded_dtypes.add(f"{FSDP_CASTS} to {dtype}")
        return not self._conditions.full_precision

    def hook_registered(self, name: str, of_torch: bool) -> bool:
        """Note a communication hook, and return whether it is registered."""
        self._record.hooks.append((name, of_torch))
        self._record.lines.note_hook(own_line())
        return not self._conditions.plain_reduction

    def schedule_stepped(self, schedule: LRScheduler) -> None:
        """Note where a learning rate schedule is stepped."""
        if schedule.last_epoch > 0:  # else it is made
            self._record.lines.note_schedule(own_line())

    def plateau_looked_for(self, metric: float) -> None:
        """Note the number that a schedule is given which looks for a plateau."""
        if self._is_active():
            self._record.metrics.append(metric)
            self._record.lines.note_schedule(own_line())

    def broadcast(self, text: str) -> None:
        """Note a loss whose predictions and targets broadcast."""
        if torch.is_grad_enabled():  # else it may be a metric
            self._record.broadcasts.setdefault(own_line(), text)

    def seeded(self, seed: Any) -> None:
        """Note a seed that the script sets before it trains."""
        has_begun = self._record.batches or self._record.steps
        by_script = not self._applied.seeding and not self._generators.in_pass
        if by_script and not has_begun:
            self._record.lines.seeds.append((own_line(), str(seed)))
