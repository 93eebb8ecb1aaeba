"""The gradient norm, which depends neither on how gradients are cut nor on the order of additions.

A sum of floats depends on its order; a sum of integers does not. So each square is written in fixed
point, as multiples of a unit that all ranks agree on, and the integers are added. With all |g| <
2^e and n elements in all, b = 62 − ⌈log₂ n⌉ bits leave room for n terms in 63 (36 at most, of which
float64 adds up 2^15 exactly): a square is rounded to hi · 2^(2e − b), and what is left of it to lo
· 2^(2e − 2b). For n = 2³⁰ that is 64 bits below the largest square. Squares of float32 are exact in
float64.

Two ranks with the gradients [3] and [4], so n = 2 in all. The largest is 4 < 2³, so e = 3; b = 36.
The squares 9 and 16 become 9 · 2³⁰ and 16 · 2³⁰, of which nothing is left over. Each rank adds its
own, an all-reduce adds those of the ranks, exactly, and the norm is √(25 · 2³⁰ / 2³⁰) = 5.

    in float32   (2²⁴ + 1) + 1 = 2²⁴, and (1 + 1) + 2²⁴ = 2²⁴ + 2
    as integers  2²⁴ + 2, in any order

Source: the idea of pre-rounding, Demmel and Nguyen 2013, "Fast Reproducible Floating-Point
Summation".

Tests: tests/parallel/reproducible/test_exact_norm.py, tests/parallel/test_worked_examples.py
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.torch_compat import foreach

# elements of which float64 copies exist at a time: what fits a CPU's cache
_AT_ONCE = {"cpu": 1 << 15}
# gradients of fewer elements are put together: each operation on one has a price of its own
SMALL = 1 << 12


@torch.no_grad()
def exact_norm(
    gradients: Sequence[Tensor],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    elements: int,
) -> Tensor:
    """Return the 2-norm over all gradients of all shards and stages, 0-dim float32.

    It has the same bits on any layout.

    This rank's `gradients` are float32 or narrower; `elements`: in all gradients of all ranks, or
    an upper bound.
    """
    gradients = [gradient for gradient in gradients if gradient.numel()]  # a shard may be empty
    # a maximum may lose a nan
    largest = _largest(gradients, device).nan_to_num(nan=math.inf, posinf=math.inf)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    bits = min(36, 62 - math.ceil(math.log2(max(2, elements))))
    exponent = torch.frexp(largest.nan_to_num(posinf=0.0))[1].long()
    # A power of two in float64, exactly: its exponent, bits − 2 · exponent, is one of −1022 … 1023.
    # Made from its bits, as the host would have to wait for the exponent.
    coarse = ((bits - 2 * exponent + 1023) << 52).view(torch.float64)
    finer = float(2**bits)
    totals = torch.zeros(2, dtype=torch.int64, device=device)  # of hi, of lo
    for squares, high in _squares(gradients, device):
        torch.round(squares.mul_(coarse), out=high)
        totals[0] += _exact_sum(high)
        totals[1] += _exact_sum(squares.sub_(high).mul_(finer).round_())
    for group in groups:
        dist.all_reduce(totals, group=group)
    square = (totals[0].double() + totals[1].double() / finer) / coarse
    return torch.where(torch.isinf(largest), largest, square.sqrt().float())


def _largest(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value, or nan if there is one; 0-dim float32."""
    if not gradients:
        return torch.zeros((), device=device)
    if device.type != "cpu":
        return torch.nn.utils.get_total_norm(gradients, float("inf")).float()
    # ten times as fast there
    extremes = [extreme for gradient in gradients for extreme in torch.aminmax(gradient)]
    return torch.stack(extremes).float().abs().max()


def _squares(gradients: Sequence[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield squares of the elements in float64, some at a time, and a buffer of that size.

    Both may be written to.
    """
    small, large = _by_size(gradients)
    flats = [gradient.reshape(-1) for gradient in large]
    if small:
        flats.append(foreach.flatten(small))
    at_once = min(
        _AT_ONCE.get(device.type, 1 << 24), max((flat.numel() for flat in flats), default=0)
    )
    # once: fresh memory costs page faults
    work = torch.empty(2, at_once, dtype=torch.float64, device=device)
    for flat in flats:
        for piece in torch.split(flat, at_once):
            values, room = work[:, : piece.numel()]
            yield values.copy_(piece).square_(), room


def _exact_sum(values: Tensor) -> Tensor:
    """Return the exact sum of float64 values that are whole numbers, in int64."""
    # On a CPU there are 2^15 of at most 36 bits, whose sum float64 holds, in whichever order it is
    # made.
    return values.sum().long() if values.device.type == "cpu" else values.long().sum()


def _by_size(gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the small gradients, and the others."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    for gradient in gradients:
        (small if gradient.numel() < SMALL else large).append(gradient)
    return small, large
