"""Names the setting of an optimizer, as its learning rate, that is another on ranks.

Tests: tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.fixes import fix_for
from lockstep.verify.script.record import ACCELERATE, RecordedStep, ScriptRecord

LEARNING_RATE = "learning rate"


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
            wrong = [key for key in right if not is_close(mine.get(key), right[key])]
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
    return right != 0 and is_close(mine / right, factor)


def is_close(mine: object, right: object) -> bool:
    """Return whether two values of a setting are equal, numbers up to rounding."""
    if isinstance(mine, int | float) and isinstance(right, int | float):
        return abs(mine - right) <= 1e-6 * max(abs(mine), abs(right))
    return mine == right


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
