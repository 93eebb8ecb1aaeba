"""Signals that ask this process to end, answered from its first instruction to its last.

Python runs a signal's handler in the main thread, between two instructions: never while that thread waits in C, as it
does when ranks meet; and what a handler raises appears wherever the thread is, in the middle of an import as well. So
the handlers do nothing here. The interpreter also writes the signal's number into a pipe, at once, and a thread that
reads the pipe answers.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from lockstep import scratch

ASKS_TO_END = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # SIGUSR1: schedulers' early warning

# nohup starts a process with SIGHUP ignored, so that a terminal that closes does not end it.
_HANGUP_IS_IGNORED = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

Answer = Callable[[int], None]

seen: list[int] = []  # the numbers of those that came, in order, also where a script's own handlers answered them
_answer: Answer | None = None
_reader: threading.Thread | None = None
_pid = 0  # of the process in which the thread reads


def listen(answer: Answer) -> None:
    """Have a thread call `answer` with the number of each signal that asks this process to end, from now on.

    Replaces the answer before it. Where a script has installed a handler of its own since, that one answers.

    Args:
        answer: must not raise. It may end the process.
    """
    global _answer
    _answer = answer
    if threading.current_thread() is not threading.main_thread():
        return
    _read_in_background()
    for number in ASKS_TO_END:
        if number != signal.SIGHUP or not _HANGUP_IS_IGNORED:
            signal.signal(number, _noted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS_TO_END)  # a launcher starts ranks with them held back


@contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Listen until the end of the block; then a program that called this one has its own handlers again.

    In a process of Lockstep's own they only come to nothing afterwards: its work is done.
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


def leave_to_script() -> None:
    """Give the signals back to Python's defaults, for a script that may handle them; `seen` goes on."""
    if threading.current_thread() is threading.main_thread():
        for number in ASKS_TO_END:
            if signal.getsignal(number) is _noted:
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, default)


def ignore() -> None:
    """Ignore them from now on: the process has done its work, and its exit code stands."""
    for number in ASKS_TO_END:
        if signal.getsignal(number) is _noted:
            signal.signal(number, signal.SIG_IGN)


def end_now(code: int, text: str) -> NoReturn:
    """End this process from whatever thread, without the interpreter's own end; what it owns is removed.

    Args:
        text: what to say on stderr; empty: nothing.
    """
    if text:
        with suppress(OSError):
            os.write(2, f"lockstep: {text}\n".encode())
    scratch.remove_all()
    os._exit(code)


def name_of(number: int) -> str:
    """Return a signal's name."""
    return signal.Signals(number).name


def asked_to_end() -> bool:
    """Return whether SIGTERM or a Ctrl-C came to this process."""
    return any(number in (signal.SIGTERM, signal.SIGINT) for number in seen)


def _read_in_background() -> None:
    global _reader, _pid
    if _reader is not None and _pid == os.getpid():
        return
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _pid = os.getpid()
    _reader = threading.Thread(target=_read, args=(read,), name="lockstep-signals", daemon=True)
    _reader.start()


def _read(pipe: int) -> None:
    while True:
        for number in os.read(pipe, 64):
            if number in ASKS_TO_END:
                seen.append(number)
                if signal.getsignal(number) is _noted and _answer is not None:
                    _answer(number)


def _noted(_number: int, _frame: object) -> None:
    """Do nothing: the thread answers."""


def _in_fork() -> None:
    """Keep a data worker from writing into its parent's pipe. It reads until its parent ends it."""
    if _reader is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_fork)
