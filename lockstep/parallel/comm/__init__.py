"""Messages between ranks: FSDP2 over gloo, and compressed gradients.

Tests: tests/parallel/test_traffic.py
"""

from typing import Any

import torch.distributed as dist

# torch 2.13 renames these collectives; the old names warn there.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# Bytes from a rank to another at once, under gloo. Both directions of a pair share one connection,
# and long messages go one after the other there: 2 × 6.7 MB took up to 1.9 s at 100 Mbit/s, in
# these pieces 1.1 s, as an all-reduce does.
MESSAGE = 256 << 10
