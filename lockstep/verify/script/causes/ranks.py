"""Names what the ranks of a script show by themselves, without one process.

Their random numbers, first values, precision and metrics are here, their samples in
`samples_of_ranks.py`.

Tests: tests/verify/test_samples_of_ranks.py, tests/verify/test_script.py
"""

import math
from collections.abc import Sequence

from lockstep.errors import listed
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.fixes import script_cause
from lockstep.verify.script.causes.replicas import unequal_names
from lockstep.verify.script.causes.samples_of_ranks import (
    is_cut_by_script,
    other_samples,
    same_samples,
)
from lockstep.verify.script.causes.settings import is_close
from lockstep.verify.script.observed.draws import BatchKey, drawn_alike
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.world import World


def seen_on_ranks(world: World) -> list[Cause]:
    """Return causes that a run of several ranks shows by itself."""
    causes = [
        other_samples(world),
        same_samples(world),
        _same_draws(world),
        _same_loop_draws(world),
        _other_first_values(world),
        _other_precision(world),
        _other_metrics(world),
    ]
    return [cause for cause in causes if cause is not None]


def loop_causes(records: Sequence[ScriptRecord]) -> list[Cause]:
    """Return mistakes of the loop itself, which one process makes, too."""
    by = "the loop's own calls, gradients and updates"
    causes: dict[str, Cause] = {}  # by kind: that of the first rank
    for rank, record in enumerate(records):
        for finding in record.findings:
            text = finding["text"] + (f" (on rank {rank})" if rank else "")
            cause = Cause(
                finding["kind"],
                text,
                [by],
                fix=finding["fix"],
                column="loop",
                line=finding["line"],
            )
            causes.setdefault(cause.kind, cause)
    return list(causes.values())


def _same_draws(world: World) -> Cause | None:
    """Return a cause if forward passes draw random numbers, alike on ranks or not."""
    leaders = world.leaders
    framework = leaders[0].framework
    alike = set()
    draws = [[draw for step in record.steps for draw in step.draws] for record in leaders]
    for position, mine in enumerate(draws[0]):
        for other in (rank[position] for rank in draws[1:] if position < len(rank)):
            # The states at the end, too: a framework may seed the generators when the forward pass
            # has begun.
            same = {name for name in mine.moved if mine.before[name] == other.before.get(name)}
            alike |= {name for name in same if mine.after[name] == other.after.get(name)}
    kind = "random numbers"
    drawn = sorted({name for rank in draws for draw in rank for name in draw.moved})
    if not drawn:
        return None
    if alike:
        text = (
            f"dropout, or what else draws from {listed(sorted(alike))}'s generator in a forward"
            " pass, is drawn alike on all ranks: samples at the same place of a batch get the same"
            " mask, and each its own in one process"
        )
        by = (
            "the generators' states before a forward pass, and after it has moved them, are the"
            " same on several ranks"
        )
        return script_cause(kind, text, by, framework)
    text = (
        f"dropout, or what else draws from {listed(drawn)}'s generator in a forward pass, is drawn"
        " by each rank on its own: one process draws other numbers, so the step is equal only up to"
        " them"
    )
    return Cause(kind, text, ["the generators' states"], is_error=False, column=kind)


def _same_loop_draws(world: World) -> Cause | None:
    """Return a cause if the loop draws the same numbers on all ranks, for other samples."""
    leaders = world.leaders
    if len(leaders) == 1 or is_cut_by_script(world):
        return None
    has_loaders = bool(leaders[0].batches)
    rows = _rows_of_batches(leaders) if has_loaders else _rows_of_passes(leaders)
    draws = [
        # What picks samples without a loader may pick the same positions in each rank's own part.
        [draw for draw in record.draws if has_loaders or draw.is_floating]
        for record in leaders
    ]
    parameters = [piece.shape for piece in leaders[0].first.values()]
    places = drawn_alike(draws, rows, parameters)
    if not places:
        return None
    text = (
        f"{listed(places)} draws the same numbers on all ranks: samples at the same place of a"
        " batch get the same, and each its own in one process"
    )
    by = "the numbers that each rank drew for its batches"
    return script_cause("random numbers", text, by, leaders[0].framework)


def _rows_of_batches(leaders: Sequence[ScriptRecord]) -> dict[BatchKey, set[int]]:
    """Return the numbers of samples of loaders' batches that differ from rank to rank."""
    rows: dict[BatchKey, set[int]] = {}
    for loader, read in leaders[0].batches.items():
        sizes = {len(batch) for batch in read}
        for index, batch in enumerate(read):
            others = [record.batches.get(loader, [])[index : index + 1] for record in leaders[1:]]
            if batch and all(other != [batch] for other in others):
                rows[loader, index] = sizes
    return rows


def _rows_of_passes(leaders: Sequence[ScriptRecord]) -> dict[BatchKey, set[int]]:
    """Return the numbers of rows that models get in passes whose inputs differ on ranks."""
    by_pass: dict[BatchKey, set[int]] = {}
    number = 0
    for steps in zip(*(record.steps for record in leaders), strict=False):
        sizes = {len(rows) for rows in steps[0].inputs if rows}
        is_other = all(step.elements != steps[0].elements for step in steps[1:])
        for _ in steps[0].losses:
            if is_other:
                by_pass[-1, number] = sizes
            number += 1
    return by_pass


def _other_first_values(world: World) -> Cause | None:
    ranks = world.tensors([record.first for record in world.records])
    other = [rank for rank in range(1, len(ranks)) if unequal_names(ranks[rank], ranks[0])]
    if not other:
        return None
    names = unequal_names(ranks[other[0]], ranks[0])
    text = (
        f"ranks start from different weights: {listed(names, 5)} on rank {other[0]} and on rank 0"
    )
    by = "the parameters before the first step"
    return script_cause("first values", text, by, world.records[0].framework, parameters=names)


def _other_precision(world: World) -> Cause | None:
    if len(world.leaders) == 1:
        return None
    for steps in zip(*(record.steps for record in world.records), strict=False):
        for rank, step in enumerate(steps):
            if step.dtypes != steps[0].dtypes:
                mine = listed(sorted(step.dtypes))
                right = listed(sorted(steps[0].dtypes))
                text = f"rank {rank} computes with {mine}, and rank 0 with {right}"
                return Cause(
                    "precision", text, ["the dtypes of parameters and of autocast, by rank"]
                )
    return None


def _other_metrics(world: World) -> Cause | None:
    """Return the cause if ranks give their schedules other numbers, by which rates are to fall."""
    by_rank = zip(*(record.metrics for record in world.records), strict=False)
    for number, metrics in enumerate(by_rank):
        for rank, metric in enumerate(metrics):
            are_numbers = not math.isnan(metric) and not math.isnan(metrics[0])
            if are_numbers and not is_close(metric, metrics[0]):
                text = (
                    f"in its call {number + 1}, ReduceLROnPlateau is given {metric:.6g} on rank"
                    f" {rank} and {metrics[0]:.6g} on rank 0: it lowers the learning rate of each"
                    " rank by a loss of its own"
                )
                by = "the numbers that ReduceLROnPlateau is given on each rank"
                fix = "average it over ranks first: dist.all_reduce(loss); loss /= world_size"
                return Cause("learning rate schedule", text, [by], fix=fix, column="settings")
    return None
