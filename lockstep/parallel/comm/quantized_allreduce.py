"""All-reduce with few bits: the mean over workers of one flat tensor each, for slow links.

An all-to-all brings a rank its workers' shares of every worker's tensor; it adds them in the order of the workers; an
all-gather brings the shares of the mean together. Numbers are rounded in blocks that do not depend on the ranks, so the
bits do not either. Rounding errors are returned, to be added to the next exchange (error feedback: Seide et al. 2014;
four bits: Douillard et al. 2025, arXiv:2501.18512).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.parallel.comm import all_gather_flat
from lockstep.precision import DTYPES

BLOCK = 256  # numbers that share a scale
LARGEST = {"int8": 127, "int4": 7}  # what is sent for the largest number of a block


def bytes_each(kind: str) -> float:
    """Return the bytes that one number takes on the link."""
    return _block_bytes(kind) / BLOCK if kind in LARGEST else float(DTYPES[kind].itemsize)


def _block_bytes(kind: str) -> int:
    return (BLOCK if kind == "int8" else BLOCK // 2) + 4


def encode(values: Tensor, kind: str) -> Tensor:
    """Encode fp32 […, a multiple of BLOCK] as bytes: uint8 […, `bytes_each` times as many]."""
    if kind not in LARGEST:
        return values.to(DTYPES[kind]).contiguous().view(torch.uint8)
    blocks = _blocks(values)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST[kind]
    rounded = (blocks / scale.clamp(min=1e-38)).round().to(torch.int8).flatten(-2)
    packed = rounded.view(torch.uint8)
    if kind == "int4":  # a number of the first half, −7..7, and one of the second share a byte
        low, high = (rounded + 8).view(torch.uint8).chunk(2, -1)
        packed = low | high << 4
    return torch.cat([packed, scale.squeeze(-1).contiguous().view(torch.uint8)], -1)


def decode(coded: Tensor, kind: str) -> Tensor:
    """Decode the result of `encode` to fp32."""
    if kind not in LARGEST:
        return coded.view(DTYPES[kind]).float()
    border = coded.shape[-1] - 4 * (coded.shape[-1] // _block_bytes(kind))
    packed, scale = coded[..., :border], coded[..., border:].contiguous().view(torch.float32)
    rounded = packed.view(torch.int8)
    if kind == "int4":
        rounded = torch.cat([packed & 15, packed >> 4], -1).view(torch.int8) - 8
    return (_blocks(rounded.float()) * scale.unsqueeze(-1)).flatten(-2)


def _blocks(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:-1], -1, BLOCK)


class QuantizedAllReduce:
    """The all-reduce by which the ranks of a group exchange what their workers changed.

    `group`: ranks that hold as many workers each, in the ranks' order; None: this one holds all.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup | None) -> None:
        self._kind, self._group = kind, group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())

    def mean(self, rows: Tensor, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean over all workers' rows, fp32 [this rank's workers, numbers], and this rank's rounding errors.

        The mean, fp32 [numbers], is the same on all ranks. The errors, [workers, numbers], are of each row, and of the
        mean in the worker's own share: added to the next rows, they correct both. `kind` replaces the object's own.
        """
        kind, (held, numbers) = kind or self._kind, rows.shape
        workers = held * self._ranks
        share = BLOCK * -(-numbers // (BLOCK * workers))
        padded = F.pad(rows, (0, workers * share - numbers)).view(held, workers, share)
        coded = encode(padded, kind)
        to_each = coded.view(held, self._ranks, -1).transpose(0, 1).contiguous()
        theirs = decode(self._exchanged(to_each, dist.all_to_all_single).view(workers, held, -1), kind)
        total = theirs[0]
        for row in theirs[1:]:  # in their order
            total = total + row
        mean = total / workers
        coded_mean = encode(mean, kind)
        whole = decode(self._exchanged(coded_mean, all_gather_flat, self._ranks).view(workers, -1), kind)
        lost, lost_of_mean = padded - decode(coded, kind), workers * (mean - decode(coded_mean, kind))
        for place in range(held):
            lost[place, self._rank * held + place] += lost_of_mean[place]
        return whole.view(-1)[:numbers], lost.view(held, -1)[:, :numbers]

    def _exchanged(self, sent: Tensor, collective: Callable[..., Any], times: int = 1) -> Tensor:
        if self._group is None:
            return sent
        received = sent.new_empty(times * sent.numel())
        collective(received, sent.view(-1), group=self._group)
        return received if times > 1 else received.view(sent.shape)
