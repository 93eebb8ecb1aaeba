"""The upper part of the tree, between ranks that each hold the sums of whole nodes.

An all-to-all brings each rank its share (1/W) of every node's sum; it adds them up the tree; an all-gather brings the
shares together. Where each rank holds one node, as on 2ⁿ ranks, the bytes are those of a ring all-reduce:
2·(W−1)/W of the gradients a rank. Where some hold n of them, the first half of it counts n times: (1+n)/2 of it.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.tree import Node, Partials, tree_assignment

# The new name since torch 2.13; the old one warns there.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TreeAllReduce:
    """One all-reduce under way. Every rank of the group makes the same calls in the same order.

        started = TreeAllReduce(...)      the all-to-all runs
        started.fold()                    waits for it, adds, and starts the all-gather
        started.finish(out)               waits for that, and writes the sum

    Args:
        sums: this rank's nodes' sums, each flat, of one size and dtype on all ranks, in the order of
            `tree_assignment(leaves, W)[rank]`; None where all leaves of a node are missing.
        like: a flat tensor of that size, dtype and device.
        leaves: micro-batches in the step.
    """

    def __init__(self, sums: Sequence[Tensor | None], like: Tensor, leaves: int, group: dist.ProcessGroup) -> None:
        ranks, rank = group.size(), group.rank()
        self._leaves, self._group, self._numel = leaves, group, like.numel()
        self._nodes = tree_assignment(leaves, ranks)
        assert len(sums) == len(self._nodes[rank])
        self._share = share = -(-like.numel() // ranks)
        mine, all_ = len(sums), sum(len(nodes) for nodes in self._nodes)
        send = like.new_zeros(ranks, mine, share)
        for place, value in enumerate(sums):
            if value is not None:
                _spread(value, send[:, place])
        self._received = like.new_empty(all_, share)
        self._work: Any = dist.all_to_all_single(
            self._received.view(-1), send.view(-1), [len(nodes) * share for nodes in self._nodes],
            [mine * share] * ranks, group=group, async_op=True,
        )  # fmt: skip
        self._send = send  # kept until it is sent

    def fold(self) -> None:
        """Add up this rank's share."""
        self._work.wait()
        total = _folded(self._received, self._nodes, self._leaves)
        self._gathered = total.new_empty(self._share * self._group.size())
        self._work = all_gather_flat(self._gathered, total, group=self._group, async_op=True)
        self._send = total
        del self._received

    def finish(self, out: Tensor) -> None:
        """Write the sum to `out`, flat."""
        self._work.wait()
        out.copy_(self._gathered[: self._numel])
        del self._gathered, self._send


def tree_all_reduce(
    sums: Sequence[Tensor | None], out: Tensor, leaves: int, group: dist.ProcessGroup
) -> None:  # fmt: skip
    """The sum over the step of one flat tensor, from its sums over this rank's nodes; written to `out`."""
    if group.size() == 1:
        (value,) = sums
        out.zero_() if value is None else out.copy_(value)
        return
    reduce = TreeAllReduce(sums, out, leaves, group)
    reduce.fold()
    reduce.finish(out)


def _spread(value: Tensor, rows: Tensor) -> None:
    """Cut a flat tensor over the rows of [W, share]; the last one may have room left."""
    share = rows.shape[1]
    whole = value.numel() // share if share else 0
    rows[:whole].copy_(value[: whole * share].view(whole, share))
    if whole < len(rows):
        rows[whole, : value.numel() - whole * share].copy_(value[whole * share :])


def _folded(received: Tensor, nodes: Sequence[Sequence[Node]], leaves: int) -> Tensor:
    partials = Partials(leaves)
    for node, value in zip((n for held in nodes for n in held), received, strict=True):
        partials.put(node, [value])
    total = partials.total()
    assert total is not None
    assert total[0] is not None
    return total[0].contiguous()
