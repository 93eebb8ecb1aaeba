"""Finds what the ranks of a script show by themselves, and where their settings are others.

Their random numbers, first values, precision, replicas and hangs are here, their samples in
`samples_of_ranks.py`. Only `settings_cause` needs the record of one process.

Tests: tests/verify/test_samples_of_ranks.py, tests/verify/test_script.py
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from lockstep.errors import listed
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.observed.draws import BatchKey, drawn_alike
from lockstep.verify.script.causes.fixes import fix_for, script_cause
from lockstep.verify.script.causes.gradients import NOT_SYNCHRONISED
from lockstep.verify.script.record import ACCELERATE, RecordedStep, ScriptRecord
from lockstep.verify.script.causes.samples_of_ranks import is_cut_by_script, other_samples, same_samples
from lockstep.verify.script.world import Tensors, World

LEARNING_RATE = "learning rate"


def _unequal_names(mine: Tensors, right: Tensors) -> list[str]:
    """Return the names of tensors that differ in any element, or are missing."""
    return [
        name for name in right if name not in mine or not np.array_equal(mine[name], right[name])
    ]


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
    other = [rank for rank in range(1, len(ranks)) if _unequal_names(ranks[rank], ranks[0])]
    if not other:
        return None
    names = _unequal_names(ranks[other[0]], ranks[0])
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
            if are_numbers and not _close(metric, metrics[0]):
                text = (
                    f"in its call {number + 1}, ReduceLROnPlateau is given {metric:.6g} on rank"
                    f" {rank} and {metrics[0]:.6g} on rank 0: it lowers the learning rate of each"
                    " rank by a loss of its own"
                )
                by = "the numbers that ReduceLROnPlateau is given on each rank"
                fix = "average it over ranks first: dist.all_reduce(loss); loss /= world_size"
                return Cause("learning rate schedule", text, [by], fix=fix, column="settings")
    return None


def replicas_cause(world: World, number: int) -> Cause | None:
    """Return the cause if replicas that were equal differ.

    They differ between one step and the next, or after an update with equal gradients.
    """
    for at in range(number + 1):
        steps = [record.steps[at] for record in world.records]
        changed = _unequal_before_update(world, steps)
        if changed:
            if not at:
                return None  # they began with other values, which is a cause of its own
            text = (
                f"{listed(changed, 5)} were equal on all ranks after step {at}, and differ before"
                f" step {at + 1} updates"
            )
            by = "fingerprints of each rank's parameters"
            fix = (
                "let nothing but the optimizer write weights, or let it write the same on all ranks"
            )
            return Cause("replicas", text, [by], fix=fix, column="weights", parameters=changed)
        if _are_unequal(world.tensors([step.values for step in steps])):
            if _are_unequal(world.tensors([step.gradients for step in steps])):
                return None  # the gradients are the cause
            text = (
                f"weights and gradients are equal on all ranks in step {at + 1}, and the updated"
                " weights are not"
            )
            by = "parameters and gradients of each rank"
            return Cause("replicas", text, [by], column="weights")
    return None


def replicas_apart(world: World, steps: int) -> list[Cause]:
    """Return the cause if ranks that hold the same model do not keep it the same.

    It needs no other run, where a script can't be compared with one process.
    """
    if len(world.units) != len(world.records):
        return []
    for number in range(steps):
        cause = replicas_cause(world, number)
        if cause is not None:
            return [cause]
        of_step = [record.steps[number] for record in world.records]
        before = [step.before for step in of_step]
        values = world.tensors([step.values for step in of_step])
        if any(each != before[0] for each in before[1:]):
            return []
        names = [name for mine in values[1:] for name in _unequal_names(mine, values[0])]
        if names:
            text = (
                f"weights are equal on all ranks before step {number + 1}, which updates"
                f" {listed(names, 5)} with other gradients from rank to rank"
            )
            by = "parameters and gradients of each rank"
            framework = world.records[0].framework
            return [script_cause(NOT_SYNCHRONISED, text, by, framework, parameters=names)]
    return []


def _unequal_before_update(world: World, steps: Sequence[RecordedStep]) -> list[str]:
    """Return the parameters that all ranks hold complete, and that differ before an update."""
    pieces = {
        name
        for step in steps
        for name, piece in step.values.items()
        if piece.cuts or piece.flat or name in world.joined
    }
    on_all_ranks = set.intersection(*(set(step.values) for step in steps))
    complete = on_all_ranks - pieces
    first = steps[0].before
    return [
        name
        for name in first
        if name in complete and any(step.before.get(name) != first[name] for step in steps)
    ]


def _are_unequal(ranks: Sequence[Tensors]) -> bool:
    """Return whether a rank has other tensors than the first."""
    return any(_unequal_names(tensors, ranks[0]) for tensors in ranks[1:])


def hang_cause(
    records: Sequence[ScriptRecord | None], locations: dict[int, str], framework: str
) -> Cause:
    """Return why ranks wait for each other.

    The cause names what each rank calls, and the first collective in which they differ.
    """
    at = "; ".join(
        f"rank {rank} {f'waits at {location}' if location else 'has ended'}"
        for rank, location in locations.items()
    )
    called = [record.collectives if record is not None else [] for record in records]
    for calls in zip_longest(*called):
        kinds = [None if call is None else call[:2] for call in calls]
        if any(kind != kinds[0] for kind in kinds):
            in_words = [
                "nothing" if call is None else f"{call[0]} ({call[1]} elements, {call[2]})"
                for call in calls
            ]
            each = ", ".join(f"rank {rank} calls {words}" for rank, words in enumerate(in_words))
            text = f"ranks call different collectives: {each}; {at}"
            by = "the collectives that the script calls on each rank, in order"
            cause = script_cause("hang", text, by, framework)
            cause.place_at(next(line for _, _, line in filter(None, calls)))
            return cause
    ended = [rank for rank, location in locations.items() if not location]
    if ended:
        record = records[ended[0]]
        steps = 0 if record is None else len(record.steps)
        text = (
            f"rank {ended[0]} has ended after {steps} step{'s' * (steps != 1)}, and others wait for"
            f" it: {at}"
        )
        return script_cause("uneven steps", text, "the stacks of the ranks", framework)
    text = f"all ranks wait for each other: {at}"
    cause = script_cause("hang", text, "the stacks of the ranks", framework)
    file, number, _ = next(iter(locations.values())).split(":", 2)
    cause.place_at(f"{file}:{number}")
    return cause


@dataclass(frozen=True)
class _OtherSetting:
    """A setting of the optimizer with which a rank stepped, and one process did not."""

    key: str  # of the parameter group: `lr`, `momentum` …
    rank: int
    mine: object
    right: object
    step: RecordedStep  # of the rank
    right_step: RecordedStep  # of one process


def settings_cause(records: Sequence[ScriptRecord], reference: ScriptRecord) -> Cause | None:
    """Return the cause if a setting, such as the learning rate, is not that of one process.

    Each step is compared.
    """
    by_step = zip(reference.steps, *(record.steps for record in records), strict=False)
    for right_step, *steps in by_step:
        other = _other_setting(steps, right_step)
        if other is None:
            continue
        ranks_differ = any(step.settings != steps[0].settings for step in steps)
        if ranks_differ:
            name = _name_of_setting(other.key)
            text = f"{_described(other)}: ranks step with different settings"
            by = "the settings with which each rank stepped"
            return Cause(name, text, [by], column="settings")
        return _setting_of_all_ranks(other, len(records), records[0].framework)
    return None


def _other_setting(steps: Sequence[RecordedStep], right_step: RecordedStep) -> _OtherSetting | None:
    """Return the first setting of a step that is not that of one process.

    The first is that of the lowest rank, and there of the first parameter group; the learning rate
    comes before all others.
    """
    for rank, step in enumerate(steps):
        for mine, right in zip(step.settings, right_step.settings, strict=False):
            wrong = [key for key in right if not _close(mine.get(key), right[key])]
            if wrong:
                key = "lr" if "lr" in wrong else wrong[0]
                return _OtherSetting(key, rank, mine.get(key), right[key], step, right_step)
    return None


def _setting_of_all_ranks(other: _OtherSetting, ranks: int, framework: str) -> Cause:
    """Return the cause of a setting that is the same on all ranks, and not that of one process.

    A learning rate may be scaled by the number of ranks, by its root, or by a schedule that each
    of N ranks has stepped N times.
    """
    by = "the settings with which the optimizer stepped"
    name = _name_of_setting(other.key)
    text = _described(other)
    if other.key != "lr":
        return Cause(name, text, [by], column="settings")
    scheduled = max(other.step.schedules, default=0)
    right_scheduled = max(other.right_step.schedules, default=0)
    if right_scheduled and scheduled == right_scheduled * ranks:
        name = "learning rate schedule"
        text += (
            f": the schedule was stepped {scheduled} times by then, and {right_scheduled} times in"
            " one process"
        )
        if framework == ACCELERATE:
            text += ", as Accelerate steps a prepared schedule: once for each rank's batch"
            return Cause(name, text, [by], is_error=False, column="settings")
    elif _is_times(other, float(ranks)):
        text += f": it is {ranks} ×, scaled by the number of ranks"
    elif _is_times(other, ranks**0.5):
        text += f": it is √{ranks} ×, scaled by the root of the number of ranks"
    return Cause(name, text, [by], fix=fix_for(name, framework), column="settings")


def _name_of_setting(key: str) -> str:
    return LEARNING_RATE if key == "lr" else key


def _described(other: _OtherSetting) -> str:
    """Return the setting in words: `learning rate 0.02 on rank 0 instead of 0.01`."""
    return (
        f"{_name_of_setting(other.key)} {_short(other.mine)} on rank {other.rank} instead of"
        f" {_short(other.right)}"
    )


def _is_times(other: _OtherSetting, factor: float) -> bool:
    """Return whether a setting is that of one process times a factor."""
    mine = other.mine
    right = other.right
    if not isinstance(mine, int | float) or not isinstance(right, int | float):
        return False
    return right != 0 and _close(mine / right, factor)


def _close(mine: object, right: object) -> bool:
    if isinstance(mine, int | float) and isinstance(right, int | float):
        return abs(mine - right) <= 1e-6 * max(abs(mine), abs(right))
    return mine == right


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
