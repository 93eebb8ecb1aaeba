"""Counts the floating-point operations of a step with torch's counter, and knows those that devices can do.

It counts matrix products, convolutions and attention with the formulas of `torch.utils.flop_counter`; a multiply-add
is two operations. Loads torch inside functions only.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lockstep.monitor.figures import Figures

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
    """Return the floating-point operations per second of a device, and the source of the number.

    Args:
        device: a `torch.device`.
        mode: the precision of matrix products: fp32, bf16 or fp16.
    """
    import torch

    if device.type == "cuda":
        known = on_a_data_sheet(torch.cuda.get_device_name(device))
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

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    size = _SIZE if device.type == "cpu" else 8 * _SIZE
    a = torch.ones(size, size, dtype=dtype, device=device)
    torch.mm(a, a)
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < until:  # at least once, even on a busy machine
        since = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - since)
    return 2 * size**3 / best


class FirstStep:
    """Counts this rank's operations in the first step; later steps run unchanged.

    Args:
        into: gets the count.
    """

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
