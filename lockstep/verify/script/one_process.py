"""Runs the one process with which ranks are compared, and gives it what the ranks had.

    samples     those of all ranks, batch by batch, together or one rank's after the other's
    state       first values, settings of the optimizer, numbers that the loop draws
    names       of parameters, where a framework wraps the model on several ranks only

If it does not train on the samples of the ranks then, one process for each rank is compared, or
nothing is judged.

Tests: tests/verify/test_script.py
"""

from collections.abc import Sequence

from lockstep.errors import LockstepError, first_line
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.samples_of_ranks import is_cut_by_script
from lockstep.verify.script.comparison import ScriptComparison
from lockstep.verify.script.feeds import one_after_another, united
from lockstep.verify.script.record import ScriptRecord, batch_file, names_by_order


def reference_of(comparison: ScriptComparison) -> ScriptRecord | None:
    """Return one process's record, given the ranks' samples, first values and settings.

    None if it can't be compared with the ranks; the outcome says why.
    """
    shared = is_cut_by_script(comparison.world)
    readers = comparison.world.leaders[: 1 if shared else None]
    _give_samples(comparison, readers, shared=shared)
    _give_state(comparison)
    try:
        reference = comparison.alone("given the samples of all ranks", [comparison.feed])[0]
    except LockstepError as error:
        text = "one process, with which ranks are compared, does not run the script: "
        return _mean_of_each_rank(comparison, None, text + first_line(error))
    if reference.names:
        comparison.give(names=reference.names)
    names = names_by_order(reference, comparison.records[0])
    if names:
        comparison.give(names=names)
        reference = comparison.alone("with the ranks' names of its parameters", [comparison.feed])[
            0
        ]
    reference = _accumulating_as_ranks(comparison, reference, readers)
    why = _why_not_compared(comparison, reference)
    return _mean_of_each_rank(comparison, reference, why) if why else reference


def _mean_of_each_rank(
    comparison: ScriptComparison, written: ScriptRecord | None, why: str
) -> ScriptRecord | None:
    """Return the mean of one process for each rank, where one can't be given all their samples.

    `why`: it can't be; the outcome says so if there is no such mean either.
    """
    mean = comparison.take_each_alone(written)
    if mean is None:
        comparison.outcome.leave_open(why)
        return None
    comparison.note_each_alone()
    text = (
        "samples come from no DataLoader: the mean of one process for each rank is compared,"
        " given the random numbers that the rank drew, the places from which it read, and the"
        " numbers of Python and NumPy of which it made its tensors"
    )
    by = "the inputs of the models, the same on each rank and in its process"
    cause = Cause("samples", text, [by], is_error=False, column="samples")
    comparison.outcome.causes.append(cause)
    return mean


def _give_samples(
    comparison: ScriptComparison, readers: Sequence[ScriptRecord], *, shared: bool
) -> None:
    """Let one process read the ranks' samples, as far as they could be stored.

    `shared`: all ranks read the same batches, of which one process takes a single one.
    """
    feed = united(comparison.world, shared=shared)
    files = [
        batch_file(comparison.folder, rank, loader, index)
        for (loader, _), batches in feed.items()
        for rank, index in batches
    ]
    if not all(file.exists() for file in files):
        feed = {}
        comparison.outcome.notices.append("samples could not be stored: one process reads its own")
    comparison.feed_samples(feed)
    loaders = comparison.records[0].batches if feed else {}
    sizes = {loader: _size_of_batch(readers, loader) for loader in loaders}
    comparison.give(
        samples=comparison.folder,
        sizes={loader: size for loader, size in sizes.items() if size},
    )


def _give_state(comparison: ScriptComparison) -> None:
    """Let one process start from the ranks' first values, with their settings and draws."""
    leaders = [unit[0] for unit in comparison.world.units]
    comparison.give(
        first=comparison.on_ranks([record.first for record in comparison.records]),
        settings=tuple(step.settings for step in comparison.records[0].steps),
        draws={rank: comparison.records[rank].draws for rank in leaders},
        order=tuple(comparison.records[0].steps[0].order),
    )


def _size_of_batch(readers: Sequence[ScriptRecord], loader: int) -> int:
    """Return the samples in the first batch of a loader, over the ranks that read."""
    batches = [record.batches.get(loader) for record in readers]
    return sum(len(read[0]) for read in batches if read)


def _accumulating_as_ranks(
    comparison: ScriptComparison, reference: ScriptRecord, readers: Sequence[ScriptRecord]
) -> ScriptRecord:
    """Return the record of one process that has the ranks' global batch in each step.

    A script with a fixed global batch accumulates over more micro-batches on fewer ranks: two ranks
    with 4 micro-batches a step each are one process with 8, which gets the batches of the ranks one
    after another, and not together.
    """
    units = len(comparison.world.units)
    of_rank = comparison.records[0].passes[:1]  # micro-batches of the first step
    of_process = reference.passes[:1]
    makes_up = bool(of_rank) and units > 1 and of_process == [of_rank[0] * units]
    loader = comparison.records[0].training_loader
    if not comparison.feed:
        if not makes_up:
            return reference
        comparison.give(in_turn=True)
        return comparison.alone("given each rank's random numbers in turn", [comparison.feed])[0]
    if loader is None:
        return reference
    if not makes_up:
        _say_batch(comparison, reference, loader, readers)
        return reference
    comparison.give(sizes={})
    comparison.feed_samples(one_after_another(comparison.world), in_turn=True)
    reference = comparison.alone("given the samples of each rank in turn", [comparison.feed])[0]
    comparison.outcome.notices.append(
        f"as written, {comparison.ranks} ranks accumulate over {of_rank[0]} micro-batches a step"
        f" and one process over {of_process[0]}: the same global batch"
    )
    return reference


def _say_batch(
    comparison: ScriptComparison,
    reference: ScriptRecord,
    loader: int,
    readers: Sequence[ScriptRecord],
) -> None:
    """Say how many samples a step has, and whether one process as written has as many."""
    size = _size_of_batch(readers, loader)
    written = reference.asked.get(loader)
    passes = comparison.records[0].passes[0]
    if written is None or written == size:
        notice = f"{size * passes} samples a step on any number of ranks"
    else:
        notice = (
            f"as written, one process takes {written * passes} samples a step, and"
            f" {comparison.ranks} ranks take {size * passes}: one process was given the"
            f" {size * passes} together"
        )
    comparison.outcome.notices.append(notice)


# ---- whether it trains on the samples of the ranks ----


def _why_not_compared(comparison: ScriptComparison, reference: ScriptRecord) -> str:
    """Return why one process, which trains on other samples, can't be compared; or empty."""
    reads_by_loader = comparison.records[0].training_loader is not None
    if not reference.steps:
        return "one process took no step"
    if not comparison.feed or not (reads_by_loader or _begins_alike(comparison, reference)):
        return _other_inputs(comparison, reference)
    passes = comparison.records[0].passes
    if not comparison.in_turn and reference.passes != passes[: comparison.outcome.steps]:
        return f"one process takes {reference.passes[0]} micro-batches a step, a rank {passes[0]}"
    return ""


def _begins_alike(comparison: ScriptComparison, reference: ScriptRecord) -> bool:
    """Return whether one process begins with the samples of all ranks.

    Its first forward pass is compared with those of the ranks.
    """
    firsts = [record.steps[0].inputs[:1] for record in comparison.world.leaders]
    ranks = [row for first in firsts for rows in first for row in rows]
    process = [row for rows in reference.steps[0].inputs[:1] for row in rows]
    return bool(ranks) and sorted(ranks) == sorted(process)


def _other_inputs(comparison: ScriptComparison, reference: ScriptRecord) -> str:
    """Say which samples one process reads that ranks do not, without a loader; or nothing."""
    for number in range(comparison.outcome.steps):
        units = [record.steps[number] for record in comparison.world.leaders]
        right = reference.steps[number]
        mine = [sum(map(len, step.inputs)) for step in units]
        theirs = sum(map(len, right.inputs))
        total = sum(step.elements for step in units) % 2**64
        if not mine[0]:
            return "the samples come from no DataLoader, and the model has no inputs to compare"
        # All ranks may read the same samples, of which one process takes them once.
        of_one_unit = units[0].elements if len(set(mine)) == 1 else total
        if right.elements not in (total, of_one_unit):
            return (
                f"in step {number + 1}, one process trains on {theirs} samples and"
                f" {comparison.ranks} ranks on {sum(mine)}, which are not the same; they don't come"
                " from a DataLoader, through which one process could get them; an argument such as"
                " {16/n} holds a global batch of 16 on n ranks"
            )
    return ""
