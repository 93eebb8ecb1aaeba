"""Memory that a process frees stays with it, so that the next step finds it as it was.

A step on a CPU asks for the same sizes over and over. glibc hands what is freed at the top of the heap, and every large
block, back to the system, which must map and clear each page when it returns: 10 of 60 ms were seen to go there. Here
it keeps them. The process holds on to what it needed at its peak.
Source: man 3 mallopt.
"""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_freed_memory() -> bool:
    """From here on this process keeps what it frees; returns whether it does.

    Not where the C library is another one than glibc, and not where the environment has settings of its own.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older ones take no threshold above 32 MiB, but can be told to map nothing.
    large = mallopt(_MMAP_THRESHOLD, _LARGEST) or mallopt(_MMAP_MAX, 0)
    return bool(large and mallopt(_TRIM_THRESHOLD, _NEVER))
