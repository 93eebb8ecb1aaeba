"""CUDA's history of allocations, for a profile's memory snapshot.

Public torch: none; its documentation of memory snapshots says to call these private functions.
Seen to work: torch 2.13.0.
When gone: a profile on a GPU raises AttributeError as it starts.
"""

import torch


def record(max_entries: int) -> None:
    """Record allocations from now on, the newest ones, with the lines of Python that made them."""
    # With frames of C++, writing takes half a minute, and leaves a process of addr2line for each
    # library.
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def stop() -> None:
    """Record no more."""
    torch.cuda.memory._record_memory_history(enabled=None)


def write(path: str) -> None:
    """Write what is recorded, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
