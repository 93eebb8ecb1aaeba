"""The mean over workers of one flat tensor each, in a form that fits on a slow link.

An all-to-all brings each rank its share (1/R) of every worker's tensor; it adds them in the order of the workers; an
all-gather brings the shares of the mean together. With one worker a rank these are the bytes of a ring all-reduce,
2·(R−1)/R of the tensor a rank, and the sum is the same expression on any number of ranks: the same bits, also where
what travels is rounded, since it is rounded in blocks that do not depend on the ranks, and on one rank all the same.

`int8` sends a block of 256 numbers as its largest absolute value (fp32) and one signed byte each, in both directions.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers that share a scale

# The new name since torch 2.13; the old one warns there.
_all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def bytes_each(kind: str) -> float:
    """Bytes that one number takes on the link."""
    return 1 + 4 / BLOCK if kind == "int8" else float(_TYPES[kind].itemsize)


def encode(values: Tensor, kind: str) -> Tensor:
    """fp32 […, a multiple of BLOCK] as bytes: uint8 […, `bytes_each` times as many]."""
    if kind != "int8":
        return values.to(_TYPES[kind]).contiguous().view(torch.uint8)
    blocks = _blocks(values)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8)
    return torch.cat([rounded.flatten(-2).view(torch.uint8), scale.squeeze(-1).contiguous().view(torch.uint8)], -1)


def decode(coded: Tensor, kind: str) -> Tensor:
    """What `encode` made, as fp32."""
    if kind != "int8":
        return coded.view(_TYPES[kind]).float()
    numbers = coded.shape[-1] * BLOCK // (BLOCK + 4)
    rounded, scale = coded[..., :numbers].view(torch.int8), coded[..., numbers:].contiguous().view(torch.float32)
    return (_blocks(rounded.float()) * scale.unsqueeze(-1)).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:-1], -1, BLOCK)


class Wire:
    """How the ranks of a group exchange what their workers changed.

    Args:
        kind: fp32, fp16, bf16 or int8.
        group: ranks that hold as many workers each, in the ranks' order; None: this one holds all.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup | None) -> None:
        self._kind, self._group = kind, group
        self._ranks = 1 if group is None else group.size()

    def mean(self, rows: Tensor, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """The mean over all workers; every rank calls it.

        Args:
            rows: fp32 [workers of this rank, numbers].
            kind: in place of the wire's own.

        Returns:
            (the mean, fp32 [numbers], the same on all ranks; what got through of this rank's rows, in their shape).
        """
        kind, (held, numbers) = kind or self._kind, rows.shape
        share = BLOCK * -(-numbers // (BLOCK * self._ranks))
        padded = F.pad(rows, (0, self._ranks * share - numbers)).view(held, self._ranks, share)
        coded = encode(padded, kind)
        theirs = decode(self._swapped(coded.transpose(0, 1).contiguous(), dist.all_to_all_single), kind)
        workers = theirs.view(-1, share)  # in their order: rank by rank
        total = workers[0]
        for row in workers[1:]:
            total = total + row
        mean = encode(total / len(workers), kind)
        whole = decode(self._swapped(mean, _all_gather_flat, self._ranks).view(self._ranks, -1), kind)
        return whole.view(-1)[:numbers], decode(coded, kind).view(held, -1)[:, :numbers]

    def _swapped(self, sent: Tensor, collective: Callable[..., Any], times: int = 1) -> Tensor:
        if self._group is None:
            return sent
        received = sent.new_empty(times * sent.numel())
        collective(received, sent.view(-1), group=self._group)
        return received if times > 1 else received.view(sent.shape)
