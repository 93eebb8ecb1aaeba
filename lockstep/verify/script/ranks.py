"""Finds what the ranks of a script show by themselves.

These are their samples, random numbers, first values, settings, replicas and hangs.

Tests: tests/verify/test_samples_of_ranks.py, tests/verify/test_script.py
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from lockstep.errors import listed
from lockstep.verify.outcome import Cause
from lockstep.verify.script.draws import BatchKey, drawn_alike, drawn_apart
from lockstep.verify.script.fixes import fix_for, script_cause
from lockstep.verify.script.record import ACCELERATE, ScriptRecord, Tensors, World

_BY_SAMPLES = "fingerprints of the samples of each rank"


def _unequal_names(mine: Tensors, right: Tensors) -> list[str]:
    """Return the names of tensors that differ in any element, or are missing."""
    return [
        name for name in right if name not in mine or not np.array_equal(mine[name], right[name])
    ]


def seen_on_ranks(world: World) -> list[Cause]:
    """Return causes that a run of several ranks shows by itself."""
    found = [
        _other_samples(world),
        _same_samples(world),
        _same_draws(world),
        _same_loop_draws(world),
        _other_first_values(world),
        _other_precision(world),
    ]
    return [one for one in found if one is not None]


def loop_causes(records: Sequence[ScriptRecord]) -> list[Cause]:
    """Return mistakes of the loop itself, which one process makes, too."""
    found: dict[str, Cause] = {}
    for rank, record in enumerate(records):
        for finding in record.findings:
            text = finding["text"] + (f" (on rank {rank})" if rank else "")
            by = "the loop's own calls, gradients and updates"
            found.setdefault(
                finding["kind"],
                Cause(
                    finding["kind"],
                    text,
                    [by],
                    fix=finding["fix"],
                    column="loop",
                    line=finding["line"],
                ),
            )
    return list(found.values())


def _batches_read(record: ScriptRecord, loader: int | None) -> list[list[str]]:
    """Return the samples of each batch of a training loader that the steps have used.

    Without a loader the rows of the model's inputs.
    """
    if loader is not None:
        return record.batches_trained_on(loader)
    return [rows for step in record.steps for rows in step.inputs]


def _loaders_of(record: ScriptRecord) -> list[int | None]:
    """Return the training loaders; None alone, where samples come from none."""
    return [*record.training_loaders] or [None]


def is_cut_by_script(world: World) -> bool:
    """Return whether all units read the same batches but give the model other parts of them."""
    leaders = world.leaders
    loaders = leaders[0].training_loaders
    if not loaders or len(leaders) == 1:
        return False
    batches = [[_batches_read(record, loader) for loader in loaders] for record in leaders]
    inputs = [[step.elements for step in record.steps] for record in leaders]
    is_same = all(one == batches[0] for one in batches)
    if not is_same or not any(inputs[0]) or all(one == inputs[0] for one in inputs):
        return False
    if not drawn_apart([record.draws for record in leaders]):
        return True
    # Ranks that add noise of their own have other inputs, too, and as many rows as they read.
    rows = max((len(rows) for step in leaders[0].steps for rows in step.inputs), default=0)
    return rows < max((len(batch) for read in batches[0] for batch in read), default=0)


def _other_samples(world: World) -> Cause | None:
    """Return a cause if ranks that share a model read other samples."""
    for unit in world.units:
        for loader in _loaders_of(world.records[unit[0]]):
            found = _other_samples_of(world, unit, loader)
            if found is not None:
                return found
    return None


def _other_samples_of(world: World, unit: Sequence[int], loader: int | None) -> Cause | None:
    """Return a cause if ranks that share a model read other samples of a loader."""
    right = _batches_read(world.records[unit[0]], loader)
    for rank in unit[1:]:
        # A stage of a pipeline may read nothing, or less than the first.
        record = world.records[rank]
        is_read = loader is None or loader in record.batches
        mine = _batches_read(record, loader) if is_read else []
        pairs = list(zip(mine, right, strict=False))
        if all(one == other for one, other in pairs):
            continue
        at = next(number for number, (one, other) in enumerate(pairs) if one != other)
        text = (
            f"ranks {unit[0]} and {rank} share a model, and read other samples in batch"
            f" {at + 1}: each computes its part of the layers for samples of its own"
        )
        fix = (
            "give ranks that share a model the same samples: DistributedSampler(data,"
            " num_replicas=data-parallel size, rank=data-parallel rank)"
        )
        return Cause("samples", text, [_BY_SAMPLES], fix=fix, column="samples")
    return None


def _same_samples(world: World) -> Cause | None:
    """Return a cause if ranks read samples of each other, of any loader that is trained on."""
    if len(world.leaders) == 1 or is_cut_by_script(world):
        return None
    found = [_same_samples_of(world, loader) for loader in _loaders_of(world.leaders[0])]
    causes = [cause for cause in found if cause is not None]
    causes.sort(key=lambda cause: not cause.is_error)
    return next(iter(causes), None)


def _same_samples_of(world: World, loader: int | None) -> Cause | None:
    """Return a cause if ranks read samples of each other, of one loader; or without any."""
    leaders = world.leaders
    framework = leaders[0].framework
    steps = len(leaders[0].steps)
    batches = [_batches_read(record, loader) for record in leaders]
    flat = [[sample for batch in rank for sample in batch] for rank in batches]
    if len(set(flat[0])) < 2:
        return None
    alike = [
        world.units[position][0] for position in range(1, len(flat)) if flat[position] == flat[0]
    ]
    if alike:
        every = (
            "all ranks" if len(alike) == len(flat) - 1 else f"ranks 0, {', '.join(map(str, alike))}"
        )
        same = f"{every} train on the same {len(flat[0])} samples in {steps} steps"
        text = f"the loader is not sharded: {same}"
        if loader is None:
            text = f"the loop gives ranks no samples of their own: {same}"
        return _samples_cause(text, _BY_SAMPLES, leaders[0], loader)
    read, held = leaders[0].lengths.get(-1 if loader is None else loader, (0, 0))
    is_replacing = loader in leaders[0].replacing
    if not is_replacing and _have_same_data(leaders, loader) and read * len(leaders) > 1.5 * held:
        text = (
            f"the loader is not sharded: each rank reads {read} samples an epoch, in an order of"
            f" its own, of {held}"
        )
        by = "the lengths of the loader and of its data"
        return _samples_cause(text, by, leaders[0], loader)
    mine = set(flat[0])
    others = set().union(*flat[1:])
    in_an_epoch = not read or len(flat[0]) <= read
    if (
        in_an_epoch
        and _goes_by_an_order(leaders[0], loader)
        and len(mine & others) > len(flat)
        and all(len(set(rank)) == len(rank) for rank in flat)
    ):
        text = (
            f"ranks read each other's samples: {len(mine & others)} of the {len(mine)} samples of"
            " rank 0 are "
            f"another rank's in these {steps} steps, though no rank has read one twice: each takes"
            " its part of an "
            "order of its own, and others are read by nobody"
        )
        return _samples_cause(text, _BY_SAMPLES, leaders[0], loader)
    at_once = [set(here) & set().union(*there) for here, *there in zip(*batches, strict=False)]
    if twice := sum(map(len, at_once)):
        text = (
            f"{twice} of the {len(flat[0])} samples of rank 0 were another rank's in the same"
            " step, too"
        )
        fix = fix_for("samples", framework)
        return Cause("samples", text, [_BY_SAMPLES], is_error=False, fix=fix, column="samples")
    return None


def _samples_cause(text: str, by: str, record: ScriptRecord, loader: int | None) -> Cause:
    """Return the cause that ranks share samples of a loader, with the line that makes it."""
    found = script_cause("samples", text, by, record.framework)
    if loader is not None:
        found.place_at(record.places.loaders.get(loader, ""))
    return found


def _have_same_data(leaders: Sequence[ScriptRecord], loader: int | None) -> bool:
    """Return whether the loader of each rank goes through the same data, and not its own part."""
    if loader is None or leaders[0].lengths.get(loader, (0, 0))[1] == 0:
        return False
    return all(record.data.get(loader) == leaders[0].data.get(loader) for record in leaders)


def _goes_by_an_order(record: ScriptRecord, loader: int | None) -> bool:
    """Return whether a rank goes through an order of samples, and does not draw each by itself.

    Ranks that draw crops of a text, or samples with replacement, meet now and then by chance.
    """
    if loader is None:
        return any(draw.is_permutation for draw in record.draws)
    return loader not in record.replacing


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
            " pass, is drawn "
            "alike on all ranks: samples at the same place of a batch get the same mask, and each"
            " its own in one "
            "process"
        )
        by = (
            "the generators' states before a forward pass, and after it has moved them, are the"
            " same on several ranks"
        )
        return script_cause(kind, text, by, framework)
    text = (
        f"dropout, or what else draws from {listed(drawn)}'s generator in a forward pass, is drawn"
        " by each rank on "
        "its own: one process draws other numbers, so the step is equal only up to them"
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
    places = drawn_alike(draws, rows)
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
    found: dict[BatchKey, set[int]] = {}
    for loader, read in leaders[0].batches.items():
        sizes = {len(batch) for batch in read}
        for index, batch in enumerate(read):
            others = [record.batches.get(loader, [])[index : index + 1] for record in leaders[1:]]
            if batch and all(other != [batch] for other in others):
                found[loader, index] = sizes
    return found


def _rows_of_passes(leaders: Sequence[ScriptRecord]) -> dict[BatchKey, set[int]]:
    """Return the numbers of rows that models get in passes whose inputs differ on ranks."""
    found: dict[BatchKey, set[int]] = {}
    number = 0
    for steps in zip(*(record.steps for record in leaders), strict=False):
        sizes = {len(rows) for rows in steps[0].inputs if rows}
        is_other = all(step.elements != steps[0].elements for step in steps[1:])
        for _ in steps[0].losses:
            if is_other:
                found[-1, number] = sizes
            number += 1
    return found


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


def replicas_cause(world: World, number: int) -> Cause | None:
    """Return the cause if replicas that were equal differ.

    They differ between one step and the next, or after an update with equal gradients.
    """
    for at in range(number + 1):
        steps = [record.steps[at] for record in world.records]
        cut = {
            name
            for step in steps
            for name, piece in step.values.items()
            if piece.cuts or piece.flat
        }
        held = set.intersection(*(set(step.values) for step in steps)) - cut - set(world.joined)
        states = [
            {name: value for name, value in step.before.items() if name in held} for step in steps
        ]
        wrong = [
            name
            for name in states[0]
            if any(state.get(name) != states[0][name] for state in states)
        ]
        if wrong and not at:
            return None
        if wrong:
            text = (
                f"{listed(wrong, 5)} were equal on all ranks after step {at}, and differ before"
                f" step {at + 1} "
                "updates"
            )
            fix = (
                "let nothing but the optimizer write weights, or let it write the same on all ranks"
            )
            return Cause(
                "replicas",
                text,
                ["fingerprints of each rank's parameters"],
                fix=fix,
                column="weights",
            )
        values = world.tensors([step.values for step in steps])
        gradients = world.tensors([step.gradients for step in steps])
        if any(_unequal_names(other, values[0]) for other in values[1:]):
            if any(_unequal_names(other, gradients[0]) for other in gradients[1:]):
                return None
            text = (
                f"weights and gradients are equal on all ranks in step {at + 1}, and the updated"
                " weights are not"
            )
            return Cause(
                "replicas", text, ["parameters and gradients of each rank"], column="weights"
            )
    return None


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
    for mine in zip_longest(*called):
        kinds = [None if one is None else one[:2] for one in mine]
        if any(kind != kinds[0] for kind in kinds):
            calls = [
                "nothing" if one is None else f"{one[0]} ({one[1]} elements, {one[2]})"
                for one in mine
            ]
            said = ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            text = f"ranks call different collectives: {said}; {at}"
            return script_cause(
                "hang",
                text,
                "the collectives that the script calls on each rank, in order",
                framework,
            )
    if ended := [rank for rank, location in locations.items() if not location]:
        done = records[ended[0]]
        steps = 0 if done is None else len(done.steps)
        text = (
            f"rank {ended[0]} has ended after {steps} step{'s' * (steps != 1)}, and others wait for"
            f" it: {at}"
        )
        return script_cause("uneven steps", text, "the stacks of the ranks", framework)
    return script_cause(
        "hang", f"all ranks wait for each other: {at}", "the stacks of the ranks", framework
    )


def settings_cause(records: Sequence[ScriptRecord], reference: ScriptRecord) -> Cause | None:
    """Return the cause if a setting, such as the learning rate, is not that of one process.

    Each step is compared.
    """
    framework = records[0].framework
    ranks = len(records)
    for number, right in enumerate(reference.steps[: min(len(record.steps) for record in records)]):
        for rank, record in enumerate(records):
            step = record.steps[number]
            for mine, theirs in zip(step.settings, right.settings, strict=False):
                wrong = [key for key in theirs if not _close(mine.get(key), theirs[key])]
                if not wrong:
                    continue
                key = "lr" if "lr" in wrong else wrong[0]
                name = "learning rate" if key == "lr" else key
                text = (
                    f"{name} {_short(mine.get(key))} on rank {rank} instead of"
                    f" {_short(theirs[key])}"
                )
                if any(
                    other.steps[number].settings != records[0].steps[number].settings
                    for other in records
                ):
                    text += ": ranks step with different settings"
                    return Cause(
                        name, text, ["the settings with which each rank stepped"], column="settings"
                    )
                by = "the settings with which the optimizer stepped"
                if key != "lr":
                    return Cause(name, text, [by], column="settings")
                steps = max(step.schedules, default=0)
                right_steps = max(right.schedules, default=0)
                times = mine["lr"] / theirs["lr"] if theirs["lr"] else 0.0
                if right_steps and steps == right_steps * ranks:
                    text += (
                        f": the schedule was stepped {steps} times by then, and {right_steps} times"
                        " in one process"
                    )
                    name = "learning rate schedule"
                    if framework == ACCELERATE:
                        text += (
                            ", as Accelerate steps a prepared schedule: once for each rank's batch"
                        )
                        return Cause(name, text, [by], is_error=False, column="settings")
                elif _close(times, float(ranks)):
                    text += f": it is {ranks} ×, scaled by the number of ranks"
                elif _close(times, ranks**0.5):
                    text += f": it is √{ranks} ×, scaled by the root of the number of ranks"
                return Cause(name, text, [by], fix=fix_for(name, framework), column="settings")
    return None


def _close(mine: object, right: object) -> bool:
    if isinstance(mine, int | float) and isinstance(right, int | float):
        return abs(mine - right) <= 1e-6 * max(abs(mine), abs(right))
    return mine == right


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
