"""The upper part of the tree, between ranks that each hold the sums of whole nodes.

An all-to-all brings each rank its share (1/W) of every node's sum; it adds them up the tree; an all-gather brings the
shares together. Where each rank holds one node, as on 2ⁿ ranks, the bytes are those of a ring all-reduce:
2·(W−1)/W of the gradients a rank. Where some hold n of them, the first half of it counts n times: (1+n)/2 of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.parallel.tree import Node, Partials, tree_assignment

# The new name since torch 2.13; the old one warns there.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Bytes from a rank to another at once, under gloo. Both directions of a pair share one connection, and long messages
# go one after the other there: 2 × 6.7 MB took up to 1.9 s at 100 Mbit/s, in these pieces 1.1 s, as an all-reduce does.
MESSAGE = 256 << 10


class TreeReduceScatter:
    """One reduce-scatter under way. Every rank of the group makes the same calls in the same order.

    Args:
        rows: this rank's nodes' sums, [W, share] each: row w is rank w's share. In the order of
            `tree_assignment(leaves, W)[rank]`; None where all leaves of a node are missing.
        like: of the dtype and on the device of the sums.
        share: elements that each rank gets.
        leaves: micro-batches in the step.
    """

    def __init__(
        self, rows: Sequence[Tensor | None], like: Tensor, share: int, leaves: int, group: dist.ProcessGroup
    ) -> None:
        self._leaves = leaves
        self._nodes = tree_assignment(leaves, group.size())
        mine, each = len(rows), [len(nodes) for nodes in self._nodes]
        assert mine == each[group.rank()]
        self._sent = like.new_zeros(group.size(), mine, share)
        for place, values in enumerate(rows):
            if values is not None:
                self._sent[:, place].copy_(values)
        self._received = like.new_empty(sum(each), share)
        self._work: Any = dist.all_to_all_single(
            self._received.view(-1), self._sent.view(-1), [count * share for count in each],
            [mine * share] * group.size(), group=group, async_op=True,
        )  # fmt: skip

    def finish(self) -> Tensor:
        """Wait, and add up this rank's share, [share]."""
        self._work.wait()
        partials = Partials(self._leaves)
        nodes: list[Node] = [node for held in self._nodes for node in held]
        for node, values in zip(nodes, self._received, strict=True):
            partials.put(node, [values])
        total = partials.total()
        assert total is not None
        assert total[0] is not None
        del self._sent, self._received
        return total[0].contiguous()


class TreeAllReduce:
    """One all-reduce under way. Every rank of the group makes the same calls in the same order.

        started = TreeAllReduce(...)      the all-to-all runs
        started.fold()                    waits for it, adds, and starts the all-gather
        started.finish(out)               waits for that, and writes the sum

    Args:
        sums: this rank's nodes' sums, flat, of one size on all ranks, as for `TreeReduceScatter`.
        like: a flat tensor of that size, dtype and device.
        leaves: micro-batches in the step.
    """

    def __init__(self, sums: Sequence[Tensor | None], like: Tensor, leaves: int, group: dist.ProcessGroup) -> None:
        self._size = _segment(like, group)
        cut = [None if value is None else torch.split(value, self._size) for value in sums]
        self._segments = [
            _Segment([None if values is None else values[place] for values in cut], part, leaves, group)
            for place, part in enumerate(torch.split(like, self._size))
        ]

    def fold(self) -> None:
        """Add up this rank's share."""
        for segment in self._segments:
            segment.fold()

    def finish(self, out: Tensor) -> None:
        """Write the sum to `out`, flat."""
        for segment, part in zip(self._segments, torch.split(out, self._size), strict=True):
            segment.finish(part)
        self._segments.clear()


def _segment(like: Tensor, group: dist.ProcessGroup) -> int:
    """Elements that are sent at once."""
    if like.device.type != "cpu":
        return max(1, like.numel())  # NCCL cuts messages itself
    return max(1, MESSAGE // like.element_size()) * group.size()


class _Segment:
    """A part of it."""

    def __init__(self, sums: Sequence[Tensor | None], like: Tensor, leaves: int, group: dist.ProcessGroup) -> None:
        self._group = group
        share = -(-like.numel() // group.size())
        rows = [None if value is None else in_rows(value, group.size(), share) for value in sums]
        self._scatter = TreeReduceScatter(rows, like, share, leaves, group)

    def fold(self) -> None:
        self._total = self._scatter.finish()
        self._gathered = self._total.new_empty(self._total.numel() * self._group.size())
        self._work = all_gather_flat(self._gathered, self._total, group=self._group, async_op=True)

    def finish(self, out: Tensor) -> None:
        self._work.wait()
        out.copy_(self._gathered[: out.numel()])
        del self._gathered, self._total


def tree_all_reduce(sums: Sequence[Tensor | None], out: Tensor, leaves: int, group: dist.ProcessGroup) -> None:
    """The sum over the step of one flat tensor, from its sums over this rank's nodes; written to `out`."""
    reduce = TreeAllReduce(sums, out, leaves, group)
    reduce.fold()
    reduce.finish(out)


def in_rows(value: Tensor, rows: int, share: int) -> Tensor:
    """A flat tensor as [rows, share], with zeros at its end."""
    if value.numel() < rows * share:
        value = F.pad(value, (0, rows * share - value.numel()))
    return value.view(rows, share)
