"""What each schedule asks for: stages a rank, how stages are placed, and which numbers of micro-batches it takes."""

from dataclasses import dataclass

from lockstep.errors import UsageError

KEY = "distributed.pipeline"


@dataclass(frozen=True)
class ScheduleFacts:
    """What is to be known of a schedule before it is built.

    Attributes:
        name: of torch's class, without `Schedule`.
        stages_per_rank: how many it takes; None: any number.
        v_shaped: stages are placed back and forth over the ranks, else round and round.
        splits_backward: gradients of inputs and of weights are computed at different times.
    """

    name: str
    stages_per_rank: int | None = None
    v_shaped: bool = False
    splits_backward: bool = False

    def padded(self, count: int, ranks: int, stages: int) -> int:
        """The smallest number of micro-batches, at least `count`, that the schedule takes."""
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


def facts_of(name: str, stages_per_rank: int) -> ScheduleFacts:
    """The facts of a schedule, once it is sure that it takes so many stages a rank.

    Raises:
        UsageError: it does not, or there is no such schedule.
    """
    if name not in SCHEDULES:
        raise UsageError(
            f"there is no schedule {name!r}", where=f"{KEY}.schedule", fix=f"write one of {', '.join(SCHEDULES)}"
        )
    facts = SCHEDULES[name]
    if facts.stages_per_rank not in (None, stages_per_rank):
        raise UsageError(
            f"{name} takes {facts.stages_per_rank} stage{'s' * (facts.stages_per_rank != 1)} a rank, "
            f"not {stages_per_rank}",
            where=f"{KEY}.stages_per_rank",
            fix=f"set {KEY}.stages_per_rank: {facts.stages_per_rank}",
        )
    return facts
