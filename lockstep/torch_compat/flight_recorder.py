"""The newest collectives of this process, as torch's flight recorder holds them.

Public torch: the recorder writes a file when a collective times out, under nccl; nothing reads it
while one hangs. Seen to work: torch 2.11.0 to 2.15.0. When gone: `read` is None, and the message
about a hang names the ranks and the line, without the collectives.
"""

from collections.abc import Callable

import torch

read: Callable[[], bytes] | None = getattr(
    getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None
)  # the recorded collectives as JSON
