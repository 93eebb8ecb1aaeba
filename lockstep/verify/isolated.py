"""Runs each case of a verification in a process of its own, with a time limit.

A rank's process only imports; each case runs in a fork of it, which joins the ranks of its case. So nothing that a case
leaves behind (a default dtype, a table in float64, a counter in a user's module) is there for the next one, and one
that crashes or hangs ends alone. Each writes how it ended into its folder, where `why_not_ended` reads it.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.environment import rank_facts
from lockstep.errors import LockstepError, RunError
from lockstep.launch.failures import first_cause, from_exception, from_exit_code, newest_stack, read_all, stacks_file
from lockstep.launch.worker import die_with_this_process

_PLACE = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
_POLL = 0.01  # seconds between two looks at a case that runs
_GRACE = 2.0  # seconds for a case to write its stack before it is killed


def run_isolated(run: Callable[[], None], folder: Path, number: int, seconds: float, *, alone: bool) -> bool:
    """Run a case in a fork of this process, which has imported much and started no thread of torch.

    Args:
        run: what the case does.
        folder: receives the failure, or the stack of a case that hangs.
        number: of the case among those of this launch; its ranks find each other by it.
        seconds: limit.
        alone: it is one process, and no rank.

    Returns:
        whether it ended within the limit.
    """
    facts = rank_facts()
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _run(run, folder, number, seconds, alone)
    deadline = time.monotonic() + seconds + _GRACE
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            (folder / f"hung-{facts.rank}").touch()
            return False
        time.sleep(_POLL)
    code = os.waitstatus_to_exitcode(status)
    if code and not (folder / f"rank-{facts.rank}.json").exists():
        from_exit_code(facts.rank, facts.world_size, code, time.time(), None).write(folder)
    return True


def _run(run: Callable[[], None], folder: Path, number: int, seconds: float, alone: bool) -> None:
    """Run a case in this new process, and end it."""
    facts, code = rank_facts(), 0
    die_with_this_process()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in _PLACE if alone else ():
        os.environ.pop(name, None)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # a prefix of the keys by which the ranks meet
    stacks = stacks_file(folder, facts.rank).open("w")
    faulthandler.dump_traceback_later(seconds, file=stacks)
    try:
        run()
    except BaseException as error:
        failure = from_exception(error, facts, None)
        failure.write(folder)
        code = failure.exit_code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skip the shutdown, which may wait for peers that are gone


def why_not_ended(folder: Path, ranks: int, seconds: float) -> LockstepError | None:
    """Return why a case did not end well: the first error of a rank, or where each rank hangs; None if it did."""
    hung = [rank for rank in range(ranks) if (folder / f"hung-{rank}").exists()]
    cause = first_cause(read_all(folder))
    if cause is not None and (not hung or not cause.consequence):
        return cause.error()
    if not hung:
        return None
    places = [f"rank {rank} at {newest_stack(folder, rank).place or 'an unknown place'}" for rank in hung]
    return RunError(
        f"no answer within {seconds:.0f} s: {'; '.join(places)}",
        why="a collective waits for a rank that does not call it, or a loop does not end",
        fix="let all ranks call the same collectives in the same order",
    )
