"""Names why ranks have not taken the same steps: they hang, one fails, or one has fewer batches.

Tests: tests/verify/test_script.py
"""

from collections.abc import Sequence
from itertools import zip_longest

from lockstep.diagnose import recognise
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.fixes import script_cause
from lockstep.verify.script.record import ScriptRecord

_UNEVEN = "uneven steps"


def uneven_steps_cause(records: Sequence[ScriptRecord], framework: str) -> Cause | None:
    """Return the cause if a rank has taken fewer steps than another."""
    steps = [len(record.steps) for record in records]
    fewest = steps.index(min(steps))
    most = steps.index(max(steps))
    if steps[fewest] == steps[most]:
        return None
    text = f"rank {fewest} took {steps[fewest]} steps, and rank {most} has taken {steps[most]}"
    return script_cause(_UNEVEN, text, "the optimizer's steps on each rank", framework)


def crash_cause(error: str, ranks: int, framework: str) -> Cause:
    """Return why ranks fail where one process does not.

    `error`: the first line of the error of the rank that failed.
    """
    by = "the script's own error"
    known = recognise(error)
    # Had the other rank failed, its own error would have been reported, and not this one.
    if known is not None and known.name == "a peer is gone":
        text = f"a rank has ended, and another still needs it: {error}"
        return script_cause(_UNEVEN, text, by, framework)
    text = f"the script runs as one process, and not on {ranks} ranks: {error}"
    return Cause("crash", text, [by])


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
