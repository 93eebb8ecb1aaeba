"""Reads what is private in torch's pipeline schedules: DualPipeV's pairs of passes.

Public torch: DualPipeV lists a forward and a backward pass as one entry, which is neither. Seen to
work: torch 2.11.0 to 2.15.0. When gone: DualPipeV's list has pairs, of which nothing here knows
what they are: a pipeline lacks passes, and the simulated run of its program ends with "the
schedules wait for each other".
"""

from typing import Any

from torch.distributed.pipelining.schedules import ScheduleDualPipeV


class UnpairedDualPipeV(ScheduleDualPipeV):
    """DualPipeV with each forward pass that it pairs with a backward pass in its own place."""

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        paired = super()._calculate_single_rank_operations(rank)
        return [part for action in paired for part in (action and action.sub_actions) or (action,)]
