"""Describes each schedule (stages per rank, their placement, numbers of micro-batches), and builds or lists torch's.

A stage that is placed `loop` goes to rank (stage mod ranks); placed `v`, the ranks are walked back and forth:

    loop, 2 ranks × 2    rank 0: stages 0, 2    rank 1: stages 1, 3
    v                    rank 0: stages 0, 3    rank 1: stages 1, 2
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV, get_schedule_class

from lockstep.costs.steps import ScheduledPass
from lockstep.parallel.pipeline.torch_stage import Stage
from lockstep.torch_compat.pipeline_schedules import UnpairedDualPipeV, skip_shape_inference


@dataclass(frozen=True)
class ScheduleFacts:
    """The properties of a schedule that are needed before it is built."""

    name: str  # of torch's class, without `Schedule`
    stages_per_rank: int | None = None  # how many it takes; None: any number
    v_shaped: bool = False  # stages are placed back and forth over the ranks, else round and round
    splits_backward: bool = False  # gradients of inputs and of weights are computed at different times

    def padded(self, count: int, ranks: int, stages: int) -> int:
        """Return the smallest number of micro-batches, at least `count`, that the schedule takes."""
        if self.name in ("1F1B", "DualPipeV"):
            return max(count, stages)
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            return -(-count // ranks) * ranks
        return count


SCHEDULES = {
    facts.name: facts
    for facts in (
        ScheduleFacts("GPipe", stages_per_rank=1),
        ScheduleFacts("1F1B", stages_per_rank=1),
        ScheduleFacts("Interleaved1F1B"),
        ScheduleFacts("LoopedBFS"),
        ScheduleFacts("InterleavedZeroBubble", splits_backward=True),
        ScheduleFacts("ZBVZeroBubble", stages_per_rank=2, v_shaped=True, splits_backward=True),
        ScheduleFacts("DualPipeV", stages_per_rank=2, v_shaped=True, splits_backward=True),
    )
}


def rank_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the pipeline rank that holds a stage."""
    lap, place = divmod(stage, ranks)
    return ranks - 1 - place if v_shaped and lap % 2 else place


# Its error message is the whole table of actions, on every rank; the exception itself says what went wrong.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


def run_of(name: str, stages: Sequence[Stage], count: int) -> Callable[[], None]:
    """Return what runs `count` micro-batches on this rank's stages, ascending, by a schedule, after their `begin`."""
    # The last stage returns its loss, made from a micro-batch that it knows: what is passed here is only counted.
    targets = {"target": torch.arange(count)} if any(stage.is_last for stage in stages) else {}
    return partial(build(name, stages, count).step, **targets, return_outputs=False)


def build(name: str, stages: Sequence[Any], count: int) -> Any:
    """Return torch's schedule object; `stages` may be stand-ins if it is not run."""
    kind: Any = get_schedule_class(name)
    kind = UnpairedDualPipeV if kind is ScheduleDualPipeV else kind
    several = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(
        list(stages) if several else stages[0],
        n_microbatches=count,
        loss_fn=lambda output, _target: output,
        scale_grads=False,  # the loss is a sum over the step: nothing is divided by the number of micro-batches
    )
    skip_shape_inference(schedule)
    return schedule


def actions(name: str, ranks: int, stages_per_rank: int, count: int) -> list[list[ScheduledPass]]:
    """Return what each rank computes in a run, in order. This needs no process group."""
    if name == "1F1B":  # torch runs it without a list of actions; the list that it draws is another one
        orders = []
        for rank in range(ranks):
            ahead = min(count, ranks - rank)
            forward = [ScheduledPass("F", rank, i) for i in range(count)]
            backward = [ScheduledPass("B", rank, i) for i in range(count)]
            pairs = [each for pair in zip(backward, forward[ahead:], strict=False) for each in pair]
            orders.append(forward[:ahead] + pairs + backward[count - ahead :])
        return orders
    stages = ranks * stages_per_rank
    stand_ins = [
        SimpleNamespace(
            num_stages=stages, group_size=ranks, group_rank=0, stage_index=0, submod=nn.Module(), is_first=True,
            is_last=False,
        )
        for _ in range(stages_per_rank)
    ]  # fmt: skip
    order = build(name, stand_ins, count).pipeline_order
    return [
        [
            ScheduledPass(entry.computation_type.value, entry.stage_index, entry.microbatch_index)
            for entry in order[rank]
            if entry is not None and entry.computation_type.value in ("F", "B", "I", "W")
        ]
        for rank in range(ranks)
    ]
