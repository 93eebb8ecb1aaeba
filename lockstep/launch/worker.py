"""Runs code as a rank.

It dies with the launcher, writes to the log, and leaves a failure file for the launcher.

This works under every launcher. Lockstep's own launcher prints the one message; under torchrun,
srun, mpirun or none at all, the first rank of this machine to fail prints it. A rank's output goes
to its log file, and rank 0's also to the console. Started ranks redirect the file descriptors
themselves, so that the log has the output of C libraries, too.

Tests: tests/launch/test_local.py, tests/launch/test_ends.py, tests/faults/test_environment.py
"""

import faulthandler
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lockstep.errors import EXIT_DONE, EXIT_PREEMPTED, UsageError
from lockstep.failures.failure import Failure, done_mark, from_exception, preempted, stacks_file
from lockstep.failures.stacks import write_on_request
from lockstep.heartbeat.files import FOLDER
from lockstep.machine import cores, scratch, signals
from lockstep.machine.environment import RankFacts, parent_identity, rank_facts
from lockstep.machine.output import flush_both
from lockstep.machine.processes import die_with_this_process
from lockstep.run_directory.rank_output import ConsoleOutput, Tee, console, print_error, to_log
from lockstep.run_directory.run_files import open_to_append

LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"  # set by Lockstep's launcher for its ranks
FAILURES = "LOCKSTEP_FAILURES"  # the folder where the launcher reads failure files
_done_marks: list[Path] = []  # of this process's rank, while it runs under Lockstep's launcher


def mark_done() -> None:
    """Tell the launcher that this rank has done its work, and may end."""
    for mark in _done_marks:
        mark.touch()


def run_as_worker(
    work: Callable[[], int | None],
    *,
    logs: Path,
    launched: bool = True,
    include_children: bool = False,
) -> int:
    """Run `work()` as this process's rank, with its output in `logs/rank-N.log`.

    Return the process's exit code.

    `launched`: a launcher started this process; else a person did, and it is theirs.
    `include_children`: the console also shows the output of child processes, if it shows this
    rank's. Under Lockstep's launcher a preempted rank exits with 0 after writing its failure file:
    torch's agent would stop the ranks that are still saving if one exits with another code.
    """
    worker = _worker_of_this_process(logs, launched=launched)
    facts = worker.facts
    shown = ConsoleOutput.from_environment().streams(facts.local_rank, is_main=facts.is_main)
    # torch's @record writes there; the agent sets none
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error_file = logs / f"rank-{facts.rank}.error.json"
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file.absolute())
    stream: Tee | None = None
    with ExitStack() as stack:
        stack.enter_context(signals.answered(partial(_exit_before_training, worker)))
        try:
            output = to_log(
                worker.log,
                on_console=shown,
                descriptors=launched,
                include_children=include_children,
            )
            stream = stack.enter_context(output)
            if launched:
                _show_stacks(worker)
            code = work() or EXIT_DONE
            failure = preempted(facts) if code == EXIT_PREEMPTED else None
            if failure is None:
                mark_done()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if launched:
                # a neighbour's failure makes the launcher end this rank: it tells its own first
                signals.ignore(scripts_own=True)
            failure = from_exception(error, facts, worker.log)
        if failure is None:
            return code
        _report(failure, worker.failures, stream)
        return _end_after(failure, worker)


@dataclass(frozen=True)
class _Worker:
    """This process as a rank."""

    facts: RankFacts
    logs: Path  # the folder of all ranks' logs
    launched: bool  # by a launcher, not by a person
    failures: Path | None  # the folder where Lockstep's launcher reads failure files

    @property
    def log(self) -> Path:
        """The file of this rank's output."""
        return self.logs / f"rank-{self.facts.rank}.log"


def _worker_of_this_process(logs: Path, *, launched: bool) -> _Worker:
    """Read what the launcher has set for this rank, and bind the process to it and to its cores."""
    facts = rank_facts()
    if launched:
        die_with_parent()
        cores.bind(facts.local_rank, facts.local_world_size)  # before torch makes threads
    # Removed from the environment: processes that this one starts are not ranks.
    os.environ.pop(LAUNCHER_PID, None)
    folder = os.environ.pop(FAILURES, None)
    failures = None if folder is None else Path(folder)
    _done_marks[:] = [] if failures is None else [failures / done_mark(facts.rank)]
    return _Worker(facts, logs, launched, failures)


def _exit_before_training(worker: _Worker, number: int) -> None:
    """Exit on a signal: there is nothing to save before training has begun.

    The trainer handles signals later.
    """
    facts = worker.facts
    text = f"stopped by {signals.name_of(number)} before the training began"
    written = _write_failure(preempted(facts, text), worker.failures)
    # Lockstep's launcher prints it, if needed; another one stops all ranks after one has
    # printed why it failed.
    if facts.is_main and not written and not _failure_mark().exists():
        with suppress(OSError):
            os.write(console(sys.stderr).fileno(), f"lockstep: {text}\n".encode())
    signals.end_now(EXIT_DONE if written else EXIT_PREEMPTED, "")


def _show_stacks(worker: _Worker) -> None:
    """Write the stacks of all threads when the process crashes, or when the launcher asks."""
    faulthandler.enable(file=os.fdopen(open_to_append(worker.log), "a"))
    if FOLDER in os.environ:
        write_on_request(stacks_file(worker.logs, worker.facts.rank))


def _end_after(failure: Failure, worker: _Worker) -> int:
    """Return the exit code; a launched rank that has failed ends here."""
    if failure.kind == "preempted":
        return failure.exit_code if worker.failures is None else EXIT_DONE
    if worker.launched:
        # skip the interpreter's shutdown: it may wait for peers that left
        for child in multiprocessing.active_children():
            child.kill()
        flush_both()
        os._exit(failure.exit_code)
    return failure.exit_code


def _report(failure: Failure, folder: Path | None, stream: Tee | None) -> None:
    """Write the traceback to the log, and the failure for the launcher.

    Without a launcher the failure is printed. Either disk may be full.
    """
    if (
        failure.traceback
        and failure.kind != "usage"
        and (stream is None or not stream.write_to_log(failure.traceback))
    ):
        # the message must not refer to a traceback that is not there
        failure = replace(failure, log=None)
    if not _write_failure(failure, folder) and failure.kind != "preempted" and first_to_fail():
        print_error(failure.error(), failure.traceback)


def _write_failure(failure: Failure, folder: Path | None) -> bool:
    """Write the failure file if there is a folder for it.

    Return whether it was written: the disk may be full.
    """
    with suppress(OSError):
        if folder is not None:
            failure.write(folder)
            return True
    return False


def first_to_fail() -> bool:
    """Return whether no other rank of this machine has failed in this attempt.

    Their common parent is the launcher.
    """
    try:
        if rank_facts().world_size > 1:
            scratch.sweep()
            _failure_mark().touch(exist_ok=False)
    except FileExistsError:
        return False
    except (OSError, UsageError):
        # the disk is full, or the environment contradicts itself, differently for each rank:
        pass  # one message too many is better than none
    return True


def _failure_mark() -> Path:  # of this machine and this attempt
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Path(
        tempfile.gettempdir(), f"lockstep-failed-{os.getuid()}-{parent_identity()}-{attempt}"
    )


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


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its launcher dies for any reason (Linux)."""
    die_with_this_process()
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and int(launcher) != os.getppid():
        os._exit(1)  # the launcher died before the line above
