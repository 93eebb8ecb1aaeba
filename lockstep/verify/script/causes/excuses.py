"""Takes causes for right that make up for each other, or come from rounded numbers of batches.

    a learning rate × ranks, and a gradient / ranks       the weights are those of one process
    a schedule as long as a rank's loader                 so is that of one process with that length

One process with its own settings shows it.

Tests: tests/verify/test_script.py
"""

from collections.abc import Mapping
from dataclasses import replace

from lockstep.errors import listed
from lockstep.verify.comparison_result import Cause, Outcome
from lockstep.verify.script.causes.gradients import SUM
from lockstep.verify.script.causes.settings import LEARNING_RATE, settings_cause
from lockstep.verify.script.comparison import ScriptComparison
from lockstep.verify.script.record import ScriptRecord


def excuse_factors_that_cancel(comparison: ScriptComparison) -> None:
    """Take a learning rate and a gradient for right where one makes up for the other.

    A mean over ranks divides a summed loss by their number, and the rate may be multiplied by it.
    Where the update is linear in the gradient, as that of SGD, one process with its own rate and
    its own gradients has the same weights.
    """
    causes = [cause for cause in comparison.outcome.causes if cause.is_error]
    if comparison.each_alone or {cause.kind for cause in causes} != {LEARNING_RATE, SUM}:
        return
    given = replace(comparison.given, settings=(), gradients=())
    own = comparison.alone("with its own settings", [comparison.feed], given=given)[0]
    steps = range(comparison.outcome.steps)
    if len(own.steps) < len(steps) or any(
        max(comparison.updates(number, comparison.world, own)) > 50 * comparison.rounding
        for number in steps
    ):
        return
    for cause in causes:
        _excuse(
            comparison.outcome,
            cause,
            "rate and gradient make up for each other: one process with its own has the same"
            " weights",
            by="weights after each step, of one process with its own learning rate",
        )


def excuse_schedules_of_other_lengths(
    comparison: ScriptComparison, reference: ScriptRecord
) -> None:
    """Take a learning rate for right whose schedule is as long as a rank's loader.

    Numbers of batches are rounded: of 25 samples two ranks have 4 and 3 batches of 4, and one
    process has 4 of 8. One process whose loaders say that they have a rank's number of batches then
    steps with the rate of the ranks.
    """
    causes = [cause for cause in comparison.outcome.causes if cause.is_error]
    if comparison.each_alone or [cause.kind for cause in causes] != [LEARNING_RATE]:
        return
    of_ranks = [_batches_of_loaders(record) for record in comparison.records]
    tried = [_batches_of_loaders(reference, comparison.given.sizes)]
    for choose in (min, max):
        lengths = {
            loader: choose(of_rank.get(loader, 0) for of_rank in of_ranks) for loader in of_ranks[0]
        }
        if not all(lengths.values()) or lengths in tried:
            continue
        tried.append(lengths)
        given = replace(comparison.given, settings=(), gradients=(), lengths=lengths)
        what = f"with loaders of {listed(sorted(map(str, set(lengths.values()))))} batches"
        own = comparison.alone(what, [comparison.feed], given=given)[0]
        if settings_cause(comparison.records, own) is not None:
            continue
        _excuse(
            comparison.outcome,
            causes[0],
            "the schedule is as long as a rank's loader: one process, whose number of batches is"
            " rounded otherwise, has the same rate with that length",
            by="the rate of one process whose loaders say that they are as long as a rank's",
        )
        return


def _excuse(outcome: Outcome, cause: Cause, why: str, *, by: str) -> None:
    """Keep a cause as something that is not an error, with the reason and how it was found."""
    outcome.causes.remove(cause)
    excused = replace(
        cause,
        text=f"{cause.text}; {why}",
        found_by=[*cause.found_by, by],
        is_error=False,
    )
    outcome.causes.append(excused)


def _batches_of_loaders(
    record: ScriptRecord, sizes: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Return how many batches each training loader has, where `len` says it.

    `sizes`: of the batches with which loaders were made, where the script asked for others.
    """
    made_with = {**record.asked, **(sizes or {})}
    return {
        loader: record.lengths[loader][0] // made_with[loader]
        for loader in record.training_loaders
        if loader in record.lengths and made_with.get(loader)
    }
