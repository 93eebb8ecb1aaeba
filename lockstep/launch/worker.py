"""Being a rank: die with the launcher, write to the log, and leave a failure where the launcher finds it.

The same for every launcher. Under Lockstep's own, the launcher prints the one message; under torchrun, srun, mpirun or
none at all, the first rank of this machine to fail prints it.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from lockstep import cores, heartbeat, scratch, signals
from lockstep.environment import parent_identity, rank_facts
from lockstep.errors import EXIT_DONE, EXIT_PREEMPTED, LockstepError, UsageError
from lockstep.launch.failures import Failure, done_mark, from_exception, preempted
from lockstep.launch.hang import STACKS_SIGNAL
from lockstep.launch.stacks import stacks_file
from lockstep.launch.streams import Shown, Tee, console, to_log

LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"  # set by Lockstep's launcher for its workers
FAILURES = "LOCKSTEP_FAILURES"  # the folder where it reads their failures
_PR_SET_PDEATHSIG = 1


def run_as_worker(
    work: Callable[[], int | None], *, logs: Path, launched: bool = True, children_too: bool = False
) -> int:
    """`work()` as this process's rank, its output in `logs/rank-N.log`.

    Args:
        work: returns an exit code (None is 0); may raise.
        launched: a launcher started this process for this; False: a person did, and the process is theirs.
        children_too: where this rank's output is shown, that of the processes which it starts is shown as well.

    Returns:
        the exit code for this process. Under Lockstep's launcher a preempted rank leaves with 0, having said so in its
        file: the agent takes any other code for a failure and would stop the ranks that are still saving.
    """
    facts = rank_facts()
    if launched:
        die_with_parent()
        cores.bind(facts.local_rank, facts.local_world_size)  # before torch makes threads
    # Taken out of the environment: processes that this one starts are no ranks.
    os.environ.pop(LAUNCHER_PID, None)
    folder = os.environ.pop(FAILURES, None)
    log = logs / f"rank-{facts.rank}.log"

    def leave(number: int) -> None:
        """There is nothing to save before the training has begun; whoever trains answers the signals then."""
        said = f"stopped by {signals.name_of(number)} before the training began"
        told = folder is not None and _left(preempted(facts, said), Path(folder))
        if facts.is_main and not told:  # Lockstep's launcher says it, unless it ended the ranks for another's failure
            with suppress(OSError):
                os.write(console(sys.stderr).fileno(), f"lockstep: {said}\n".encode())
        signals.end_now(EXIT_DONE if told else EXIT_PREEMPTED, "")

    shown = Shown.told().streams(facts.local_rank, is_main=facts.is_main)
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):  # where torch's @record writes; the agent names none
        os.environ["TORCHELASTIC_ERROR_FILE"] = str((logs / f"rank-{facts.rank}.error.json").absolute())
    stream: Tee | None = None
    with ExitStack() as stack:
        stack.enter_context(signals.answered(leave))
        try:
            stream = stack.enter_context(to_log(log, on_console=shown, descriptors=launched, children_too=children_too))
            if launched:
                faulthandler.enable(file=log.open("a"))
                _answer_with_stacks(logs, facts.rank)
            code = work() or EXIT_DONE
            failure = preempted(facts) if code == EXIT_PREEMPTED else None
            if failure is None and folder is not None:
                Path(folder, done_mark(facts.rank)).touch()
        except SystemExit as error:
            failure = from_exception(error, facts, log)
        except (Exception, KeyboardInterrupt) as error:
            failure = from_exception(error, facts, log)
        if failure is None:
            return code
        _tell(failure, None if folder is None else Path(folder), stream)
        if failure.kind != "preempted" and launched:
            _leave_at_once(failure.exit_code)
        return EXIT_DONE if failure.kind == "preempted" and folder is not None else failure.exit_code


def _answer_with_stacks(logs: Path, rank: int) -> None:
    """Write all threads' stacks when the launcher asks for them, even while Python waits for something in C."""
    if heartbeat.FOLDER in os.environ:
        file = stacks_file(logs, rank).open("a")
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


def _tell(failure: Failure, folder: Path | None, stream: Tee | None) -> None:
    """Write the traceback to the log, and leave the failure for the launcher, or print it.

    The disk of the log, or that of the launcher's folder, may be the one that is full.

    Args:
        stream: the one whose log takes the traceback; None where the log could not be opened.
    """
    if failure.traceback and failure.kind != "usage" and (stream is None or not stream.write_to_log(failure.traceback)):
        failure = replace(failure, log=None)  # the message must not refer to what is not there
    if not _left(failure, folder) and failure.kind != "preempted" and first_to_fail():
        print_error(failure.error(), failure.traceback)


def _left(failure: Failure, folder: Path | None) -> bool:
    """Whether the failure lies where the launcher reads it."""
    if folder is None:
        return False
    try:
        failure.write(folder)
    except OSError:  # the disk of the launcher's folder is full, too: the console is what is left
        return False
    return True


def _leave_at_once(code: int) -> None:
    """Leave without the interpreter's shutdown, which may wait for peers that are gone."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def first_to_fail() -> bool:
    """Whether no other rank of this machine has failed yet in this attempt: the launcher is their common parent."""
    try:
        if rank_facts().world_size == 1:
            return True
    except UsageError:  # the environment contradicts itself, for each rank in its own way
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    scratch.sweep()
    try:
        Path(tempfile.gettempdir(), f"lockstep-failed-{os.getuid()}-{parent_identity()}-{attempt}").touch(
            exist_ok=False
        )
    except FileExistsError:
        return False
    except OSError:  # the disk is full: a message too many is better than none
        return True
    return True


def print_error(error: LockstepError, trace: str = "") -> None:
    """The one message, to the console, past the log."""
    stream = console(sys.stderr)
    if os.environ.get("LOCKSTEP_TRACEBACK") == "1" and trace:
        stream.write(trace)
    stream.write(f"lockstep: {error}\n")
    stream.flush()


@contextmanager
def environment_with(added: Mapping[str, str]) -> Iterator[None]:
    """The environment with these variables, for processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def die_with_this_process() -> None:
    """In a process that was just made: have the kernel kill it when the one that made it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies, however it dies (Linux)."""
    die_with_this_process()
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and int(launcher) != os.getppid():
        os._exit(1)  # the launcher died before the line above
