"""Schedules of torch.distributed.pipelining: run over our stages, or only read as lists of actions."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV, get_schedule_class

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
        """Forward and backward of `count` micro-batches on this rank's stages, which were told to `begin`."""
        # The last stage returns its loss, made from a micro-batch that it knows: what is passed here is only counted.
        targets = {"target": torch.arange(self._count)} if self._has_last else {}
        self._schedule.step(**targets, return_outputs=False)


def build(name: str, stages: Sequence[Any], count: int) -> Any:
    """The schedule object of torch's; `stages` may be stand-ins where it is not to be run."""
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


@dataclass(frozen=True)
class Action:
    """One entry of a rank's list of computations.

    Attributes:
        kind: F forward, B backward, I gradients of inputs alone, W of weights alone.
    """

    kind: str
    stage: int
    micro_batch: int


def actions(name: str, ranks: int, stages_per_rank: int, count: int) -> list[list[Action]]:
    """What each rank computes in a run, in order. Needs no process group."""
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


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[Action]:
    ahead = min(count, ranks - rank)
    forward = [Action("F", rank, i) for i in range(count)]
    backward = [Action("B", rank, i) for i in range(count)]
    pairs = [action for pair in zip(backward, forward[ahead:], strict=False) for action in pair]
    return forward[:ahead] + pairs + backward[count - ahead :]


def _computes(entry: Any) -> bool:
    return entry is not None and entry.computation_type.value in ("F", "B", "I", "W")


def _action(entry: Any) -> Action:
    return Action(entry.computation_type.value, entry.stage_index, entry.microbatch_index)
