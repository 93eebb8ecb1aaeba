"""The errors about calls that only some ranks make.

Tests: tests/failures/test_only_some.py
"""

from lockstep.errors import UsageError
from lockstep.heartbeat.files import Call


def different_calls(calls: dict[int, Call]) -> UsageError:
    """Return the error for ranks that make different calls at the same place in their order."""
    by_rank = sorted(calls.items())
    different = ", ".join(f"rank {rank} calls {call.name}" for rank, call in by_rank)
    lines = ", ".join(
        f"rank {rank} at {call.line or 'a line of Lockstep'}" for rank, call in by_rank
    )
    why = (
        "all ranks must make this call: one that only some of them make waits for the others for"
        " ever"
    )
    fix = (
        "call it on every rank, outside of `if is_main_process:`; rank 0 alone then writes the"
        " files"
    )
    return UsageError(
        f"the ranks do not make the same calls: {different}", where=lines, why=why, fix=fix
    )


def ended_without(rank: int, call: Call, left: dict[int, Call | None]) -> UsageError:
    """Return the error for a rank that makes a call before which other ranks have ended.

    `left` has the last calls of those ranks.
    """
    ended = sorted(left.items())
    ended_ranks = ", ".join(f"rank {other}" for other, _ in ended)
    have = "has" if len(ended) == 1 else "have"
    what = (
        f"the ranks do not make the same calls: rank {rank} calls {call.name}, and"
        f" {ended_ranks} {have} ended without it"
    )
    lines = [f"rank {rank} at {call.line or 'a line of Lockstep'}"]
    lines += [
        f"rank {other} ended after {'no call' if last is None else last}" for other, last in ended
    ]
    why = (
        "all ranks must make this call; one that comes to the end of the script first can't take"
        " part in it"
    )
    fix = (
        "call it on every rank, before `if is_main_process:`, and leave there only what prints or"
        " writes its result"
    )
    return UsageError(what, where=", ".join(lines), why=why, fix=fix)
