"""Schedules of torch.distributed.pipelining: run over a rank's stages, or only read as lists of actions."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV, get_schedule_class

from lockstep.costs.steps import ScheduledPass
from lockstep.parallel.pipeline.torch_stage import Stage
from lockstep.torch_compat.pipeline_schedules import UnpairedDualPipeV, skip_shape_inference

# Its error message is the whole table of actions, on every rank; the exception itself says what went wrong.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class PipelineSchedule:
    """A schedule of torch's over this rank's stages, for a fixed number of micro-batches.

    Args:
        name: of the schedule, without `Schedule`.
        stages: of this rank, ascending.
        count: micro-batches in a run.
    """

    def __init__(self, name: str, stages: Sequence[Stage], count: int) -> None:
        self._schedule = build(name, stages, count)
        self._has_last = any(stage.is_last for stage in stages)
        self._count = count

    def run(self) -> None:
        """Run forward and backward of `count` micro-batches on this rank's stages, after their `begin`."""
        # The last stage returns its loss, made from a micro-batch that it knows: what is passed here is only counted.
        targets = {"target": torch.arange(self._count)} if self._has_last else {}
        self._schedule.step(**targets, return_outputs=False)


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
        return [_one_forward_one_backward(rank, ranks, count) for rank in range(ranks)]
    stages = ranks * stages_per_rank
    stand_ins = [
        SimpleNamespace(
            num_stages=stages, group_size=ranks, group_rank=0, stage_index=0, submod=nn.Module(), is_first=True,
            is_last=False,
        )
        for _ in range(stages_per_rank)
    ]  # fmt: skip
    order = build(name, stand_ins, count).pipeline_order
    return [[_action(entry) for entry in order[rank] if _computes(entry)] for rank in range(ranks)]


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[ScheduledPass]:
    ahead = min(count, ranks - rank)
    forward = [ScheduledPass("F", rank, i) for i in range(count)]
    backward = [ScheduledPass("B", rank, i) for i in range(count)]
    pairs = [action for pair in zip(backward, forward[ahead:], strict=False) for action in pair]
    return forward[:ahead] + pairs + backward[count - ahead :]


def _computes(entry: Any) -> bool:
    return entry is not None and entry.computation_type.value in ("F", "B", "I", "W")


def _action(entry: Any) -> ScheduledPass:
    return ScheduledPass(entry.computation_type.value, entry.stage_index, entry.microbatch_index)
