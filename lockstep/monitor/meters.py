"""Measures the time of steps, throughput and memory.

Counts that are tensors are added on their device, and read once per interval.
"""

import math
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lockstep.records import StepRecord, plain


class Rates(NamedTuple):
    """Speed of the steps in one interval.

    Attributes:
        step_seconds: the mean of a step.
        samples: per second, over all ranks.
        tokens: valid targets per second, over all ranks.
    """

    step_seconds: float
    samples: float
    tokens: float


class Meters:
    """Averages over the steps since the last reading.

    Args:
        clock: seconds, monotonic; tests pass another.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._steps = 0
        self._samples = 0
        self._tokens: Any = 0

    def count(self, record: StepRecord) -> None:
        """Count one step, without reading a tensor."""
        self._steps += 1
        self._samples += record.samples
        self._tokens = self._tokens + without_graph(record.tokens)

    def read(self) -> "Rates":
        """Return the rates since the last reading and start again; waits for the device."""
        tokens = float(plain(self._tokens))  # host waits for the device
        now = self._clock()
        seconds, steps, samples = now - self._since, self._steps, self._samples
        self._since, self._steps, self._samples, self._tokens = now, 0, 0, 0
        if steps == 0 or seconds <= 0:
            return Rates(0.0, 0.0, 0.0)
        return Rates(seconds / steps, samples / seconds, tokens / seconds)

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on steps: an evaluation, a checkpoint."""
        self._since += seconds


def without_graph(value: Any) -> Any:
    """Detach a number from autograd's graph: a held record must not keep a step's activations alive."""
    return value.detach() if hasattr(value, "detach") else value


def memory_in_use() -> tuple[int, int]:
    """Return this rank's peak memory and its device's memory, in bytes.

    On CUDA these are the allocator's peak and the GPU's memory; on the CPU the process's peak resident set and the
    machine's memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    kilobyte = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte
    return peak, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Memory(NamedTuple):
    """Memory of one rank, in bytes.

    Attributes:
        allocated, reserved, peak: of its GPU's allocator; the peak since the start. On the CPU the peak is the
            process's largest resident set.
        host: the process's resident set.
        total: the device's memory.
    """

    allocated: float
    reserved: float
    peak: float
    host: float
    total: float


def memory_of_this_rank() -> Memory:
    """Return the memory of this process and of its own GPU."""
    peak, total = memory_in_use()
    allocated = reserved = 0
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return Memory(allocated, reserved, peak, resident(), total)


def resident() -> int:
    """Return this process's resident set, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


_nvml_is_there = True


def gpu_utilisation() -> float:
    """Return the share of the last second in which this rank's GPU ran a kernel, by NVML; nan without NVML."""
    global _nvml_is_there
    torch = sys.modules.get("torch")
    if not _nvml_is_there or torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return math.nan
    try:
        return float(torch.cuda.utilization()) / 100
    except Exception:  # nvidia-ml-py is missing, or the driver fails: NVML raises classes of its own
        _nvml_is_there = False
        return math.nan
