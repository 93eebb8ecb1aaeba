"""Runs code as a rank: die with the launcher, write to the log, and leave a failure file for the launcher.

This works under every launcher. Lockstep's own launcher prints the one message; under torchrun, srun, mpirun or none at
all, the first rank of this machine to fail prints it.
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
from lockstep.launch.processes import stacks_file
from lockstep.launch.streams import ConsoleOutput, Tee, console, to_log

LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"  # set by Lockstep's launcher for its ranks
FAILURES = "LOCKSTEP_FAILURES"  # the folder where the launcher reads failure files
_PR_SET_PDEATHSIG = 1


def run_as_worker(
    work: Callable[[], int | None], *, logs: Path, launched: bool = True, include_children: bool = False
) -> int:
    """Run `work()` as this process's rank, with its output in `logs/rank-N.log`.

    Args:
        work: returns an exit code (None is 0); may raise.
        logs: the folder for the log.
        launched: whether a launcher started this process; False: a person did, and the process is theirs.
        include_children: whether the console also shows the output of child processes, if it shows this rank's.

    Returns:
        the exit code for this process. Under Lockstep's launcher a preempted rank exits with 0 after writing its
        failure file: torch's agent would stop the ranks that are still saving if one exits with another code.
    """
    facts = rank_facts()
    if launched:
        die_with_parent()
        cores.bind(facts.local_rank, facts.local_world_size)  # before torch makes threads
    # Removed from the environment: processes that this one starts are not ranks.
    os.environ.pop(LAUNCHER_PID, None)
    folder = os.environ.pop(FAILURES, None)
    log = logs / f"rank-{facts.rank}.log"

    def exit_on_signal(number: int) -> None:
        """Exit: there is nothing to save before training has begun. The trainer handles signals later."""
        text = f"stopped by {signals.name_of(number)} before the training began"
        written = folder is not None and _write_failure(preempted(facts, text), Path(folder))
        # Lockstep's launcher prints it, if needed; another one stops all ranks after one has printed why it failed.
        if facts.is_main and not written and not _failure_mark().exists():
            with suppress(OSError):
                os.write(console(sys.stderr).fileno(), f"lockstep: {text}\n".encode())
        signals.end_now(EXIT_DONE if written else EXIT_PREEMPTED, "")

    shown = ConsoleOutput.from_environment().streams(facts.local_rank, is_main=facts.is_main)
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torch's @record writes there; the agent sets none
        os.environ["TORCHELASTIC_ERROR_FILE"] = str((logs / f"rank-{facts.rank}.error.json").absolute())
    stream: Tee | None = None
    with ExitStack() as stack:
        stack.enter_context(signals.answered(exit_on_signal))
        try:
            stream = stack.enter_context(
                to_log(log, on_console=shown, descriptors=launched, include_children=include_children)
            )
            if launched:
                faulthandler.enable(file=log.open("a"))
                _write_stacks_on_signal(logs, facts.rank)
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
        _report(failure, None if folder is None else Path(folder), stream)
        if failure.kind != "preempted" and launched:
            _exit_at_once(failure.exit_code)
        return EXIT_DONE if failure.kind == "preempted" and folder is not None else failure.exit_code


def _write_stacks_on_signal(logs: Path, rank: int) -> None:
    """Make SIGQUIT write all threads' stacks, even while Python waits in C."""
    if heartbeat.FOLDER in os.environ:
        file = stacks_file(logs, rank).open("a")
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


def _report(failure: Failure, folder: Path | None, stream: Tee | None) -> None:
    """Write the traceback to the log, and write the failure file for the launcher, or print the message.

    Either disk may be full, the log's or that of the launcher's folder.

    Args:
        stream: the stream whose log takes the traceback; None if the log could not be opened.
    """
    if failure.traceback and failure.kind != "usage" and (stream is None or not stream.write_to_log(failure.traceback)):
        failure = replace(failure, log=None)  # the message must not refer to a traceback that is not there
    if not _write_failure(failure, folder) and failure.kind != "preempted" and first_to_fail():
        print_error(failure.error(), failure.traceback)


def _write_failure(failure: Failure, folder: Path | None) -> bool:
    """Write the failure file if there is a folder for it, and return whether it was written."""
    if folder is None:
        return False
    try:
        failure.write(folder)
    except OSError:  # this disk is full too: print to the console instead
        return False
    return True


def _exit_at_once(code: int) -> None:
    """Exit without the interpreter's shutdown, which may wait for peers that are gone."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def first_to_fail() -> bool:
    """Return whether no other rank of this machine has failed in this attempt; their common parent is the launcher."""
    try:
        if rank_facts().world_size == 1:
            return True
    except UsageError:  # the environment contradicts itself, differently for each rank
        return True
    scratch.sweep()
    try:
        _failure_mark().touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the disk is full: one message too many is better than none
        return True
    return True


def _failure_mark() -> Path:
    """Return the file that the first rank of this machine and this attempt to fail creates."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Path(tempfile.gettempdir(), f"lockstep-failed-{os.getuid()}-{parent_identity()}-{attempt}")


def print_error(error: LockstepError, trace: str = "") -> None:
    """Print the message to the console, but not to the log."""
    stream = console(sys.stderr)
    if os.environ.get("LOCKSTEP_TRACEBACK") == "1" and trace:
        stream.write(trace)
    stream.write(f"lockstep: {error}\n")
    stream.flush()


@contextmanager
def environment_with(added: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started inside the block."""
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
    """Ask the kernel to kill this new process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its launcher dies for any reason (Linux)."""
    die_with_this_process()
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and int(launcher) != os.getppid():
        os._exit(1)  # the launcher died before the line above
