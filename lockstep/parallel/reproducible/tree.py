"""The sum over a step's micro-batches as one expression: a binary tree.

Its leaves are the micro-batches' gradients, in order.

Additions of floats do not associate:

    >>> a, b, c, d = torch.tensor([1e8, -1e8, 1.0, 1.0])
    >>> ((a + b) + (c + d)).item(), (((a + c) + b) + d).item()
    (2.0, 1.0)

so a sum is the same in every bit only where it is the same expression. The tree depends on M, the
number of micro-batches in the step, alone: a *node* is the neighbours [lo, hi); one of two or more
splits into halves, the first of which is the longer one where they differ. M = 7 is
((0+1)+(2+3)) + ((4+5)+6), whoever adds it up:

    >>> children((0, 7))
    ((0, 4), (4, 7))
    >>> children((4, 7))
    ((4, 6), (6, 7))

Ranks that reduce once a step (ddp, replicas, pipelines) run complete nodes: one each on 2ⁿ ranks,
because the n-th level of the tree has 2ⁿ nodes whose sizes differ by one at most. On other numbers
of ranks some run several. Ranks that reduce each micro-batch (fsdp) run every S-th one of a node.

    >>> tree_assignment(7, 2)
    (((0, 4),), ((4, 7),))
    >>> tree_assignment(6, 3)
    (((0, 2),), ((2, 3), (5, 6)), ((3, 5),))

Two ranks with a gradient of 24 numbers, [4, 6], and M = 7: rank 0 has added up (0, 4), rank 1
(4, 7). An all-to-all brings rank 0 the first 12 numbers of both sums, [2, 12], rank 1 the last 12.
Each adds (0, 4) + (4, 7), and an all-gather brings the halves together: the bytes of a ring
all-reduce, with additions whose order is known.

Missing leaves (a dummy; a parameter that a micro-batch did not use) are left out, or stand as +0
where a buffer has a place for them: the sign of a zero may differ, and `clear_zero_signs` makes it
+. A dummy's gradient is never added: 0 × inf is nan. Weights that several segments use have one
leaf a micro-batch, added from the last use to the first.

Tests: tests/parallel/reproducible/test_tree.py, tests/parallel/test_worked_examples.py
"""

from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.division import ceil_div
from lockstep.parallel.comm import MESSAGE, all_gather_flat
from lockstep.torch_compat import foreach

Node = tuple[int, int]  # the micro-batches [lo, hi), which the tree sums as one
Nodes = Sequence[Sequence[Node]]  # of each rank
# partial sums of each parameter (or of one flat tensor); None where nothing was added
Values = list[Tensor | None]


def children(node: Node) -> tuple[Node, Node]:
    """Return the two nodes that add up to `node`, which has two leaves or more."""
    lo, hi = node
    assert hi - lo > 1
    middle = lo + (hi - lo + 1) // 2
    return (lo, middle), (middle, hi)


def path_to(index: int, leaves: int) -> list[tuple[Node, Node]]:
    """Return (node, its sibling) for each addition from the leaf `index` up to the root.

    >>> path_to(4, 7)
    [((4, 5), (5, 6)), ((4, 6), (6, 7)), ((4, 7), (0, 4))]
    """
    additions = []
    node = (0, leaves)
    while node[1] - node[0] > 1:
        left, right = children(node)
        node, other = (left, right) if index < right[0] else (right, left)
        additions.append((node, other))
    return additions[::-1]


@lru_cache(maxsize=256)
def tree_assignment(leaves: int, ranks: int) -> tuple[tuple[Node, ...], ...]:
    """Return the nodes that each rank runs: every leaf once, as evenly as possible, in few nodes.

    One on 2ⁿ ranks. The largest node goes to the fullest rank that has room for it; one that fits
    nowhere is split.
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
    return tuple(
        sorted(
            (tuple(sorted(held)) for held in mine), key=lambda held: held[:1] or ((leaves, leaves),)
        )
    )


def leaves_of(nodes: Iterable[Node]) -> list[int]:
    """Return the micro-batches in `nodes`, in order."""
    return sorted(index for lo, hi in nodes for index in range(lo, hi))


def nodes_that_cover(indices: Set[int], leaves: int) -> list[Node]:
    """Return the fewest nodes that have these leaves and no others.

    >>> nodes_that_cover({0, 1, 2, 3, 6}, 7)
    [(0, 4), (6, 7)]
    """

    def within(node: Node) -> list[Node]:
        held = indices & set(range(*node))
        if len(held) == node[1] - node[0]:
            return [node]
        return [inner for child in children(node) for inner in within(child)] if held else []

    return within((0, leaves))


def nodes_of_owners(owners: Sequence[int], ranks: int) -> list[list[Node]]:
    """Return the nodes that cover what each rank has run.

    `owners`: of each micro-batch, its rank.
    """
    return [
        nodes_that_cover(
            {index for index, owner in enumerate(owners) if owner == rank}, len(owners)
        )
        for rank in range(ranks)
    ]


def assign_tree(
    micro_batches: int, rank: int, ranks: int, *, even: bool = False
) -> list[tuple[int, bool]]:
    """Return (index, real) of each micro-batch that a rank runs with one reduction a step.

    A rank without a micro-batch runs one dummy. With `even` all ranks run the same number, for
    collectives in each micro-batch; dummies come last.

    >>> [assign_tree(3, rank, 2, even=True) for rank in range(2)]
    [[(0, True), (1, True)], [(2, True), (2, False)]]
    """
    assignment = tree_assignment(micro_batches, ranks)
    mine = leaves_of(assignment[rank])
    least = max(len(leaves_of(nodes)) for nodes in assignment) if even else 1
    dummies = [(mine[-1] if mine else 0, False)] * (least - len(mine))
    return [(index, True) for index in mine] + dummies


def assign_in_groups(
    micro_batches: int, rank: int, ranks: int, groups: int, *, even: bool = False
) -> list[tuple[int, bool]]:
    """Return (index, real) of what a rank runs where the ranks of a group reduce each micro-batch.

    A group (a replica, of shards) runs nodes of the tree; each of its S ranks runs every S-th
    micro-batch of them, and those with fewer run a dummy at the end. With `even` it is the same
    number in each group. Seven micro-batches, two replicas of two shards:

    >>> [[index for index, real in assign_in_groups(7, rank, 4, 2) if real] for rank in range(4)]
    [[0, 2], [1, 3], [4, 6], [5]]
    """
    size = ranks // groups
    group, first = divmod(rank, size)
    assignment = tree_assignment(micro_batches, groups)
    mine = leaves_of(assignment[group])
    most = max(len(leaves_of(nodes)) for nodes in assignment) if even else len(mine)
    rounds = max(1, ceil_div(most, size))  # a group without a micro-batch runs one of dummies
    return [
        (mine[position], True) if position < len(mine) else (mine[0] if mine else 0, False)
        for position in range(first, rounds * size, size)
    ]


class Partials:
    """Partial sums of one step's `leaves` over all ranks.

    They are added as soon as both sides of an addition are present, in whichever order they come:

    >>> partials = Partials(4)
    >>> for index in (2, 0, 3):
    ...     partials.add(index, [torch.tensor(10.0**index)])
    >>> len(partials), partials.take((2, 4))
    (2, [tensor(1100.)])
    """

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self._held: dict[Node, Values] = {}

    @torch.no_grad()
    def add(self, index: int, values: Values, *, owned: bool = True) -> None:
        """Add a micro-batch's leaf, `values` of the same parameters in the same order each time.

        If they are `owned`, the tensors may be kept and written to. Else they are copied if they
        have to wait.
        """
        node = (index, index + 1)
        for at, other in path_to(index, self.leaves):
            assert at == node
            if other not in self._held:
                break
            # Which side is left does not matter: a + b = b + a, in every bit.
            values = _added(self._held.pop(other), values, owned)
            owned = True
            node = (min(at[0], other[0]), max(at[1], other[1]))
        assert node not in self._held, f"micro-batch {index} was added twice"
        self._held[node] = values if owned else [None if v is None else v.clone() for v in values]

    def put(self, node: Node, values: Values) -> None:
        assert node not in self._held
        self._held[node] = values

    @torch.no_grad()
    def take(self, node: Node) -> Values | None:
        """Remove and return the sum of `node`; None if none of its leaves was added.

        Missing leaves are left out.
        """
        if node in self._held:
            return self._held.pop(node)
        if node[1] - node[0] < 2 or not any(
            node[0] <= lo and hi <= node[1] for lo, hi in self._held
        ):
            return None
        left, right = (self.take(child) for child in children(node))
        if left is None or right is None:
            return right if left is None else left
        return _added(left, right, True)

    def held(self) -> list[Values]:
        """Return the sums of all nodes that are held, which stay here."""
        return list(self._held.values())

    def total(self) -> Values | None:
        return self.take((0, self.leaves))

    def single(self) -> Tensor:
        """Return the total of leaves of one tensor each, of which there is one at least."""
        [total] = self.total() or [None]
        assert total is not None
        return total

    def move_out(self, positions: Sequence[int]) -> "Partials":
        """Move what is held for some of the parameters to an object of its own, and return it."""
        moved = Partials(self.leaves)
        for node, values in self._held.items():
            moved._held[node] = [values[position] for position in positions]
            for position in positions:
                values[position] = None
        return moved

    def __len__(self) -> int:
        return len(self._held)


def _added(into: Values, values: Values, owned: bool) -> Values:
    """Add `values` to `into`, in place; where one of the two is missing, the other is the sum."""
    both = [
        i
        for i, (a, b) in enumerate(zip(into, values, strict=True))
        if a is not None and b is not None
    ]
    if both:
        foreach.add_([into[i] for i in both], [values[i] for i in both])  # type: ignore[misc]
    for i, (a, b) in enumerate(zip(into, values, strict=True)):
        if a is None and b is not None:
            into[i] = b if owned else b.clone()
    return into


@torch.no_grad()
def clear_zero_signs(gradients: Sequence[Tensor]) -> None:
    """Give every zero of the step's gradients the sign +, in place.

    A missing leaf may have changed the sign.
    """
    if gradients:
        foreach.add_(list(gradients), 0.0)


class TreeReduceScatter:
    """A reduce-scatter under way. Every rank of the group makes the same calls in the same order.

    Seven leaves on two ranks, nodes (0, 4) and (4, 7), a sum of 24 numbers: rank 0 gives rows
    [[2, 12]], rank 1 as well; each receives [2, 12], a row for each node, and returns [12].

    Args:
        rows: this rank's nodes' sums, [W, share] each, None where all leaves of a node are missing;
            row w is rank w's.
        like: of the dtype and on the device of the sums.
        nodes: of each rank, in order; unset: `tree_assignment(leaves, W)`.
    """

    def __init__(
        self,
        rows: Sequence[Tensor | None],
        like: Tensor,
        share: int,
        leaves: int,
        group: dist.ProcessGroup,
        nodes: Nodes | None = None,
    ) -> None:
        self._leaves = leaves
        self._nodes: Nodes = tree_assignment(leaves, group.size()) if nodes is None else nodes
        mine = len(rows)
        each = [len(nodes) for nodes in self._nodes]
        assert mine == each[group.rank()]
        # Zeros where all leaves of a node are missing: ranks must send what others expect. A sum
        # with +0 has other bits only if it is −0, which `clear_zero_signs` mends.
        self._sent = like.new_zeros(group.size(), mine, share)
        for number, values in enumerate(rows):
            if values is not None:
                self._sent[:, number].copy_(values)
        self._received = like.new_empty(sum(each), share)
        self._work: Any = dist.all_to_all_single(
            self._received.view(-1),
            self._sent.view(-1),
            [count * share for count in each],
            [mine * share] * group.size(),
            group=group,
            async_op=True,
        )

    def finish(self) -> Tensor:
        """Wait for the all-to-all, and return the sum of this rank's share, [share]."""
        self._work.wait()
        partials = Partials(self._leaves)
        nodes: list[Node] = [node for held in self._nodes for node in held]
        for node, values in zip(nodes, self._received, strict=True):
            partials.put(node, [values])
        del self._sent, self._received
        return partials.single().contiguous()


class TreeAllReduce:
    """An all-reduce under way. Every rank of the group makes the same calls in the same order.

        started = TreeAllReduce(...)      the all-to-all runs
        started.fold()                    waits for it, adds, and starts the all-gather
        started.finish(out)               waits for that, and writes the sum

    Args:
        sums: this rank's nodes' sums, flat, of one size on all ranks.
        like: a flat tensor of that size, dtype and device.
        leaves, nodes: as for `TreeReduceScatter`.
    """

    def __init__(
        self,
        sums: Sequence[Tensor | None],
        like: Tensor,
        leaves: int,
        group: dist.ProcessGroup,
        nodes: Nodes | None = None,
    ) -> None:
        self._group = group
        ranks = group.size()
        at_once = (
            MESSAGE // like.element_size() * ranks if like.device.type == "cpu" else like.numel()
        )
        self._size = max(1, at_once)  # elements that are sent at once; NCCL cuts messages itself
        self._scatters = []
        slices = [None if value is None else torch.split(value, self._size) for value in sums]
        for number, part in enumerate(torch.split(like, self._size)):
            share = ceil_div(part.numel(), ranks)
            filled = ranks * share - part.numel()  # with zeros, at the end
            parts = [None if values is None else values[number] for values in slices]
            if filled:
                parts = [None if values is None else F.pad(values, (0, filled)) for values in parts]
            rows = [None if values is None else values.view(ranks, share) for values in parts]
            self._scatters.append(TreeReduceScatter(rows, part, share, leaves, group, nodes))

    def fold(self) -> None:
        # works, with what they receive and send
        self._gathers: list[tuple[Any, Tensor, Tensor]] = []
        for scatter in self._scatters:
            total = scatter.finish()
            gathered = total.new_empty(total.numel() * self._group.size())
            work = all_gather_flat(gathered, total, group=self._group, async_op=True)
            self._gathers.append((work, gathered, total))
        self._scatters.clear()

    def finish(self, out: Tensor) -> None:
        for (work, gathered, _), part in zip(
            self._gathers, torch.split(out, self._size), strict=True
        ):
            work.wait()
            part.copy_(gathered[: part.numel()])
        self._gathers.clear()


def tree_all_reduce(
    sums: Sequence[Tensor | None],
    out: Tensor,
    leaves: int,
    group: dist.ProcessGroup,
    nodes: Nodes | None = None,
) -> None:
    """Write the step's sum of one flat tensor to `out`, from its sums over this rank's nodes."""
    reduce = TreeAllReduce(sums, out, leaves, group, nodes)
    reduce.fold()
    reduce.finish(out)
