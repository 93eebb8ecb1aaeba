"""Reads what is private in torch's pipeline schedules: whether shapes are known, and DualPipeV's pairs of actions.

Public torch: a schedule infers shapes by running the model on uninitialised memory. DualPipeV sends what the first pass
of a pair put out after the second: the next stage would wait for nothing.
Seen to work: torch 2.11.0 to 2.15.0.
When gone: a schedule calls the stage's inference of shapes, which Lockstep's does not have; DualPipeV runs in pairs:
the same numbers, more waiting.
"""

import re
from typing import Any

from torch.distributed.pipelining.schedules import ScheduleDualPipeV

_INITIALIZED = re.compile(r"_stages?(_forward|_backward)?_initialized")


def skip_shape_inference(schedule: Any) -> None:
    """Have a schedule take the shapes of its stages as known."""
    for flag in [name for name in vars(schedule) if _INITIALIZED.fullmatch(name)]:
        setattr(schedule, flag, True)


class UnpairedDualPipeV(ScheduleDualPipeV):
    """DualPipeV with each forward pass that it pairs with a backward pass in its own place."""

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        paired = super()._calculate_single_rank_operations(rank)
        return [part for action in paired for part in (action and action.sub_actions) or (action,)]
