"""Operators of torch that have no public name, and the schemas of all.

Public torch: `F.scaled_dot_product_attention` chooses one of these; what sees the chosen one has to
name it. Whether an operator writes to its arguments, and their names, stand in its schema alone.
Seen to work: torch 2.11.0 to 2.15.0. When gone: importing this file raises AttributeError; without
schemas a traced model is cut where it must not be.
"""

from typing import Any

import torch

FUSED_ATTENTION = (
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
)
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
UNSAFE_VIEW = torch.ops.aten._unsafe_view
SHARDING = str(torch.ops.fsdp.name)  # the namespace of FSDP2's


def schema_of(target: Any) -> Any:
    """Return an operator's schema (`is_mutable`, `arguments`), or None if it is not an operator."""
    return getattr(target, "_schema", None)
