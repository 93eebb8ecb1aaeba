"""Gathers the ranks' measurements on logged steps, and finds slow ranks in them.

The measurements are phases, memory, utilisation and MFU.

Gathering them is one small all-gather, at most about once a second; the step of the next one
follows from numbers that all ranks have. Operations are counted by `torch.utils.flop_counter`; a
multiply-add is two. Loads torch inside functions only.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from lockstep.config import StragglerConfig
from lockstep.costs.hardware import known_gpu
from lockstep.monitor import meters
from lockstep.monitor.meters import (
    PAUSES,
    PHASES,
    STEP_PHASES,
    Memory,
    PhaseClock,
    memory_of_this_rank,
)

Spread = list[float | int]  # [least, median, most, rank of the most]


def gather(values: Sequence[float]) -> list[list[float]]:
    """Return `values` of every rank, by rank; all ranks call it with equally many.

    It waits for device and ranks.
    """
    import torch
    import torch.distributed as dist

    from lockstep.process_group.collectives import device_of_numbers

    if not _several():
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.float64, device=device_of_numbers())
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return [row.tolist() for row in table]


def gather_objects(value: Any) -> list[Any]:
    """Return `value` of every rank, by rank; for rare use."""
    if not _several():
        return [value]
    from lockstep.process_group.objects import all_gather_objects

    return all_gather_objects(value)


def spread(values: Sequence[float]) -> Spread:
    """Return [least, median, most, rank of the most], to 6 digits."""
    most = max(range(len(values)), key=values.__getitem__)
    return [*(float(f"{v:.6g}") for v in (min(values), median(values), values[most])), most]


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


SECONDS_BETWEEN = 1.0
MOST_RANKS_LISTED = 64
_MEMORY = ("allocated", "reserved", "peak", "host", "total")
_NAMES = (*PHASES, *_MEMORY, "gpu_utilisation", "flops")
Table = dict[str, list[float]]  # name → value of each rank, by rank


class Figures:
    """Gathers measurements, `SECONDS_BETWEEN` apart, and turns them into a record's fields.

    Args:
        clock: of a step's phases.
        memory: reads this rank's; tests pass their own.
        peak: floating-point operations per second of one rank's device, and where the number is
            from.
        recomputes: whether `flops` counts recomputed activations twice.
    """

    def __init__(
        self,
        clock: PhaseClock,
        memory: Callable[[], Memory] = memory_of_this_rank,
        *,
        peak: tuple[float, str] = (0.0, ""),
        recomputes: bool = False,
    ) -> None:
        self.clock = clock
        self.flops = 0.0  # floating-point operations of this rank in a full step
        self.peak, self.peak_source = peak
        self.recomputes = recomputes
        self._memory = memory
        self._next = 0
        self._steps = 0

    def count(self) -> None:
        self._steps += 1

    def due(self, step: int, last: bool) -> bool:
        """Return whether to gather after this logged step: the same answer on every rank."""
        return step >= self._next or last

    def collect(self, step: int, at: float | None = None) -> Table:
        """Gather the measurements since the last call; every rank calls it after the same step.

        Args:
            step: the number of the step that ended last.
            at: the moment at which this rank's phases are read; None: now.
        """
        steps = max(1, self._steps)
        self._steps = 0
        mine = {**self._phases(steps, at), **self._memory()._asdict()}
        mine |= {"gpu_utilisation": meters.gpu_utilisation(), "flops": self.flops}
        rows = gather([mine[name] for name in _NAMES])
        table = {name: [row[column] for row in rows] for column, name in enumerate(_NAMES)}
        table["step"] = [
            sum(table[name][rank] for name in STEP_PHASES) for rank in range(len(rows))
        ]
        table["own"] = [s - c for s, c in zip(table["step"], table["communication"], strict=True)]
        self._next = step + max(1, math.ceil(SECONDS_BETWEEN / max(1e-9, median(table["step"]))))
        return table

    def row(self, table: Table) -> dict[str, Any]:
        """Return what a record says of all ranks: phases, memory, seconds and FLOPs."""
        ranks = len(table["step"])
        fields: dict[str, Any] = {
            "phases": {name: spread(table[name]) for name in PHASES if any(table[name])},
            "memory": {name: spread(table[name]) for name in _MEMORY if any(table[name])},
        }
        if 1 < ranks <= MOST_RANKS_LISTED:
            fields["own_seconds"] = [float(f"{s:.4g}") for s in table["own"]]
        if not any(math.isnan(u) for u in table["gpu_utilisation"]):
            fields["gpu_utilisation"] = spread(table["gpu_utilisation"])
        flops = sum(table["flops"])
        seconds = median(table["step"])
        if flops and seconds:
            fields["flops_per_second"] = float(f"{flops / seconds:.6g}")
        if flops and seconds and self.peak:
            fields["hfu" if self.recomputes else "mfu"] = float(
                f"{flops / seconds / self.peak / ranks:.4g}"
            )
        return fields

    def _phases(self, steps: int, at: float | None) -> dict[str, float]:
        """Return the seconds of each phase per step; for pauses, in total."""
        seconds = self.clock.read(at)
        hidden = min(meters.ddp_wait_seconds() * steps, seconds["forward_backward"])
        seconds["forward_backward"] -= hidden
        seconds["communication"] += hidden
        return {name: s if name in PAUSES else s / steps for name, s in seconds.items()}


_OWN_PHASES = tuple(name for name in STEP_PHASES if name != "communication")
_LEAST_SECONDS = 1e-3  # per step; clocks of busy hosts differ by as much anyway


@dataclass(frozen=True)
class Straggler:
    """A slow rank. Ranks that train together take equally long for a step.

    `own` is the time without waiting.
    """

    rank: int
    ratio: float  # its own time over the median of the other ranks' own time
    phase: str  # the one with most of the difference
    seconds: float  # its time in that phase, per step
    others: float  # the median of the others in that phase, per step

    def sentence(self, host: str | None = None) -> str:
        on = f" on {host}" if host else ""
        slow = (
            f"rank {self.rank}{on} is slow: its own work takes {self.ratio:.2f} × as long as the"
            " other ranks'"
        )
        return f"{slow}; {self.phase} {_ms(self.seconds)} per step against {_ms(self.others)}"


class StragglerWatch:
    """Finds ranks that stay slow in all ranks' figures; reports each once until it catches up."""

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._times: Counter[int] = Counter()

    def look(self, table: Table) -> list[Straggler]:
        """Return the ranks that are slow for the `patience`-th time in a row."""
        named = []
        for rank in range(len(table["own"])):
            slow = self._slow(table, rank)
            self._times[rank] = self._times[rank] + 1 if slow else 0
            if slow and self._times[rank] == self._config.patience:
                named.append(slow)
        return named

    def _slow(self, table: Table, rank: int) -> Straggler | None:
        if len(table["own"]) == 1:
            return None
        own = table["own"][rank]
        others = _median_of_others(table["own"], rank)
        if own < self._config.threshold * others or own - others < _LEAST_SECONDS:
            return None
        phase = max(
            _OWN_PHASES, key=lambda name: table[name][rank] - _median_of_others(table[name], rank)
        )
        return Straggler(
            rank,
            own / max(others, 1e-9),
            phase,
            table[phase][rank],
            _median_of_others(table[phase], rank),
        )


def _median_of_others(values: list[float], rank: int) -> float:
    """Return the median of the values of all ranks but one."""
    return median(values[:rank] + values[rank + 1 :])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


_NOTHING = nullcontext()  # shared by all steps: making one takes a call
_SIZE = 512  # size of the matrices for measuring a device without a data sheet
_SECONDS = 0.03


def peak_flops(device: Any, mode: str, before: tuple[float, str] = (0.0, "")) -> tuple[float, str]:
    """Return the peak operations per second of a `torch.device`, and the number's source.

    They are those of matrix products of `mode`.

    Args:
        device: that is asked about.
        mode: its precision.
        before: what was returned to the process in whose place this one was started; it is not
            measured again.
    """
    import torch

    from lockstep.machine import accelerator

    known = known_gpu(accelerator.name_of(device)) if device.type == "cuda" else None
    if known is not None:
        if mode == "fp32" and torch.backends.cuda.matmul.allow_tf32:
            mode = "tf32"
        rate = {"fp32": known.single, "tf32": known.tf32}.get(mode, known.half)
        return rate * 1e12, f"{known.name}, data sheet, {mode}"
    source = f"measured: {_SIZE} × {_SIZE} matrices, {mode}, with this rank's threads"
    if before[1] == source:
        return before
    return _measured(device, mode, torch.get_num_threads()), source


@functools.cache
def _measured(device: Any, mode: str, _threads: int) -> float:
    """Return the FLOPs in a second that a matrix product reaches on this device.

    Measured once for each number of threads; it takes 0.03 s, for which the other ranks wait.
    """
    import torch

    from lockstep.machine import accelerator

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    size = _SIZE if device.type == "cpu" else 8 * _SIZE
    a = torch.ones(size, size, dtype=dtype, device=device)
    torch.mm(a, a)
    best = float("inf")
    until = time.perf_counter() + _SECONDS
    # at least once, even on a busy machine
    while best == float("inf") or time.perf_counter() < until:
        since = time.perf_counter()
        torch.mm(a, a)
        accelerator.synchronize(device)
        best = min(best, time.perf_counter() - since)
    return 2 * size**3 / best


def first_step_counted(into: Figures) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context for each step.

    The first context counts this rank's operations into `Figures.flops`.
    """
    contexts = iter([_counted(into)])
    return lambda: next(contexts, _NOTHING)


@contextmanager
def _counted(into: Figures) -> Iterator[None]:
    """Count the FLOPs of the operations in the block."""
    from torch.utils.flop_counter import flop_registry

    from lockstep.torch_compat.dispatch_mode import TorchDispatchMode

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        total = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
            if formula is not None:
                self.total += formula(*args, **(kwargs or {}), out_val=result)
            return result

    counter = Counter()  # type: ignore[no-untyped-call]
    with counter:
        yield
    into.flops = float(counter.total)
