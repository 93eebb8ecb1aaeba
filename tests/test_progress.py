"""Long work says how far it is: rewritten on a terminal, line by line in a pipe; quick work says nothing."""

import io
from collections.abc import Callable

from lockstep.progress import PATIENCE_SECONDS, progress_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO, seconds: float) -> str:
    """100 pieces of 0.1 GB that take `seconds` in all."""
    now = [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    with progress_of("exporting step-00000007", 10 * 10**9, stream=stream, clock=clock) as advance:
        for _ in range(100):
            now[0] += seconds / 100
            advance(10**8)
    return stream.getvalue()


def test_quick_work_says_nothing() -> None:
    assert work(io.StringIO(), PATIENCE_SECONDS / 2) == ""
    assert work(Terminal(), PATIENCE_SECONDS / 2) == ""


def test_in_a_pipe_it_is_a_line_every_ten_seconds() -> None:
    lines = work(io.StringIO(), 40).splitlines()
    assert len(lines) == 4
    assert lines[0] == "lockstep: exporting step-00000007: 0.5 of 10.0 GB, 0:38 left"
    assert not any("\r" in line or "\x1b" in line for line in lines)


def test_on_a_terminal_one_line_is_rewritten_and_gone_in_the_end() -> None:
    text = work(Terminal(), 10)
    assert "\n" not in text
    assert text.count("\rlockstep: exporting") > 30
    assert text.endswith("\r\x1b[K")
