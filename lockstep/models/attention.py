"""Attention over a sequence, and rotary positions.

A rank may hold a part of the sequence (`lockstep.parallel.context.sequences`).

Rotary positions (Su et al. 2021, *RoFormer*) rotate neighbours (2j, 2j+1) of the last dim at
position t by the angle t·theta^(−2j/width), in float32 under any autocast (in bf16 position 257
would equal position 256). They are computed at each call: a buffer would be cast with the model,
lost on `meta`, and sent to ranks. Width 4 and theta 10,000 at positions 0 and 1: the first pair of
numbers turns by 0 and 1, the second by 0 and 0.01.

    >>> cos, sin = phases(torch.arange(2), width=4, theta=10_000.0)
    >>> sin
    tensor([[0.0000, 0.0000],
            [0.8415, 0.0100]])
    >>> rotate(torch.tensor([[1.0, 0, 1, 0], [1, 0, 1, 0]]), cos, sin)
    tensor([[1.0000, 0.0000, 1.0000, 0.0000],
            [0.5403, 0.8415, 0.9999, 0.0100]])

Tests: tests/models/test_rotary.py, tests/models/test_documents.py, tests/parity/test_context.py,
tests/parallel/test_worked_examples.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Past:
    """The keys and values of earlier positions, which a layer keeps while it continues a text."""

    def __init__(self) -> None:
        self.length = 0  # positions
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def with_new(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the next positions, and return those of all of them."""
        if self._keys is not None and self._values is not None:
            k = torch.cat((self._keys, k), dim=2)
            v = torch.cat((self._values, v), dim=2)
        self._keys = k
        self._values = v
        self.length = k.shape[2]
        return k, v


class Attend(nn.Module):
    """Scaled dot-product attention: q [B, H, T, D], k and v [B, H or fewer, T, D] → [B, H, T, D].

    Positions of one document attend to each other only. `documents`, int64 [B, complete T], numbers
    the document of each position of the complete sequence, also where a rank has a part of it; a
    document is one run of equal numbers. If `causal`, a position attends to itself and earlier
    ones; else to all.

    Subclasses that attend in another way override `run`. A context-parallel run replaces
    `positions` and `forward`.
    """

    heads_dim = 1

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self._past: Past | None = None  # set while a text is continued, token by token

    def keep_past(self, *, keeps: bool) -> None:
        """Begin to keep keys and values, from the next position as the first; or end it."""
        self._past = Past() if keeps else None

    def positions(
        self, length: int, device: torch.device, documents: Tensor | None = None
    ) -> Tensor:
        """Return the positions of the `length` tokens that are here.

        The result is int64 [length], or with documents the positions within them, int64 [B,
        length].
        """
        if documents is not None:
            return positions_within(documents)
        first = 0 if self._past is None else self._past.length
        return torch.arange(first, first + length, device=device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self._past is None:
            return self.run(q, k, v, 0, documents)
        first = self._past.length
        k, v = self._past.with_new(k, v)
        return self.run(q, k, v, first)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, first: int, documents: Tensor | None = None
    ) -> Tensor:
        """Let queries at the positions first, first + 1, … attend to keys at 0, 1, ….

        If causal, to earlier ones. Two queries from position 2 on and four keys: the mask is

            [[1, 1, 1, 0],
             [1, 1, 1, 1]]
        """
        # Without a mask torch takes its flash kernel, where the device has one.
        mask = None
        if self.causal and (first or documents is not None):
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(first)
        if documents is not None:
            same = same_document(documents, first, q.shape[2], k.shape[2]).unsqueeze(1)
            mask = same if mask is None else same & mask
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal and mask is None, enable_gqa=grouped
        )


def positions_within(documents: Tensor) -> Tensor:
    """Return the position of each token within its document: int64 [B, T] → int64 [B, T].

    >>> positions_within(torch.tensor([[7, 7, 7, 4, 4, 7]]))
    tensor([[0, 1, 2, 0, 1, 0]])
    """
    positions = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return positions - torch.where(begins, positions, 0).cummax(1).values


def same_document(documents: Tensor, first: int, queries: int, keys: int) -> Tensor:
    """Return whether each query and each key belong to one document: bool [B, queries, keys].

    The queries are at the positions first, first + 1, …, the keys at 0, 1, ….

    >>> same_document(torch.tensor([[7, 7, 4, 4]]), first=2, queries=1, keys=4)
    tensor([[[False, False,  True,  True]]])
    """
    return documents[:, first : first + queries, None] == documents[:, None, :keys]


class SequenceDropout(nn.Dropout):
    """Dropout of a tensor whose sequence lies along another dim than 1."""

    def __init__(self, p: float, sequence_dim: int) -> None:
        super().__init__(p)
        self.sequence_dim = sequence_dim


class SequenceBernoulli(nn.Module):
    """Draws of ones with given probabilities, [B, T, …] → [B, T, …].

    A context-parallel run replaces `forward`.
    """

    def forward(self, probabilities: Tensor) -> Tensor:
        return torch.bernoulli(probabilities)


class SequenceMean(nn.Module):
    """The mean over the positions of a micro-batch: [B, T, K] → [K].

    A context-parallel run replaces both methods.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((0, 1))

    def total(self, counts: Tensor) -> Tensor:
        """Return the sum of integer counts over all parts of the sequences.

        `counts` were counted over the part that is here.
        """
        return counts


def phases(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at positions [..., T], both float32 [..., T, width/2]."""
    pair = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angle = positions.float()[..., None] * theta ** (-pair / width)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate x [..., T, width] by phases [..., T, width/2].

    Computed in float32, returned in `dtype` (default: x's).
    """
    turned: Tensor = _Rotation.apply(x, cos, sin, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    """The rotation and its gradient, the opposite rotation, with no temporary but the result.

    Composed of plain operations it takes three times as long on a CPU and keeps two more tensors of
    x's size.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.input_dtype = x.dtype
        return _turn(x, cos, sin).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin).to(ctx.input_dtype), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return (even · cos − odd · sin, even · sin + odd · cos), as neighbours again, in float32."""
    turned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    even, odd = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    turned_even, turned_odd = turned.view(*x.shape[:-1], -1, 2).unbind(-1)
    # No `out=` on a strided view: torch.compile breaks its graph there.
    turned_even.copy_(even).mul_(cos).addcmul_(odd, sin, value=-1)
    turned_odd.copy_(even).mul_(sin).addcmul_(odd, cos)
    return turned


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a region that computes in the dtypes of its operands."""
    # `meta` has none. Not asked of torch: its compiler breaks the graph at `is_autocast_available`
    # up to torch 2.11.
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)
