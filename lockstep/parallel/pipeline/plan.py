"""Plans a pipeline before it is built: cuts of the chain, each rank's stages, time of a step.

Tests: tests/parallel/pipeline/test_pipeline_plan.py, tests/plan/test_segments.py,
tests/parallel/test_worked_examples.py
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from lockstep.config import StepConfig
from lockstep.costs.hardware import GpuCluster, group_of, send
from lockstep.costs.steps import StepTime, agreements, pipeline
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.facts import ModelFacts, Named
from lockstep.parallel.pipeline.schedules import SCHEDULES, ScheduleFacts, actions, holders, rank_of
from lockstep.parallel.pipeline.stage_parameters import Survey, survey
from lockstep.parallel.pipeline.trees import Uses

KEY = "distributed.pipeline"


@dataclass(frozen=True)
class Partition:
    """A chain of segments cut into stages."""

    stages: tuple[range, ...]  # of each stage, the positions of its segments in the chain
    ranks: tuple[int, ...]  # of each stage, the pipeline rank that holds it

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]


def partition(
    names: Sequence[str],
    costs: Sequence[float],
    *,
    ranks: int,
    stages_per_rank: int,
    split_spec: Mapping[str, str],
    v_shaped: bool,
) -> Partition:
    """Cut a chain of named segments into `ranks` × `stages_per_rank` stages.

    `split_spec` says where, or else the costs of the segments.
    """
    wanted = ranks * stages_per_rank
    if len(names) < wanted:
        what = (
            f"{ranks} pipeline ranks × {stages_per_rank} stages_per_rank = {wanted} stages, but the"
            f" model is a chain of {len(names)} segments"
        )
        why = f"a stage holds at least one of {', '.join(names)}"
        fix = "use fewer pipeline ranks or stages, or a deeper model"
        raise UsageError(what, where=f"{KEY}.stages_per_rank", why=why, fix=fix)
    cuts = cuts_of(split_spec, names) if split_spec else balanced_cuts(costs, wanted)
    if len(cuts) + 1 != wanted:
        sizes = [b - a for a, b in pairwise([0, *cuts, len(names)])]
        what = (
            f"{len(cuts)} cut{'s' * (len(cuts) != 1)} + 1 = {len(cuts) + 1} stages, but {ranks}"
            f" pipeline ranks × {stages_per_rank} stages_per_rank = {wanted}"
        )
        why = f"the cuts make stages of {', '.join(map(str, sizes))} segments"
        fix = (
            f"make {wanted - 1} cut{'s' * (wanted != 2)}, or leave split_spec out and the chain is"
            " cut evenly"
        )
        raise UsageError(what, where=f"{KEY}.split_spec", why=why, fix=fix)
    stages = tuple(range(first, last) for first, last in pairwise([0, *cuts, len(names)]))
    return Partition(
        stages, tuple(rank_of(stage, ranks, v_shaped=v_shaped) for stage in range(wanted))
    )


def cuts_of(split_spec: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """Return the positions in the chain in front of which it is cut, ascending."""
    where = f"{KEY}.split_spec"
    by_position: dict[int, str] = {}
    for name, side in split_spec.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            what = f"split_spec cuts at {name}, which is not a segment of the model"
            why = "it can be cut between " + ", ".join(names)
            raise UsageError(
                what, where=where, why=why, fix=f"did you mean {near[0]}?" if near else None
            )
        position = names.index(name) + (side == "end")
        if position in (0, len(names)):
            what = (
                f"{name}: {side} cuts"
                f" {'in front of the first' if position == 0 else 'behind the last'} segment"
            )
            raise UsageError(what, where=where, why="one of the two stages would be empty")
        if position in by_position:
            raise UsageError(
                f"{by_position[position]} and {name}: {side} cut at the same place", where=where
            )
        by_position[position] = f"{name}: {side}"
    return sorted(by_position)


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return cuts that make the most expensive of `stages` pieces as cheap as possible.

    Pieces are contiguous, and the others as even as possible. They are found by dynamic programming
    over (segments, stages), on the pair (largest cost, sum of squares).

    >>> balanced_cuts([1, 1, 1, 1, 3], stages=2)
    [3]
    >>> balanced_cuts([4, 1, 1, 1, 1, 4], stages=3)
    [1, 5]
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][n]: the first n segments in k pieces; begins[k][n]: where the last of these begins.
    best: list[list[tuple[float, float]]] = [
        [(float("inf"), 0.0)] * (count + 1) for _ in range(stages + 1)
    ]
    begins = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0)
    for k in range(1, stages + 1):
        for n in range(k, count + 1):
            for begin in range(k - 1, n):
                piece = sums[n] - sums[begin]
                largest, squares = best[k - 1][begin]
                candidate = (max(largest, piece), squares + piece * piece)
                if candidate < best[k][n]:
                    best[k][n] = candidate
                    begins[k][n] = begin
    cuts = []
    n = count
    for k in range(stages, 1, -1):
        n = begins[k][n]
        cuts.append(n)
    return cuts[::-1]


def table(
    parts: Partition, names: Sequence[str], costs: Sequence[float], unit: str = "parameters"
) -> str:
    """Return the partition as text, a line per stage."""
    total = sum(costs) or 1.0
    rows = [("stage", "rank", "segments", unit, "share")]
    for stage, (positions, rank) in enumerate(zip(parts.stages, parts.ranks, strict=True)):
        first = names[positions[0]]
        last = names[positions[-1]]
        cost = sum(costs[i] for i in positions)
        span = first if len(positions) == 1 else f"{first} … {last} ({len(positions)})"
        number = f"{cost:,.0f}" if cost >= 100 or cost == int(cost) else f"{cost:.3g}"
        rows.append((str(stage), str(rank), span, number, f"{cost / total:.0%}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    for row, cells in zip(rows, aligned, strict=True):
        cells[2] = row[2].ljust(widths[2])
    return "\n".join("  ".join(cells) for cells in aligned)


@dataclass(frozen=True)
class PipelinePlan:
    """The assignment of segments to stages and ranks, before anything is cut."""

    model: Survey
    segments: Named
    facts: ScheduleFacts
    parts: Partition

    @property
    def stage_of(self) -> dict[str, int]:
        """Segment name → stage."""
        return {
            self.segments[i][0]: stage for stage, span in enumerate(self.parts.stages) for i in span
        }

    def uses(self) -> Uses:
        """Return where trainable parameters are used; call it before `release`."""
        tensors = {
            name: registrations[0].tensor() for name, registrations in self.model.parameters.items()
        }
        stages = {
            name: sorted({self.stage_of[user] for user in users})
            for name, users in self.model.users.items()
            if users and tensors[name].requires_grad
        }
        like = {
            n: torch.empty_like(tensors[n], device="meta")
            for n, used in stages.items()
            if len(used) > 1
        }
        return Uses(stages, like, self.parts.ranks)

    def across(self) -> dict[str, list[int]]:
        """Return parameter → the pipeline ranks that use it, where there are several."""
        ranks = self.parts.ranks
        stages = self.stage_of
        ranks_of = {
            name: sorted({ranks[stages[user]] for user in users})
            for name, users in self.model.users.items()
        }
        return {name: used_on for name, used_on in ranks_of.items() if len(used_on) > 1}

    def table(self) -> str:
        names = [name for name, _ in self.segments]
        return table(self.parts, names, self.model.costs(names))


def plan_of(facts: ModelFacts, ranks: int, config: StepConfig) -> PipelinePlan:
    """Decide on the stages of an unsplit model."""
    pipeline = config.distributed.pipeline
    segments = facts.required_chain()
    schedule = SCHEDULES[pipeline.schedule]
    read = survey(facts)
    names = [name for name, _ in segments]
    parts = partition(
        names,
        read.costs(names),
        ranks=ranks,
        stages_per_rank=pipeline.stages_per_rank,
        split_spec=pipeline.split_spec,
        v_shaped=schedule.v_shaped,
    )
    users = {user for segments in read.users.values() for user in segments}
    for stage, span in enumerate(parts.stages):
        inside = [names[i] for i in span]
        if not users & set(inside):
            what = (
                f"stage {stage} ({', '.join(inside)}) has no parameters: there is nothing to train"
                " in it"
            )
            raise UsageError(
                what,
                where="distributed.pipeline.split_spec",
                fix="cut elsewhere, or use fewer stages",
            )
    return PipelinePlan(read, segments, schedule, parts)


def splits_backward(plan: PipelinePlan, uses: Uses, config: StepConfig) -> tuple[bool, list[str]]:
    """Return whether gradients of weights are computed apart from those of inputs, and log lines.

    Where they can't be, both are computed at once; the schedule is still correct, and waits more.
    """
    if not plan.facts.splits_backward:
        return False, []
    why = ""
    if config.training.gradient_checkpointing != "none":
        why = "blocks would be recomputed for each half"
    elif config.distributed.reproducible and uses.like:
        why = "sums of shared weights go to the stage before with the gradients of inputs"
    elif (config.distributed.expert_size or 1) > 1:
        why = "gradients of spread experts are taken once a backward pass"
    if not why:
        return True, []
    return False, [
        f"{plan.facts.name}: gradients of weights are computed with those of inputs, because {why}"
    ]


@dataclass(frozen=True)
class StageTime:
    """The cost of a stage: seconds of one micro-batch, bytes sent on, fp32 bytes of parameters."""

    forward: float
    backward: float
    sent: float
    parameter_bytes: float
    # of gradients of inputs, and of weights; None: half of `backward` each
    halves: tuple[float, float] | None = None


def pipeline_step(
    stages: list[StageTime],
    config: StepConfig,
    layout: Layout,
    cluster: GpuCluster,
    micro_batches: int,
    update: float = 0.0,
) -> StepTime:
    """Return the time of a pipeline's step.

    Stages are replicated or sharded over the data-parallel ranks.
    """
    options = config.distributed.pipeline
    facts = SCHEDULES[options.schedule]
    count = facts.padded(micro_batches, layout.pipeline, len(stages))
    orders = actions(options.schedule, layout.pipeline, options.stages_per_rank, count)
    seconds: dict[tuple[str, int], float] = {}
    for index, stage in enumerate(stages):
        of_inputs, of_weights = stage.halves or (stage.backward / 2, stage.backward / 2)
        times = {"F": stage.forward, "B": stage.backward, "I": of_inputs, "W": of_weights}
        seconds |= {(kind, index): time for kind, time in times.items()}
    stride = layout.data_parallel_size
    sends = [send(cluster, stage.sent, stride) for stage in stages]
    rank_of_stage = holders(options.schedule, layout.pipeline, options.stages_per_rank)
    line = pipeline(orders, seconds, sends, rank_of=rank_of_stage)
    group = group_of(cluster, stride)
    both = list(zip(stages, rank_of_stage, strict=True))
    heaviest = max(
        sum(stage.parameter_bytes for stage, holder in both if holder == rank)
        for rank in range(layout.pipeline)
    )
    # Shards gather once and reduce once a step (FSDP2 holds a stage's gradients until then);
    # replicas all-reduce.
    around = group.all_reduce(heaviest)
    busiest = max(line.busy(("compute", rank)) for rank in range(layout.pipeline))
    end = line.end + around + update + agreements(group_of(cluster, layout.world_size))
    a, b = group.bytes_sent(2 * heaviest)
    sent = 2 * micro_batches * max(s.sent for s in stages[:-1])
    near = stride < cluster.per_node
    return StepTime(
        end,
        busiest + update,
        around,
        line.end - busiest,
        a + (sent if near else 0.0),
        b + (0.0 if near else sent),
    )
