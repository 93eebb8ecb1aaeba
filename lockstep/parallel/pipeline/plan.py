"""What is decided before anything is built: the stages of a model, who holds them, and what can't go together."""

from dataclasses import dataclass

import torch
from torch import nn

from lockstep.config import StepConfig
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models.protocol import require_segments
from lockstep.parallel.pipeline.holding import Segments, Survey, survey
from lockstep.parallel.pipeline.partition import Partition, partition, table
from lockstep.parallel.pipeline.schedules import ScheduleFacts, facts_of
from lockstep.parallel.pipeline.trees import Uses


@dataclass(frozen=True)
class PipelinePlan:
    """Which rank holds what, before anything is cut."""

    model: Survey
    segments: Segments
    facts: ScheduleFacts
    parts: Partition

    @property
    def stage_of(self) -> dict[str, int]:
        """Segment name → stage."""
        return {self.segments[i][0]: stage for stage, span in enumerate(self.parts.stages) for i in span}

    def uses(self) -> Uses:
        """Where trainable parameters are used; to be read before anything is let go of."""
        tensors = {name: spots[0].tensor() for name, spots in self.model.parameters.items()}
        stages = {
            name: sorted({self.stage_of[user] for user in users})
            for name, users in self.model.users.items()
            if users and tensors[name].requires_grad
        }
        like = {n: torch.empty_like(tensors[n], device="meta") for n, used in stages.items() if len(used) > 1}
        return Uses(stages, like, self.parts.ranks)

    def across(self) -> dict[str, list[int]]:
        """Parameter → the pipeline ranks that use it, where there are several."""
        found = {}
        for name, users in self.model.users.items():
            ranks = sorted({self.parts.ranks[self.stage_of[user]] for user in users})
            if len(ranks) > 1:
                found[name] = ranks
        return found

    def table(self) -> str:
        """The partition as text, a line a stage."""
        names = [name for name, _ in self.segments]
        return table(self.parts, names, self.model.costs(names))


def plan_of(model: nn.Module, ranks: int, config: StepConfig) -> PipelinePlan:
    """Decide on the stages of an unsplit model.

    Raises:
        UsageError: the model is no chain of segments, or stages, ranks and cuts do not agree.
    """
    pipeline = config.distributed.pipeline
    segments = require_segments(model)
    facts = facts_of(pipeline.schedule, pipeline.stages_per_rank)
    read = survey(model, segments)
    names = [name for name, _ in segments]
    parts = partition(
        names, read.costs(names), ranks=ranks, stages_per_rank=pipeline.stages_per_rank,
        split_spec=pipeline.split_spec, v_shaped=facts.v_shaped,
    )  # fmt: skip
    plan = PipelinePlan(read, segments, facts, parts)
    _refuse_empty(plan)
    return plan


def _refuse_empty(plan: PipelinePlan) -> None:
    users = {user for segments in plan.model.users.values() for user in segments}
    for stage, span in enumerate(plan.parts.stages):
        names = [plan.segments[i][0] for i in span]
        if not users & set(names):
            raise UsageError(
                f"stage {stage} ({', '.join(names)}) has no parameters: there is nothing to train in it",
                where="distributed.pipeline.split_spec",
                fix="cut elsewhere, or use fewer stages",
            )


def frees_after_forward(layout: Layout, config: StepConfig) -> bool:
    """Return whether FSDP2 frees gathered parameters after each forward pass."""
    return layout.shard > 1 and config.distributed.fsdp.sharding_strategy in ("full_shard", "hybrid_shard")


def splits_backward(plan: PipelinePlan, uses: Uses, config: StepConfig) -> tuple[bool, list[str]]:
    """Whether gradients of weights are computed apart from those of inputs, and what is to be said about it.

    Where they can't be, they come together with the first; the schedule is right all the same, and waits more.
    """
    if not plan.facts.splits_backward:
        return False, []
    why = ""
    if config.training.gradient_checkpointing != "none":
        why = "blocks would be recomputed for each half"
    elif config.distributed.reproducible and uses.like:
        why = "sums of shared weights go to the stage before with the gradients of inputs"
    if not why:
        return True, []
    return False, [f"{plan.facts.name}: gradients of weights are computed with those of inputs, because {why}"]
