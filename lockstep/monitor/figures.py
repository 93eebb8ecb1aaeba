"""Gathers the ranks' measurements on logged steps: phases, memory, utilisation, MFU; and finds slow ranks in them.

It is one small all-gather, at most about once a second. The next one's step follows from numbers that all ranks have,
so they agree on it. In between nothing is sent and nothing waits.

Ranks that train together take equally long for a step, because fast ranks wait for slow ones. Their own time, a step
without waiting for others, shows the difference. A rank is reported if its own time was well above the median of the
others' several times in a row.

The operations of a step are counted with the formulas of `torch.utils.flop_counter`: matrix products, convolutions and
attention; a multiply-add is two operations. Loads torch inside functions only.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from lockstep.config import StragglerConfig
from lockstep.monitor.meters import (
    PAUSES,
    PHASES,
    STEP_PHASES,
    Memory,
    PhaseClock,
    ddp_wait_seconds,
    gpu_utilisation,
    memory_of_this_rank,
)

Spread = list[float | int]  # [least, median, most, rank of the most]


def gather(values: Sequence[float]) -> list[list[float]]:
    """Return `values` of every rank, by rank; all ranks call it with equally many. It waits for device and ranks."""
    import torch
    import torch.distributed as dist

    from lockstep.collectives import device_of_numbers

    if not _several():
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.float64, device=device_of_numbers())
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return [row.tolist() for row in table]


def gather_objects(value: Any) -> list[Any]:
    """Return `value` of every rank, by rank; for rare use."""
    import torch.distributed as dist

    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
    """Gathers measurements and turns them into a record's fields.

    Args:
        clock: this rank's phases.
        memory: reads this rank's memory; tests pass another.
        every: seconds between two gatherings; unset: `SECONDS_BETWEEN`; 0: on every logged step.
    """

    def __init__(
        self, clock: PhaseClock, memory: Callable[[], Memory] = memory_of_this_rank, every: float | None = None
    ) -> None:
        self.clock = clock
        self.flops = 0.0  # floating-point operations of this rank in a full step
        self.peak = 0.0  # floating-point operations per second of one rank's device
        self.peak_source = ""
        self.recomputes = False  # whether `flops` counts recomputed activations twice
        self._memory, self._every = memory, SECONDS_BETWEEN if every is None else every
        self._next = 0
        self._steps = 0

    def count(self) -> None:
        self._steps += 1

    def due(self, step: int, last: bool) -> bool:
        """Return whether to gather after this logged step: the same answer on every rank."""
        return step >= self._next or last

    def collect(self, step: int) -> Table:
        """Gather the measurements since the last time; all ranks call it together."""
        steps, self._steps = max(1, self._steps), 0
        mine = {**self._phases(steps), **self._memory()._asdict()}
        mine |= {"gpu_utilisation": gpu_utilisation(), "flops": self.flops}
        rows = gather([mine[name] for name in _NAMES])
        table = {name: [row[column] for row in rows] for column, name in enumerate(_NAMES)}
        table["step"] = [sum(table[name][rank] for name in STEP_PHASES) for rank in range(len(rows))]
        table["own"] = [s - c for s, c in zip(table["step"], table["communication"], strict=True)]
        self._next = step + max(1, math.ceil(self._every / max(1e-9, median(table["step"])))) if self._every else 0
        return table

    def row(self, table: Table) -> dict[str, Any]:
        """Return fields of a `StepRecord`."""
        ranks = len(table["step"])
        fields: dict[str, Any] = {
            "phases": {name: spread(table[name]) for name in PHASES if any(table[name])},
            "memory": {name: spread(table[name]) for name in _MEMORY if any(table[name])},
        }
        if 1 < ranks <= MOST_RANKS_LISTED:
            fields["own_seconds"] = [float(f"{s:.4g}") for s in table["own"]]
        if not any(math.isnan(u) for u in table["gpu_utilisation"]):
            fields["gpu_utilisation"] = spread(table["gpu_utilisation"])
        flops, seconds = sum(table["flops"]), median(table["step"])
        if flops and seconds:
            fields["flops_per_second"] = float(f"{flops / seconds:.6g}")
        if flops and seconds and self.peak:
            fields["hfu" if self.recomputes else "mfu"] = float(f"{flops / seconds / self.peak / ranks:.4g}")
        return fields

    def _phases(self, steps: int) -> dict[str, float]:
        """Return the seconds of each phase per step; for pauses, in total."""
        seconds = self.clock.read()
        hidden = min(ddp_wait_seconds() * steps, seconds["forward_backward"])
        seconds["forward_backward"] -= hidden
        seconds["communication"] += hidden
        return {name: s if name in PAUSES else s / steps for name, s in seconds.items()}


# ---- the rank that keeps the others waiting ----


_OWN_PHASES = tuple(name for name in STEP_PHASES if name != "communication")
_LEAST_SECONDS = 1e-3  # per step; clocks of busy hosts differ by as much anyway


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        ratio: its own time over the median of the other ranks' own time.
        phase: the phase with most of the difference.
        seconds: its time in that phase, per step.
        others: the median of the others in that phase, per step.
    """

    rank: int
    ratio: float
    phase: str
    seconds: float
    others: float

    def sentence(self, host: str | None = None) -> str:
        on = f" on {host}" if host else ""
        return (
            f"rank {self.rank}{on} is slow: its own work takes {self.ratio:.2f} × as long as the other ranks';"
            f" {self.phase} {_ms(self.seconds)} per step against {_ms(self.others)}"
        )


class StragglerWatch:
    """Finds ranks that stay slow in the figures of all ranks, and reports each once until it has caught up."""

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
        own, others = table["own"][rank], _others(table["own"], rank)
        if own < self._config.threshold * others or own - others < _LEAST_SECONDS:
            return None
        phase = max(_OWN_PHASES, key=lambda name: table[name][rank] - _others(table[name], rank))
        return Straggler(rank, own / max(others, 1e-9), phase, table[phase][rank], _others(table[phase], rank))


def _others(values: list[float], rank: int) -> float:
    """Return the median of the other ranks' values, of which there are some."""
    return median(values[:rank] + values[rank + 1 :])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# ---- the operations of a step, and of devices ----


_NOTHING = nullcontext()  # shared by all steps: making one takes a call

# Dense TFLOP/s by the makers' data sheets: (bf16 and fp16, tf32, fp32). The first name that is part of the device's, as
# whole words, counts. NVIDIA: B200, H200, H100 (SXM5, PCIe, NVL), A100, A40, A10, L40S, L40, L4, V100, T4, GeForce RTX
# 4090 and 3090 (tensor cores with fp32 accumulation), half of the numbers "with sparsity". AMD: Instinct MI300X,
# MI250X.
DEVICES: dict[str, tuple[float, float, float]] = {
    "B200": (2250.0, 1100.0, 75.0),
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A10": (125.0, 62.5, 31.2),
    "L40S": (362.0, 183.0, 91.6),
    "L40": (181.0, 90.5, 90.5),
    "L4": (121.0, 60.0, 30.3),
    "V100": (125.0, 15.7, 15.7),
    "T4": (65.0, 8.1, 8.1),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
    "MI300X": (1307.4, 653.7, 163.4),
    "MI250X": (383.0, 95.7, 47.9),
}
_TERA = 1e12
_SIZE = 512  # size of the matrices for measuring a device without a data sheet
_SECONDS = 0.03


def peak_flops(device: Any, mode: str) -> tuple[float, str]:
    """Return the floating-point operations per second of a `torch.device`, and the source of the number.

    Args:
        mode: the precision of matrix products: fp32, bf16 or fp16.
    """
    import torch

    from lockstep import accelerator

    if device.type == "cuda":
        known = on_a_data_sheet(accelerator.name_of(device))
        if known is not None:
            half, tf32, single = DEVICES[known]
            fast = torch.backends.cuda.matmul.allow_tf32
            column = half if mode != "fp32" else tf32 if fast else single
            return column * _TERA, f"{known}, data sheet, {'tf32' if mode == 'fp32' and fast else mode}"
    return _measured(device, mode), f"measured: {_SIZE} × {_SIZE} matrices, {mode}, with this rank's threads"


def on_a_data_sheet(device_name: str) -> str | None:
    """Return the entry of `DEVICES` for a driver's name; whole words count: an "RTX A4000" is not an A40."""
    return next((known for known in DEVICES if re.search(rf"\b{known}\b", device_name)), None)


def _measured(device: Any, mode: str) -> float:
    import torch

    from lockstep import accelerator

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    size = _SIZE if device.type == "cpu" else 8 * _SIZE
    a = torch.ones(size, size, dtype=dtype, device=device)
    torch.mm(a, a)
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < until:  # at least once, even on a busy machine
        since = time.perf_counter()
        torch.mm(a, a)
        accelerator.synchronize(device)
        best = min(best, time.perf_counter() - since)
    return 2 * size**3 / best


class FirstStep:
    """Counts this rank's operations in the first step, into `Figures.flops`; later steps run unchanged."""

    def __init__(self, into: Figures) -> None:
        self._into: Figures | None = into

    def __call__(self) -> AbstractContextManager[None]:
        """Return a context that counts the first step's operations; later ones do nothing."""
        into, self._into = self._into, None
        return _NOTHING if into is None else _counted(into)


@contextmanager
def _counted(into: Figures) -> Iterator[None]:
    from torch.utils.flop_counter import flop_registry

    from lockstep.torch_compat.dispatch_mode import TorchDispatchMode

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
            if formula is not None:
                self.total += formula(*args, **(kwargs or {}), out_val=result)
            return result

    counter = Counter()  # type: ignore[no-untyped-call]
    with counter:
        yield
    into.flops = float(counter.total)
