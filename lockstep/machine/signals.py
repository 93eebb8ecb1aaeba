"""Handles signals that ask this process to end, from its first instruction to its last.

Python runs a signal's handler in the main thread, between two instructions: never while that thread
waits in C, and also in the middle of an import. The handlers therefore do nothing: the interpreter
also writes the signal's number into a pipe, at once, and a thread that reads the pipe calls the
answer.

Tests: tests/launch/test_signals.py, tests/machine/test_scratch.py
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from lockstep.machine import scratch

# SIGUSR1: schedulers' early warning
ASKS_TO_END = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

# nohup starts a process with SIGHUP ignored, so that it survives the closing of its terminal.
_hangup_is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}

Answer = Callable[[int], None]

# numbers of the received signals, in order, also those that a script's own handlers answered
seen: list[int] = []
_answer: Answer | None = None
_answers_all = False  # whichever handler a signal has: ours are just being replaced
_further: dict[int, Answer] = {}  # by number: answers to signals that ask for something else
_reader: threading.Thread | None = None
_pid = 0  # process in which the thread reads
_pipe = -1  # where the interpreter writes for the thread
_end_to_read = -1  # of the same pipe
# no signal has these numbers
_END_OF_READ = 255
_END_OF_THREAD = 254
_all_read = threading.Event()


@dataclass(frozen=True)
class Inherited:
    """Holds the state of signals that a process leaves to one that it starts.

    Attributes:
        blocked: numbers of the signals that it holds back.
        ignored: of those that it ignores, as nohup has SIGHUP, and a shell without job control has
            SIGINT and SIGQUIT in what it starts with `&`.
    """

    blocked: frozenset[int] = frozenset()
    ignored: frozenset[int] = frozenset()

    def take(self) -> None:
        """Take them over, in a fork of another process than the one that asked for it."""
        global _hangup_is_ignored
        for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
            was_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number in self.ignored and not was_ignored:
                signal.signal(number, signal.SIG_IGN)
            elif was_ignored and number not in self.ignored:
                signal.signal(number, _default(number))
        _hangup_is_ignored = signal.SIGHUP in self.ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def inherited() -> Inherited:
    """Return what a process would inherit that this one starts now."""
    ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    return Inherited(
        blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        ignored=frozenset(map(int, ignored)),
    )


def _default(number: int) -> Any:
    """Return the handler that Python starts with."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def listen(answer: Answer) -> None:
    """Call `answer` from a thread, with the number of each signal that asks this process to end.

    `answer` must not raise.

    It replaces the answer before it. If a script has since installed its own handler, that one
    answers.
    """
    global _answer
    _answer = answer
    if threading.current_thread() is not threading.main_thread():
        return
    _read_in_background()
    for number in ASKS_TO_END:
        if number != signal.SIGHUP or not _hangup_is_ignored:
            signal.signal(number, _noted)
    # a launcher starts ranks with them blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)


def answer_also(number: int, answer: Answer) -> None:
    """Call `answer` from the thread at each signal of another kind, in this process's main thread.

    `answer` must not raise. It stays until the process ends.
    """
    _further[number] = answer
    _read_in_background()
    signal.signal(number, _noted)


@contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Listen in the block; then a program that called this one has its own handlers again.

    In Lockstep's own processes signals are ignored afterwards: the work is done.
    """
    global _answer
    before = {number: signal.getsignal(number) for number in ASKS_TO_END}
    listen(answer)
    try:
        yield
    finally:
        _answer = None
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not _noted and signal.getsignal(number) is _noted:
                    signal.signal(number, handler)


@contextmanager
def without_thread() -> Iterator[None]:
    """Stop the thread for the length of the block, so that this process can be forked safely.

    Signals wait meanwhile. Where an exception leads a fork out of the block, the fork has Python's
    handlers, as a fresh process, and signals that were not for it are gone.
    """
    global _answer
    answer = _answer
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKS_TO_END)
    _stop_reading()
    try:
        yield
    except BaseException:
        leave_to_script()
        _answer = None
        seen.clear()
        raise
    if answer is not None:
        listen(answer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)


def leave_to_script() -> None:
    """Restore Python's default handlers, for a script that may install its own.

    What came before is answered before this returns. `seen` is still updated.
    """
    global _answers_all
    if threading.current_thread() is threading.main_thread():
        # signals that came to handlers of ours, and which the thread has not read yet, would find
        # others there, and be lost
        _answers_all = True
        for number in ASKS_TO_END:
            if signal.getsignal(number) is _noted:
                signal.signal(number, _default(number))
        _read_all()
        _answers_all = False


def ignore(*, scripts_own: bool = False) -> None:
    """Ignore these signals from now on: the work is done, and the exit code is fixed.

    `scripts_own`: also those for which a script has its own or the default handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ASKS_TO_END:
        if scripts_own or signal.getsignal(number) is _noted:
            signal.signal(number, signal.SIG_IGN)


def end_now(code: int, text: str) -> NoReturn:
    """End this process from any thread without the interpreter's cleanup.

    Remove its temporary files.
    """
    if text:
        with suppress(OSError):
            os.write(2, f"lockstep: {text}\n".encode())
    scratch.exit_now(code)


def name_of(number: int) -> str:
    """Return a signal's name; real-time signals have none."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def asked_to_end() -> bool:
    """Return whether SIGTERM or a Ctrl-C came to this process; also if it came only just now."""
    _read_all()
    return any(number in (signal.SIGTERM, signal.SIGINT) for number in seen)


def _read_all() -> None:
    """Wait until the thread, if there is one, has read the signals that have come so far."""
    if _reader is not None and _pid == os.getpid():
        _all_read.clear()
        # the pipe is full of signals, of which the thread has read some
        with suppress(BlockingIOError):
            os.write(_pipe, bytes([_END_OF_READ]))  # behind the numbers that it has not read yet
            _all_read.wait(1.0)


def _read_in_background() -> None:
    """Start the thread that reads the numbers of signals, once in each process."""
    global _reader, _pid, _pipe, _end_to_read
    if _reader is not None and _pid == os.getpid():
        return
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _pid = os.getpid()
    _pipe = write
    _end_to_read = read
    _reader = threading.Thread(target=_read, args=(read,), name="lockstep-signals", daemon=True)
    _reader.start()


def _stop_reading() -> None:
    """End the thread, if there is one, and answer the last signals that it might have read."""
    global _reader
    if _reader is None or _pid != os.getpid():
        return
    os.write(_pipe, bytes([_END_OF_THREAD]))
    _reader.join()
    _reader = None
    # the main thread holds signals back, and there is no other any more
    signal.set_wakeup_fd(-1)
    os.close(_pipe)
    while left := os.read(_end_to_read, 64):
        _take(left)
    os.close(_end_to_read)


def _read(pipe: int) -> None:
    while _take(os.read(pipe, 64)):
        pass


def _take(numbers: bytes) -> bool:
    """Answer signals; return whether to read on."""
    for number in numbers:
        if number == _END_OF_READ:
            _all_read.set()
        if number in ASKS_TO_END:
            seen.append(number)
            if _answer is not None and (_answers_all or signal.getsignal(number) is _noted):
                _answer(number)
        elif number in _further and signal.getsignal(number) is _noted:
            _further[number](number)
    return _END_OF_THREAD not in numbers


def _noted(_number: int, _frame: object) -> None:
    """Do nothing: the thread answers."""


def _in_fork() -> None:
    """Keep a data worker from writing into its parent's pipe. It reads until its parent ends it."""
    if _reader is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_fork)
