"""The sum over a step's micro-batches as one expression: a binary tree whose leaves are their gradients, in order.

Additions of floats do not associate, so a sum is the same in every bit only where it is the same expression. The tree
depends on M, the number of micro-batches in the step, and on nothing else: a *node* is a run of neighbours [lo, hi); a
run of more than one splits into halves, the first of which is the longer one where they differ.

    M = 7:   ((0+1) + (2+3)) + ((4+5) + 6)

Who adds what:

- one process adds leaves as they come. A sum is made as soon as both of its sides are present, so of K leaves at most
  ⌈log₂ K⌉ + 1 partial sums are held at any time (`Partials`);
- ranks that reduce once a step (ddp, replicas, pipelines × ddp) each run whole nodes (`tree_assignment`). On 2ⁿ ranks
  each runs exactly one, whatever M is, because the n-th level of the tree has 2ⁿ nodes whose sizes differ by one at
  most: each rank sends one partial sum, as in any all-reduce. On 3, 5, 6 … ranks a rank may run several nodes, and
  sends each (`TreeAllReduce`);
- ranks that reduce each micro-batch (fsdp) run every S-th one, and the reduce-scatter brings a rank its shard of S
  neighbours at once. It adds them as one process would. So *any* number of shards adds up the tree, and sends no more.

**Missing leaves** (a zero-weight dummy; a parameter that a micro-batch did not use) are left out, or stand as +0 where
a buffer has a place for them. The two differ in the sign of a zero at most, and `clear_zero_signs` gives every zero the
sign +. A dummy's gradient is never added: 0 × inf is nan.

**Weights that several segments use** have one leaf a micro-batch all the same: the uses' gradients, added from the last
use to the first, which is what autograd does within one process. A pipeline sends that running sum from stage to stage
in each micro-batch (`lockstep.parallel.pipeline.trees`).
"""

from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.parallel.comm import MESSAGE, all_gather_flat
from lockstep.torch_compat import foreach

Node = tuple[int, int]
"""A run [lo, hi) of micro-batches that the tree sums as one."""

Nodes = Sequence[Sequence[Node]]
"""The nodes of each rank."""

Values = list[Tensor | None]
"""One partial sum for each parameter (or one flat tensor for all of them); None where nothing was added."""


def children(node: Node) -> tuple[Node, Node]:
    """Return the two nodes that add up to `node`, which has two leaves or more."""
    lo, hi = node
    assert hi - lo > 1
    middle = lo + (hi - lo + 1) // 2
    return (lo, middle), (middle, hi)


def path_to(index: int, leaves: int) -> list[tuple[Node, Node]]:
    """Return (node, its sibling) for each addition from the leaf `index` up to the root."""
    steps = []
    node = (0, leaves)
    while node[1] - node[0] > 1:
        left, right = children(node)
        node, other = (left, right) if index < right[0] else (right, left)
        steps.append((node, other))
    return steps[::-1]


@lru_cache(maxsize=256)
def tree_assignment(leaves: int, ranks: int) -> tuple[tuple[Node, ...], ...]:
    """Return the nodes that each rank runs: every leaf once, as evenly as possible, in few nodes (a greedy choice).

    On 2ⁿ ranks each has exactly one node, or none if there are fewer leaves than ranks.
    """
    room = [leaves // ranks + (rank < leaves % ranks) for rank in range(ranks)]
    mine: list[list[Node]] = [[] for _ in range(ranks)]
    nodes: list[Node] = [(0, leaves)] if leaves else []
    while nodes:
        node = max(nodes, key=lambda n: (n[1] - n[0], -n[0]))
        nodes.remove(node)
        size = node[1] - node[0]
        fitting = [rank for rank in range(ranks) if room[rank] >= size]
        if not fitting:
            nodes.extend(children(node))
            continue
        rank = min(fitting, key=lambda r: (room[r], r))
        mine[rank].append(node)
        room[rank] -= size
    # In the order of their first leaves: rank 0 has micro-batch 0.
    return tuple(sorted((tuple(sorted(held)) for held in mine), key=lambda held: held[:1] or ((leaves, leaves),)))


def traffic(leaves: int, ranks: int) -> float:
    """Return the bytes that the busiest rank sends with one reduction a step, relative to a plain all-reduce.

    Half of an all-reduce brings together partial sums, of which a rank has one for each of its nodes; the other half
    hands out the result. So 1 on 2ⁿ ranks.
    """
    return (max(map(len, tree_assignment(leaves, ranks))) + 1) / 2


def leaves_of(nodes: Iterable[Node]) -> list[int]:
    """Return the micro-batches in `nodes`, in order."""
    return sorted(index for lo, hi in nodes for index in range(lo, hi))


def nodes_that_cover(indices: Set[int], leaves: int) -> list[Node]:
    """Return the fewest nodes that have these leaves and no others."""

    def within(node: Node) -> list[Node]:
        held = indices & set(range(*node))
        if len(held) == node[1] - node[0]:
            return [node]
        return [inner for child in children(node) for inner in within(child)] if held else []

    return within((0, leaves))


def assign_tree(micro_batches: int, rank: int, ranks: int, *, even: bool = False) -> list[tuple[int, bool]]:
    """Return (index, real) of what a rank runs with one reduction a step; one dummy if it has no micro-batch.

    Args:
        even: the same number on each rank, for collectives in each micro-batch; ranks with fewer run dummies at the
            end.
    """
    assignment = tree_assignment(micro_batches, ranks)
    mine = leaves_of(assignment[rank])
    least = max(len(leaves_of(nodes)) for nodes in assignment) if even else 1
    dummies = [(mine[-1] if mine else 0, False)] * (least - len(mine))
    return [(index, True) for index in mine] + dummies


def assign_hybrid(
    micro_batches: int, replica: int, replicas: int, shard: int, shards: int, *, even: bool = False
) -> list[tuple[int, bool]]:  # fmt: skip
    """Return (index, real) of what a rank runs where shards reduce each micro-batch and replicas once a step.

    A replica runs nodes of the tree; each of its shards runs every `shards`-th micro-batch of them, and shards with
    fewer run a dummy at the end.

    Args:
        even: the same number on each replica.
    """
    assignment = tree_assignment(micro_batches, replicas)
    mine = leaves_of(assignment[replica])
    most = max(len(leaves_of(nodes)) for nodes in assignment) if even else len(mine)
    rounds = max(1, -(-most // shards))
    places = [shard + round_ * shards for round_ in range(rounds)]
    return [(mine[place], True) if place < len(mine) else (mine[0] if mine else 0, False) for place in places]


def assign_in_groups(micro_batches: int, rank: int, ranks: int, groups: int) -> list[tuple[int, bool]]:
    """Return (index, real) of what a rank runs where all reduce each micro-batch, and each group runs whole nodes."""
    group, place = divmod(rank, ranks // groups)
    return assign_hybrid(micro_batches, group, groups, place, ranks // groups, even=True)


class Partials:
    """Partial sums of one step's leaves, added as soon as both sides of an addition are present.

    Args:
        leaves: micro-batches in the step, over all ranks.
    """

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self._held: dict[Node, Values] = {}

    @torch.no_grad()
    def add(self, index: int, values: Values, *, owned: bool = True) -> None:
        """Add the leaf of one micro-batch.

        Args:
            index: of the micro-batch in the step.
            values: its gradients; always of the same parameters in the same order.
            owned: the tensors may be kept and written to. Else they are copied if they have to wait.
        """
        node = (index, index + 1)
        for at, other in path_to(index, self.leaves):
            assert at == node
            if other not in self._held:
                break
            # Which side is left does not matter: a + b = b + a, in every bit.
            values, owned = _added(self._held.pop(other), values, owned), True
            node = (min(at[0], other[0]), max(at[1], other[1]))
        assert node not in self._held, f"micro-batch {index} was added twice"
        self._held[node] = values if owned else [None if v is None else v.clone() for v in values]

    @torch.no_grad()
    def put(self, node: Node, values: Values) -> None:
        """Hold the sum of a whole node, computed elsewhere."""
        assert node not in self._held
        self._held[node] = values

    @torch.no_grad()
    def take(self, node: Node) -> Values | None:
        """Remove and return the sum of `node`; None if none of its leaves was added. Missing leaves are left out."""
        if node in self._held:
            return self._held.pop(node)
        if node[1] - node[0] < 2 or not any(node[0] <= lo and hi <= node[1] for lo, hi in self._held):
            return None
        left, right = (self.take(child) for child in children(node))
        if left is None or right is None:
            return right if left is None else left
        return _added(left, right, True)

    def total(self) -> Values | None:
        """Remove and return the sum over the step."""
        return self.take((0, self.leaves))

    def move_out(self, places: Sequence[int]) -> "Partials":
        """Move what is held for some of the parameters to an object of its own, and return it."""
        moved = Partials(self.leaves)
        for node, values in self._held.items():
            moved._held[node] = [values[place] for place in places]
            for place in places:
                values[place] = None
        return moved

    def __len__(self) -> int:
        return len(self._held)


def _added(into: Values, values: Values, owned: bool) -> Values:
    """Return into + values, added in place."""
    both = [i for i, (a, b) in enumerate(zip(into, values, strict=True)) if a is not None and b is not None]
    if both:
        foreach.add_([into[i] for i in both], [values[i] for i in both])  # type: ignore[misc]
    for i, (a, b) in enumerate(zip(into, values, strict=True)):
        if a is None and b is not None:
            into[i] = b if owned else b.clone()
    return into


@torch.no_grad()
def clear_zero_signs(gradients: Sequence[Tensor]) -> None:
    """Give every zero of the step's gradients the sign +, in place: what a missing leaf may have changed."""
    if gradients:
        foreach.add_(list(gradients), 0.0)


class TreeReduceScatter:
    """A reduce-scatter under way. Every rank of the group makes the same calls in the same order.

    Args:
        rows: this rank's nodes' sums, [W, share] each: row w is rank w's share. In the order of
            `tree_assignment(leaves, W)[rank]`; None where all leaves of a node are missing.
        like: of the dtype and on the device of the sums.
        share: elements that each rank gets.
        leaves: micro-batches in the step.
        nodes: of each rank; unset: `tree_assignment(leaves, W)`.
    """

    def __init__(
        self, rows: Sequence[Tensor | None], like: Tensor, share: int, leaves: int, group: dist.ProcessGroup,
        nodes: Nodes | None = None,
    ) -> None:  # fmt: skip
        self._leaves = leaves
        self._nodes: Nodes = tree_assignment(leaves, group.size()) if nodes is None else nodes
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
        """Wait for the all-to-all, and return the sum of this rank's share, [share]."""
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
    """An all-reduce under way. Every rank of the group makes the same calls in the same order.

        started = TreeAllReduce(...)      the all-to-all runs
        started.fold()                    waits for it, adds, and starts the all-gather
        started.finish(out)               waits for that, and writes the sum

    Args:
        sums: this rank's nodes' sums, flat, of one size on all ranks, as for `TreeReduceScatter`.
        like: a flat tensor of that size, dtype and device.
        leaves: micro-batches in the step.
        nodes: as for `TreeReduceScatter`.
    """

    def __init__(
        self, sums: Sequence[Tensor | None], like: Tensor, leaves: int, group: dist.ProcessGroup,
        nodes: Nodes | None = None,
    ) -> None:  # fmt: skip
        self._size = _segment(like, group)
        cut = [None if value is None else torch.split(value, self._size) for value in sums]
        self._segments = [
            _Segment([None if values is None else values[place] for values in cut], part, leaves, group, nodes)
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
    """Return the number of elements that are sent at once."""
    if like.device.type != "cpu":
        return max(1, like.numel())  # NCCL cuts messages itself
    return max(1, MESSAGE // like.element_size()) * group.size()


class _Segment:
    """A slice of a `TreeAllReduce` that is sent at once."""

    def __init__(
        self, sums: Sequence[Tensor | None], like: Tensor, leaves: int, group: dist.ProcessGroup, nodes: Nodes | None
    ) -> None:
        self._group = group
        share = -(-like.numel() // group.size())
        rows = [None if value is None else in_rows(value, group.size(), share) for value in sums]
        self._scatter = TreeReduceScatter(rows, like, share, leaves, group, nodes)

    def fold(self) -> None:
        self._total = self._scatter.finish()
        self._gathered = self._total.new_empty(self._total.numel() * self._group.size())
        self._work = all_gather_flat(self._gathered, self._total, group=self._group, async_op=True)

    def finish(self, out: Tensor) -> None:
        self._work.wait()
        out.copy_(self._gathered[: out.numel()])
        del self._gathered, self._total


def tree_all_reduce(
    sums: Sequence[Tensor | None], out: Tensor, leaves: int, group: dist.ProcessGroup, nodes: Nodes | None = None
) -> None:
    """Write the sum over the step of one flat tensor to `out`, from its sums over this rank's nodes."""
    reduce = TreeAllReduce(sums, out, leaves, group, nodes)
    reduce.fold()
    reduce.finish(out)


def in_rows(value: Tensor, rows: int, share: int) -> Tensor:
    """Return a flat tensor as [rows, share], with zeros at its end."""
    if value.numel() < rows * share:
        value = F.pad(value, (0, rows * share - value.numel()))
    return value.view(rows, share)
