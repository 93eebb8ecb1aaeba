"""Lets torch's elastic agent start its ranks through a function of ours.

Public torch: its agent starts each rank with `subprocess.Popen`, and nothing public replaces that.
Seen to work: torch 2.11.0 to 2.15.0. When gone: importing this file raises AttributeError.

Tests: tests/prepared/test_process.py
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

# (command, variables, stdout, stderr) -> what stands for the process, as Popen does; the streams
# are files, or None for the launcher's own
StartRank = Callable[[Sequence[str], Mapping[str, str], Any, Any], Any]

_popen_of_torch = SubprocessHandler._popen


@contextmanager
def started_by(start: StartRank) -> Iterator[None]:
    """Start the ranks of agents in this block by `start`."""

    def popen(self: Any, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        return start(command, environment, self._stdout, self._stderr)

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SubprocessHandler._popen = _popen_of_torch  # type: ignore[method-assign]
