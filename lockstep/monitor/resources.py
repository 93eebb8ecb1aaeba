"""Warnings about memory, and the two callbacks that trainers elsewhere have for what ranks are doing.

ResourceMonitor      a rank's memory is nearly full, or ranks hold very different amounts
DistributedMonitor   a line of memory and communication of all ranks
"""

import logging
from collections.abc import Callable
from typing import Any

from lockstep.records import StepRecord

IMBALANCE = 1.25  # the most over the least
_WORTH_SAYING = 0.02  # of a device's memory: a smaller difference is none
_GIB = 2**30
_log = logging.getLogger("lockstep")


class ResourceMonitor:
    """Warns once when memory passes a threshold, and once when ranks differ much; again after it was well.

    On GPUs it looks at each rank's peak against its GPU's memory; on the CPU at the machine's, which ranks share.

    Args:
        gpu_memory_threshold: share of a device's memory in use.
        alert_on_imbalance: compare the ranks' peaks.
        event: told what was said; unset: only the warning.
    """

    def __init__(
        self,
        gpu_memory_threshold: float = 0.9,
        alert_on_imbalance: bool = True,
        event: Callable[..., None] | None = None,
    ) -> None:
        self._threshold, self._compares, self._event = gpu_memory_threshold, alert_on_imbalance, event
        self._said: set[str] = set()

    def __call__(self, record: StepRecord) -> None:
        if record.memory is None or "total" not in record.memory:
            return
        least, _, most, rank = record.memory["peak"]
        total = record.memory["total"][2]
        on_gpu = "reserved" in record.memory
        used = most / total if on_gpu else machine_memory_used()
        whose = f"rank {rank} has held {most / _GIB:.1f} of {total / _GIB:.1f} GiB" if on_gpu else "of this machine"
        self._say("memory_high", used >= self._threshold, f"{used:.0%} of the memory is in use: {whose}", record.step)
        uneven = self._compares and most > IMBALANCE * least and most - least > _WORTH_SAYING * total
        text = f"ranks hold unequal memory: rank {rank} {most / _GIB:.2f} GiB, the least {least / _GIB:.2f} GiB"
        self._say("memory_imbalance", uneven, text, record.step)

    def _say(self, kind: str, true: bool, text: str, step: int) -> None:
        if not true:
            self._said.discard(kind)
        elif kind not in self._said:
            self._said.add(kind)
            _log.warning("warning: step %d: %s", step, text)
            if self._event is not None:
                self._event(kind, step=step, text=text)


class DistributedMonitor:
    """Prints, on rank 0, what the ranks hold and how long they wait for one another."""

    def __call__(self, record: StepRecord) -> None:
        if record.memory is None or record.phases is None:
            return
        said = [f"{name} {_range(value, _GIB, 'GiB')}" for name, value in record.memory.items() if name != "total"]
        waiting = record.phases.get("communication")
        if waiting is not None:
            said.append(f"communication {_range(waiting, 1e-3, 'ms')} a step")
        print(f"step {record.step}  ranks: {', '.join(said)}", flush=True)


def machine_memory_used() -> float:
    """Share of this machine's memory that is not available."""
    import psutil

    return float(psutil.virtual_memory().percent) / 100


def _range(spread: Any, unit: float, name: str) -> str:
    least, _, most, rank = spread
    if least == most:
        return f"{most / unit:.2f} {name}"
    return f"{least / unit:.2f} to {most / unit:.2f} {name} (rank {rank})"
