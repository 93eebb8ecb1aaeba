"""Defines attention over a sequence of which a rank may hold a part (`lockstep.parallel.context`).

A model that offers `context_plan()` computes each position by itself, but for what goes through an `Attend`, and takes
positions from it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attend(nn.Module):
    """Scaled dot-product attention: q [B, H, T, D], k and v [B, H or fewer, T, D] → [B, H, T, D].

    Subclasses that attend in another way override `run`. A context-parallel run replaces `positions` and `forward`.

    Args:
        causal: a position attends to itself and earlier ones; else to all.
    """

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions in the whole sequence of the `length` that are here: int64 [length]."""
        return torch.arange(length, device=device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend."""
        return self.run(q, k, v, 0)

    def run(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Let a run of queries attend.

        Args:
            q: of the positions first, first + 1, ….
            k, v: of the positions 0, 1, …; if causal, up to the last query's.
        """
        grouped = q.shape[1] != k.shape[1]
        mask = None
        if self.causal and first:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(first)
        whole = self.causal and not first
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole, enable_gqa=grouped)


class SequenceDropout(nn.Dropout):
    """Dropout of a tensor whose sequence lies along another dim than 1.

    Args:
        sequence_dim: along which.
    """

    def __init__(self, p: float, sequence_dim: int) -> None:
        super().__init__(p)
        self.sequence_dim = sequence_dim
