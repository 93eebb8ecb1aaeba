"""Rotary positions over interleaved pairs (Su et al. 2021, *RoFormer*).

Neighbours (2j, 2j+1) of the last dim are rotated by the angle t·theta^(−2j/width) at position t. Angles are float32
under any autocast: in bf16 position 257 would equal position 256. They are computed at each call and not kept in a
buffer, which would be cast with the model, lost on `meta`, and sent to every rank.
"""

from typing import Any

import torch
from torch import Tensor


def phases(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at positions [..., T], both float32 [..., T, width/2]."""
    pair = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angle = positions.float()[..., None] * theta ** (-pair / width)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate x [..., T, width] by phases [..., T, width/2]; computed in float32, returned in `dtype` (default: x's)."""
    turned: Tensor = _Rotation.apply(x, cos, sin, dtype or x.dtype)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    """The rotation and its gradient, the opposite rotation, with no temporary but the result.

    Composed of plain operations it takes three times as long on a CPU and keeps two more tensors of x's size.
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
    turned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    even, odd = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    turned_even, turned_odd = turned.view(*x.shape[:-1], -1, 2).unbind(-1)
    # No `out=` on a strided view: torch.compile breaks its graph there.
    turned_even.copy_(even).mul_(cos).addcmul_(odd, sin, value=-1)
    turned_odd.copy_(even).mul_(sin).addcmul_(odd, cos)
    return turned


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a region that computes in the dtypes of its operands."""
    # `meta` has none. Not asked of torch: its compiler breaks the graph at `is_autocast_available` up to torch 2.11.
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)
