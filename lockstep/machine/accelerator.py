"""Gives access to a process's accelerator.

It goes through `torch.accelerator` and `torch.get_device_module`.

GPUs of NVIDIA and, under ROCm, of AMD are `cuda`, Intel's are `xpu`, Apple's are `mps`; a package
may register another name with torch. What only CUDA has stands where it is used, behind
`device.type == "cuda"`.

Tests: tests/simulated_device/test_simulated_device.py, tests/process_group/test_cluster.py
"""

import math
import sys
from typing import Any

import torch

from lockstep.torch_compat import mps_generator

_selected: torch.device | None = None  # the accelerator on which this process trains


def module(kind: str) -> Any:
    """Return torch's module of a device type: `torch.cuda` for `cuda`."""
    return torch.get_device_module(kind)


def found() -> str | None:
    """Return the type of the accelerator that `auto` takes; None: there is none.

    MPS has to be named: it has no float64 and no process groups, so that it is not another place
    for the same run.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type == "mps" else device.type


def is_known(kind: str) -> bool:
    """Return whether torch has a module for accelerators of this type."""
    try:
        return hasattr(module(kind), "is_available")
    except (RuntimeError, AttributeError):  # not a type of device; a type without a module
        return False


def is_available(kind: str) -> bool:
    """Return whether there is a device of this type."""
    return bool(module(kind).is_available())


def count(kind: str | None = None) -> int:
    """Return the number of devices of a type; None: of the type that `auto` takes."""
    kind = kind or found()
    return int(module(kind).device_count()) if kind is not None and is_available(kind) else 0


def one_process(kind: str) -> bool:
    """Return whether devices of this type can't exchange tensors.

    A run on them has one process.
    """
    return kind == "mps"


def select(device: torch.device) -> None:
    """Make `device` the one on which this process trains.

    Call it before anything else uses an accelerator.
    """
    global _selected
    _selected = None if device.type == "cpu" else device
    if _selected is not None and hasattr(module(device.type), "set_device"):
        module(device.type).set_device(device)


def selected() -> torch.device | None:
    """Return the accelerator on which this process trains.

    None: it trains on the CPU, or has not begun.
    """
    return _selected


def current_index(kind: str) -> int:
    """Return the index of the device that this thread uses."""
    of_kind = module(kind)
    return int(of_kind.current_device()) if hasattr(of_kind, "current_device") else 0


def in_use() -> str | None:
    """Return the type of an accelerator that this process has used, after which it can't be forked.

    None if it has used none. Nothing is loaded: a process without torch has used none.
    """
    for kind in ("cuda", "xpu"):
        of_kind = getattr(sys.modules.get("torch"), kind, None)
        if of_kind is not None and of_kind.is_initialized():
            return kind
    return None if _selected is None else _selected.type


def name_of(device: torch.device) -> str:
    """Return the name that the driver gives the device, or else its type."""
    of_kind = module(device.type)
    return (
        str(of_kind.get_device_name(device)) if hasattr(of_kind, "get_device_name") else device.type
    )


def synchronize(device: torch.device) -> None:
    """Make the host wait until this process's accelerator has finished.

    Return at once for the CPU.
    """
    if device.type != "cpu":
        # Of the current device: a process has one, and MPS takes no argument.
        module(device.type).synchronize()  # host waits for the device


def record_event(device: torch.device, *, timed: bool = False) -> Any:
    """Record and return an event in the device's current stream.

    It has `query`, `synchronize` and `elapsed_time`.
    """
    event = module(device.type).Event(enable_timing=timed)
    event.record()
    return event


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of random functions on `device`."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return mps_generator.default()
    index = device.index if device.index is not None else current_index(device.type)
    generator: torch.Generator = module(device.type).default_generators[index]
    return generator


def pins_memory(device: torch.device) -> bool:
    """Return whether copies between the host and `device` profit from page-locked memory."""
    return device.type not in ("cpu", "mps")


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where a device has no wider one."""
    return torch.float32 if device.type == "mps" else torch.float64


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether the accelerator's hardware multiplies in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    of_kind = module(device.type)
    return bool(of_kind.is_bf16_supported()) if hasattr(of_kind, "is_bf16_supported") else False


def memory_of(device: torch.device) -> tuple[int, int, int, int]:
    """Return the bytes that are allocated, reserved, allocated at most so far, and there in all."""
    of_kind = module(device.type)
    if device.type == "mps":  # its allocator keeps no peak
        allocated = of_kind.current_allocated_memory()
        reserved = of_kind.driver_allocated_memory()
        return allocated, reserved, reserved, of_kind.recommended_max_memory()
    if not hasattr(of_kind, "memory_allocated"):
        return 0, 0, 0, 0
    total = of_kind.get_device_properties(device).total_memory
    return (
        of_kind.memory_allocated(),
        of_kind.memory_reserved(),
        of_kind.max_memory_allocated(),
        total,
    )


def utilisation() -> float:
    """Return the share of the last second in which this process's GPU ran a kernel.

    It is nan without NVML.

    Raises Exception: NVML's own, where nvidia-ml-py is missing or the driver fails.
    """
    return (
        float(torch.cuda.utilization()) / 100
        if _selected is not None and _selected.type == "cuda"
        else math.nan
    )


def keeps_memory_history() -> bool:
    """Return whether the accelerator's allocator can record its history."""
    return _selected is not None and _selected.type == "cuda"


def profiler_activity() -> Any:
    """Return the profiler's activity for the accelerator's kernels.

    None: torch can't trace them here.
    """
    supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    activities = supported - {torch.profiler.ProfilerActivity.CPU}
    return next(iter(activities), None) if _selected is not None else None
