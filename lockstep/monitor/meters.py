"""Measures the time of steps and of their phases, throughput and memory.

Loads torch inside functions only.

`PhaseClock.enter("data")` ends the previous phase. On an accelerator, where the host only queues
work, each change records an event in the stream, which is read after it has passed: nothing waits.
Waiting for other ranks is measured in every Python-level `Work.wait` and in DDP's own statistics.

Tests: tests/monitor/test_figures.py, tests/monitor/test_ranks.py
"""

import math
import os
import resource
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from lockstep.run_directory.records import StepRecord, plain
from lockstep.torch_compat import work_wait


class Rates(NamedTuple):
    """Speed of the steps in one interval."""

    step_seconds: float  # the mean
    samples: float  # per second, over all ranks
    tokens: float  # read per second, over all ranks
    targets: float  # valid ones per second, over all ranks


class Meters:
    """Averages over the steps since the last reading; tests pass another clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.since = clock()  # the last reading, later by the pauses after it
        self._steps = 0
        self._samples = 0
        self._tokens: Any = 0
        self._targets: Any = 0

    def count(self, record: StepRecord) -> None:
        self._steps += 1
        self._samples += record.samples
        targets = without_graph(record.tokens)
        self._targets = self._targets + targets
        self._tokens = self._tokens + (
            targets if record.tokens_read is None else record.tokens_read
        )

    def read(self) -> Rates:
        """Return the rates since the last reading and start again; waits for the device."""
        # host waits for the device
        tokens = float(plain(self._tokens))
        targets = float(plain(self._targets))
        now = self._clock()
        seconds = now - self.since
        steps = self._steps
        samples = self._samples
        self.since = now
        self._steps = 0
        self._samples = 0
        self._tokens = 0
        self._targets = 0
        if steps == 0 or seconds <= 0:
            return Rates(0.0, 0.0, 0.0, 0.0)
        return Rates(seconds / steps, samples / seconds, tokens / seconds, targets / seconds)

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on steps: an evaluation, a checkpoint."""
        self.since += seconds


def without_graph(value: Any) -> Any:
    """Detach a number from autograd's graph.

    A record that is kept must not keep a step's activations alive.
    """
    return value.detach() if hasattr(value, "detach") else value


class Memory(NamedTuple):
    """Memory of one rank, in bytes."""

    allocated: int  # allocated, reserved: of its GPU's allocator
    reserved: int
    # of its GPU's allocator since the start; on the CPU the process's largest resident set
    peak: int
    host: int  # the process's resident set
    total: int  # the device's memory; on the CPU the machine's


def memory_of_this_rank() -> Memory:
    """Return the memory of this process and of its own GPU."""
    import psutil

    from lockstep.machine import accelerator

    host = psutil.Process().memory_info().rss
    device = accelerator.selected()
    if device is not None:
        allocated, reserved, peak, total = accelerator.memory_of(device)
        return Memory(allocated, reserved, peak, host, total)
    return Memory(
        0,
        0,
        _largest_resident_set(),
        host,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _largest_resident_set() -> int:
    # On Linux `ru_maxrss` starts with that of the process that started this one (it outlives
    # `exec`): a notebook or a launcher with much memory would hide what its ranks take.
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


_nvml_is_there = True


def gpu_utilisation() -> float:
    """Return the share of the last second in which this rank's GPU ran a kernel.

    NVML measures it; without NVML it is nan.
    """
    global _nvml_is_there
    if not _nvml_is_there:
        return math.nan
    from lockstep.machine import accelerator

    try:
        return accelerator.utilisation()
    except Exception:
        # nvidia-ml-py is missing, or the driver fails: NVML raises classes of its own
        _nvml_is_there = False
        return math.nan


STEP_PHASES = ("data", "forward_backward", "communication", "optimizer", "other")
PAUSES = ("evaluation", "checkpoint")  # between steps; not included in a step's seconds
PHASES = STEP_PHASES + PAUSES
# phases in which a wait for other ranks counts as communication
_MAY_WAIT = ("forward_backward", "optimizer")


class PhaseClock:
    """Measures the seconds in each phase since the last reading.

    They are measured on the stream of a `device`, or on the host.
    """

    def __init__(
        self, *, device: Any = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.now = clock
        self._on = device
        self._thread = threading.get_ident()
        self._host = dict.fromkeys(PHASES, 0.0)
        self._device = dict.fromkeys(PHASES, 0.0)
        self._marks: deque[tuple[str, Any]] = deque()  # the phase that starts, and its event
        self.phase = "other"
        self._since = clock()
        self._paused = 0.0

    def enter(self, phase: str, at: float | None = None) -> str:
        """End the current phase, begin another, and return the one that ended.

        Args:
            at: the moment on the host's clock; None: now.
        """
        now = self.now() if at is None else at
        before = self.phase
        spent = now - self._since
        self._host[before] += spent
        if before in PAUSES:
            self._paused += spent
        self.phase = phase
        self._since = now
        if self._on is not None:
            self._mark(phase)
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def waits_here(self) -> bool:
        """Return whether a wait for other ranks counts as a step's communication.

        It is about a wait now and in this thread.
        """
        return self.phase in _MAY_WAIT and threading.get_ident() == self._thread

    def read(self, at: float | None = None) -> dict[str, float]:
        """Return the seconds by phase since the last reading, and start again.

        Waits for the device.

        Args:
            at: the moment on the host's clock up to which they count; None: now.
        """
        self.enter(self.phase, at)
        if self._on is not None:
            self._fold(wait=True)
        result = dict(self._device if self._on is not None else self._host)
        for seconds in (self._host, self._device):
            seconds.update(dict.fromkeys(PHASES, 0.0))
        return result

    def take_pauses(self) -> float:
        """Return the host seconds in evaluations and checkpoints since the last call."""
        paused = self._paused
        self._paused = 0.0
        return paused

    def _mark(self, phase: str) -> None:
        from lockstep.machine import accelerator

        self._marks.append((phase, accelerator.record_event(self._on, timed=True)))
        self._fold(wait=False)

    def _fold(self, *, wait: bool) -> None:
        if wait and self._marks:
            self._marks[-1][1].synchronize()  # host waits for the device
        while len(self._marks) > 1 and self._marks[1][1].query():
            phase, start = self._marks.popleft()
            self._device[phase] += start.elapsed_time(self._marks[0][1]) / 1000


_counting: list[PhaseClock] = []  # of the open loops; with several models they end in any order


@contextmanager
def waits_counted(clock: PhaseClock) -> Iterator[None]:
    """Count the time of this thread in `Work.wait` as communication.

    The method is replaced while any block runs.
    """
    if not work_wait.available():
        yield
        return
    if not _counting:
        work_wait.replace(_counted)
    _counting.append(clock)
    try:
        yield
    finally:
        _counting.remove(clock)
        if not _counting:
            work_wait.restore()


def _counted(wait: work_wait.Wait) -> work_wait.Wait:
    """Return a wait whose time counts as communication of the step that runs in this thread."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        clock = next((clock for clock in _counting if clock.waits_here()), None)
        if clock is None:
            return wait(*args, **kwargs)
        before = clock.enter("communication")
        try:
            return wait(*args, **kwargs)
        finally:
            clock.enter(before)

    return counted


_ddp_modules: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_ddp(wrapped: Any) -> None:
    """Make DDP time its backward passes: one in 10 on the CPU, one in 100 on a GPU.

    Timing takes 2 % of a step of 1 ms. On a GPU, reading the time makes the host wait.
    """
    _ddp_modules.add(wrapped)
    if next(wrapped.parameters()).device.type == "cpu":
        from lockstep.torch_compat import ddp_reducer

        ddp_reducer.time_passes(wrapped, one_in=10)


def ddp_wait_seconds() -> float:
    """Return how long DDP's newest timed backward pass waited after its last gradient."""
    if not _ddp_modules:
        return 0.0
    from lockstep.torch_compat import ddp_reducer

    return sum(map(ddp_reducer.wait_seconds, _ddp_modules))
