"""What each schedule needs: stages per rank, their placement, and numbers of micro-batches.

A stage that is placed `loop` goes to rank (stage mod ranks); placed `v`, the ranks are walked back and forth:

    loop, 2 ranks × 2    rank 0: stages 0, 2    rank 1: stages 1, 3
    v                    rank 0: stages 0, 3    rank 1: stages 1, 2
"""

from dataclasses import dataclass

from lockstep.errors import UsageError

KEY = "distributed.pipeline"


@dataclass(frozen=True)
class ScheduleFacts:
    """The properties of a schedule that are needed before it is built.

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


def facts_of(name: str, stages_per_rank: int) -> ScheduleFacts:
    """Return the facts of a schedule, after checking that it takes `stages_per_rank`.

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


def rank_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the pipeline rank that holds a stage."""
    lap, place = divmod(stage, ranks)
    return ranks - 1 - place if v_shaped and lap % 2 else place
