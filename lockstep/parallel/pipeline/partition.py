"""From a chain of segments to stages: where the chain is cut, and which rank holds which piece.

    split_spec   {layers.4: end} cuts behind segment layers.4, so layers.0 … layers.4, five of them, and all that comes
                 before them are in the first stage; {layers.4: beginning} cuts in front of it
    auto         without a split_spec: the most expensive stage is as cheap as contiguous pieces allow

A stage that is placed `loop` goes to rank (stage mod ranks); placed `v`, the ranks are walked back and forth:

    loop, 2 ranks × 2    rank 0: stages 0, 2    rank 1: stages 1, 3
    v                    rank 0: stages 0, 3    rank 1: stages 1, 2

Nothing here knows torch.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.errors import UsageError

KEY = "distributed.pipeline"


@dataclass(frozen=True)
class Partition:
    """A chain of segments cut into stages.

    Attributes:
        stages: of each stage, the positions of its segments in the chain.
        ranks: of each stage, the pipeline rank that holds it.
    """

    stages: tuple[range, ...]
    ranks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """The stages that a rank holds, ascending."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]


def partition(
    names: Sequence[str], costs: Sequence[float], *, ranks: int, stages_per_rank: int,
    split_spec: Mapping[str, str], v_shaped: bool,
) -> Partition:  # fmt: skip
    """Cut a chain into `ranks` × `stages_per_rank` stages.

    Args:
        names: of the segments, in order.
        costs: of the segments, in any unit; used where there is no `split_spec`.
        v_shaped: place stages back and forth, not round and round.

    Raises:
        UsageError: stages, ranks and cuts do not agree (the sum is shown), or a cut names no segment.
    """
    wanted = ranks * stages_per_rank
    if len(names) < wanted:
        raise UsageError(
            f"{ranks} pipeline ranks × {stages_per_rank} stages_per_rank = {wanted} stages, "
            f"but the model is a chain of {len(names)} segments",
            where=f"{KEY}.stages_per_rank",
            why=f"a stage holds at least one of {', '.join(names)}",
            fix="use fewer pipeline ranks or stages, or a deeper model",
        )
    cuts = cuts_of(split_spec, names) if split_spec else balanced_cuts(costs, wanted)
    if len(cuts) + 1 != wanted:
        sizes = [b - a for a, b in _pieces(cuts, len(names))]
        raise UsageError(
            f"{len(cuts)} cut{'s' * (len(cuts) != 1)} + 1 = {len(cuts) + 1} stages, but {ranks} pipeline ranks × "
            f"{stages_per_rank} stages_per_rank = {wanted}",
            where=f"{KEY}.split_spec",
            why=f"the cuts make stages of {', '.join(map(str, sizes))} segments",
            fix=f"make {wanted - 1} cut{'s' * (wanted != 2)}, or leave split_spec out and the chain is cut evenly",
        )
    stages = tuple(range(first, last) for first, last in _pieces(cuts, len(names)))
    return Partition(stages, tuple(rank_of(stage, ranks, v_shaped=v_shaped) for stage in range(wanted)))


def rank_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """The pipeline rank that holds a stage."""
    lap, place = divmod(stage, ranks)
    return ranks - 1 - place if v_shaped and lap % 2 else place


def cuts_of(split_spec: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """Positions in the chain in front of which it is cut, ascending.

    Raises:
        UsageError: a name is no segment, a cut leaves a stage empty, or two keys cut at one place.
    """
    where = f"{KEY}.split_spec"
    by_place: dict[int, str] = {}
    for name, side in split_spec.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise UsageError(
                f"split_spec cuts at {name}, which is no segment of the model",
                where=where,
                why="it can be cut between " + ", ".join(names),
                fix=f"did you mean {near[0]}?" if near else None,
            )
        place = names.index(name) + (side == "end")
        if place in (0, len(names)):
            raise UsageError(
                f"{name}: {side} cuts {'in front of the first' if place == 0 else 'behind the last'} segment",
                where=where,
                why="one of the two stages would be empty",
            )
        if place in by_place:
            raise UsageError(f"{by_place[place]} and {name}: {side} cut at the same place", where=where)
        by_place[place] = f"{name}: {side}"
    return sorted(by_place)


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts that make the most expensive of `stages` contiguous pieces as cheap as can be, and the others even.

    By dynamic programming over (segments, stages), on the pair (largest cost, sum of squares).
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][n]: the first n segments in k pieces; from_[k][n]: where the last of these begins.
    best: list[list[tuple[float, float]]] = [[(float("inf"), 0.0)] * (count + 1) for _ in range(stages + 1)]
    begins = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0)
    for k in range(1, stages + 1):
        for n in range(k, count + 1):
            for begin in range(k - 1, n):
                piece = sums[n] - sums[begin]
                largest, squares = best[k - 1][begin]
                candidate = (max(largest, piece), squares + piece * piece)
                if candidate < best[k][n]:
                    best[k][n], begins[k][n] = candidate, begin
    cuts, n = [], count
    for k in range(stages, 1, -1):
        n = begins[k][n]
        cuts.append(n)
    return cuts[::-1]


def table(parts: Partition, names: Sequence[str], costs: Sequence[float], unit: str = "parameters") -> str:
    """The partition as text, a line a stage.

    Args:
        costs: of the segments, in `unit`.
    """
    total = sum(costs) or 1.0
    rows = [("stage", "rank", "segments", unit, "share")]
    for stage, (positions, rank) in enumerate(zip(parts.stages, parts.ranks, strict=True)):
        first, last = names[positions[0]], names[positions[-1]]
        cost = sum(costs[i] for i in positions)
        span = first if len(positions) == 1 else f"{first} … {last} ({len(positions)})"
        rows.append((str(stage), str(rank), span, _number(cost), f"{cost / total:.0%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for row in rows:
        cells = [row[0].rjust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2])]
        lines.append("  ".join([*cells, row[3].rjust(widths[3]), row[4].rjust(widths[4])]))
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _pieces(cuts: Sequence[int], count: int) -> list[tuple[int, int]]:
    edges = [0, *cuts, count]
    return list(pairwise(edges))
