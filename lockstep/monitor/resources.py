"""Warns about memory, and offers the two callbacks that other trainers have for the state of the ranks.

ResourceMonitor      a rank's memory is nearly full, or ranks hold very different amounts
DistributedMonitor   a line with memory and communication of all ranks
"""

import logging
from collections.abc import Callable
from typing import Any

from lockstep.records import StepRecord

IMBALANCE = 1.25  # the most over the least
_SIGNIFICANT = 0.02  # smallest difference between ranks that counts, as a share of a device's memory
_GIB = 2**30
_log = logging.getLogger("lockstep")


class ResourceMonitor:
    """Warns when memory passes a threshold or ranks differ much; again only after it was fine in between.

    On GPUs it compares each rank's peak with its GPU's memory; on the CPU it uses the machine's, which ranks share.

    Args:
        gpu_memory_threshold: share of a device's memory in use.
        alert_on_imbalance: compare the ranks' peaks.
        event: called with each warning; unset: only log it.
    """

    def __init__(
        self,
        gpu_memory_threshold: float = 0.9,
        alert_on_imbalance: bool = True,
        event: Callable[..., None] | None = None,
    ) -> None:
        self._threshold, self._compares, self._event = gpu_memory_threshold, alert_on_imbalance, event
        self._warned: set[str] = set()

    def __call__(self, record: StepRecord) -> None:
        """Check a record's memory."""
        if record.memory is None or "total" not in record.memory:
            return
        least, _, most, rank = record.memory["peak"]
        total = record.memory["total"][2]
        on_gpu = "reserved" in record.memory
        used = most / total if on_gpu else machine_memory_used()
        whose = f"rank {rank} has held {most / _GIB:.1f} of {total / _GIB:.1f} GiB" if on_gpu else "of this machine"
        self._warn("memory_high", used >= self._threshold, f"{used:.0%} of the memory is in use: {whose}", record.step)
        uneven = self._compares and most > IMBALANCE * least and most - least > _SIGNIFICANT * total
        text = f"ranks hold unequal memory: rank {rank} {most / _GIB:.2f} GiB, the least {least / _GIB:.2f} GiB"
        self._warn("memory_imbalance", uneven, text, record.step)

    def _warn(self, kind: str, true: bool, text: str, step: int) -> None:
        if not true:
            self._warned.discard(kind)
        elif kind not in self._warned:
            self._warned.add(kind)
            _log.warning("warning: step %d: %s", step, text)
            if self._event is not None:
                self._event(kind, step=step, text=text)


class DistributedMonitor:
    """Prints the ranks' memory and how long they wait for one another, on rank 0."""

    def __call__(self, record: StepRecord) -> None:
        """Print a record's memory and waiting times."""
        if record.memory is None or record.phases is None:
            return
        parts = [f"{name} {_range(value, _GIB, 'GiB')}" for name, value in record.memory.items() if name != "total"]
        waiting = record.phases.get("communication")
        if waiting is not None:
            parts.append(f"communication {_range(waiting, 1e-3, 'ms')} per step")
        print(f"step {record.step}  ranks: {', '.join(parts)}", flush=True)


def machine_memory_used() -> float:
    """Return the share of this machine's memory that is not available."""
    import psutil

    return float(psutil.virtual_memory().percent) / 100


def _range(spread: Any, unit: float, name: str) -> str:
    least, _, most, rank = spread
    if least == most:
        return f"{most / unit:.2f} {name}"
    return f"{least / unit:.2f} to {most / unit:.2f} {name} (rank {rank})"
