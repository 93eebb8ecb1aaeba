"""The gradient norm as a number that does not depend on how gradients are cut or in which order they are added.

A sum of floats depends on its order; a sum of integers does not. So each square is written in fixed point, as
multiples of a unit that all ranks agree on, and the integers are added. With all |g| < 2^e and n elements in all,
b = 62 − ⌈log₂ n⌉ bits leave room for n terms in 63: a square is rounded to hi · 2^(2e − b), and what is left of it to
lo · 2^(2e − 2b). For n = 2³⁰ that is 64 bits below the largest square. Squares of float32 are exact in float64.

Source: the idea of pre-rounding, Demmel and Nguyen 2013, "Fast Reproducible Floating-Point Summation".
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_AT_ONCE = {"cpu": 1 << 16}  # elements of which float64 copies exist at a time: what fits a CPU's cache


@torch.no_grad()
def exact_norm(
    gradients: Sequence[Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device, elements: int
) -> Tensor:
    """The 2-norm over all gradients of all shards and stages, 0-dim float32, the same bits on any layout.

    Args:
        gradients: this rank's; float32 or narrower.
        groups: over which the others are spread.
        elements: in all gradients of all ranks, or an upper bound that does not depend on the layout.
    """
    largest = torch.zeros((), device=device)
    gradients = [gradient for gradient in gradients if gradient.numel()]  # a shard may be empty
    if gradients:
        largest = torch.nn.utils.get_total_norm(gradients, float("inf")).float()
    largest = largest.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may lose a nan
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    bits = 62 - math.ceil(math.log2(max(2, elements)))
    exponent = torch.frexp(largest.nan_to_num(posinf=0.0))[1].long()
    coarse, fine = _power_of_two(bits - 2 * exponent), _power_of_two(2 * bits - 2 * exponent)
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    at_once = _AT_ONCE.get(device.type, 1 << 24)
    for gradient in gradients:
        for piece in torch.split(gradient.reshape(-1), at_once):
            square = piece.double().square_()
            high = (square * coarse).round_()
            rest = square.sub_(high / coarse).mul_(fine).round_()
            totals[0] += high.long().sum()
            totals[1] += rest.long().sum()
    for group in groups:
        dist.all_reduce(totals, group=group)
    squares = totals[0].double() / coarse + totals[1].double() / fine
    return torch.where(torch.isinf(largest), largest, squares.sqrt().float())


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly, for −1022 ≤ exponent ≤ 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)
