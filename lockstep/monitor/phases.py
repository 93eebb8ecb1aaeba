"""Where the time of a step goes: waiting for data, forward and backward, waiting for other ranks, the optimizer …

    clock.enter("data") … clock.enter("forward_backward") … clock.enter("optimizer") … clock.read()

Entering a phase ends the one before, so that phases add up to all the time there was. It costs under a microsecond on
the host. On CUDA, where the host only queues work, an event goes into the stream at each change; events are read once
they have passed, so nothing waits for them.

Waiting for other ranks is told apart where it can be seen: every Python-level `Work.wait` (FSDP2's collectives,
pipeline exchanges, the step's own sums), and DDP's own account of its last backward pass. What overlaps with computing
is no waiting and costs nothing. Loads torch inside functions only.
"""

import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STEP_PHASES = ("data", "forward_backward", "communication", "optimizer", "other")
PAUSES = ("evaluation", "checkpoint")  # between steps; no part of a step's seconds
PHASES = STEP_PHASES + PAUSES
_MADE_BY_WAITING = ("forward_backward", "optimizer")  # phases in which a wait for other ranks counts as communication


class PhaseClock:
    """Seconds in each phase since the last reading.

    Args:
        on_cuda: measure on the device's current stream instead of the host.
        clock: seconds, monotonic; another one for tests.
    """

    def __init__(self, *, on_cuda: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._on_cuda = on_cuda
        self._thread = threading.get_ident()
        self._host = dict.fromkeys(PHASES, 0.0)
        self._device = dict.fromkeys(PHASES, 0.0)
        self._marks: deque[tuple[str, Any]] = deque()  # phase that starts, its event
        self.phase = "other"
        self._since = clock()
        self._paused = 0.0

    def enter(self, phase: str) -> str:
        """End the current phase and begin another; returns the one that ended."""
        now = self._clock()
        before, spent = self.phase, now - self._since
        self._host[before] += spent
        if before in PAUSES:
            self._paused += spent
        self.phase, self._since = phase, now
        if self._on_cuda:
            self._mark(phase)
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase for the length of a block."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def waits_here(self) -> bool:
        """Whether a wait for other ranks, now and in this thread, is a step's communication."""
        return self.phase in _MADE_BY_WAITING and threading.get_ident() == self._thread

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last reading, on CUDA those of the device (waits for it), and start anew."""
        self.enter(self.phase)
        if self._on_cuda:
            self._fold(wait=True)
        measured = self._device if self._on_cuda else self._host
        result = dict(measured)
        for seconds in (self._host, self._device):
            seconds.update(dict.fromkeys(PHASES, 0.0))
        return result

    def take_pauses(self) -> float:
        """Host seconds in evaluations and checkpoints since this was last asked."""
        paused, self._paused = self._paused, 0.0
        return paused

    def _mark(self, phase: str) -> None:
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((phase, event))
        self._fold(wait=False)

    def _fold(self, *, wait: bool) -> None:
        """Add up the events that the device has passed."""
        if wait and self._marks:
            self._marks[-1][1].synchronize()  # host waits for the device
        while len(self._marks) > 1 and self._marks[1][1].query():
            phase, start = self._marks.popleft()
            self._device[phase] += start.elapsed_time(self._marks[0][1]) / 1000


# ---- waiting for other ranks ----


_counting: list[PhaseClock] = []  # of the loops that are open; of several models they end in any order


@contextmanager
def waits_counted(clock: PhaseClock) -> Iterator[None]:
    """Count what this thread spends in `Work.wait` as communication, while the block runs.

    torch offers no hook for it, so the method is wrapped, on the class, as long as any such block runs.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        yield
        return
    work = torch.distributed.Work
    if not _counting:
        work.wait = _counted(work.wait)
    _counting.append(clock)
    try:
        yield
    finally:
        _counting.remove(clock)
        if not _counting:
            work.wait = work.wait.__wrapped__


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        clock = next((clock for clock in _counting if clock.waits_here()), None)
        if clock is None:
            return original(*args, **kwargs)
        before = clock.enter("communication")
        try:
            return original(*args, **kwargs)
        finally:
            clock.enter(before)

    return wait


_ddp_modules: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_ddp(wrapped: Any) -> None:
    """Have DDP time its backward passes: on the CPU all of them; on a GPU it is 1 in 100, for reading it waits."""
    _ddp_modules.add(wrapped)
    if next(wrapped.parameters()).device.type == "cpu":
        wrapped._set_ddp_runtime_logging_sample_rate(1)


def ddp_wait_seconds() -> float:
    """What the newest timed backward pass of DDP waited after its last gradient was there."""
    total = 0.0
    for wrapped in _ddp_modules:
        figures = wrapped._get_ddp_logging_data()
        sent, hidden = figures.get("backward_comm_time", 0), figures.get("backward_compute_comm_overlap_time", 0)
        total += max(0, sent - hidden) * 1e-9
    return total
