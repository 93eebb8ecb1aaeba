"""The sum over a step's micro-batches as one expression: a binary tree whose leaves are their gradients, in order.

Additions of floats do not associate, so a sum is the same in every bit only where it is the same expression. The tree
depends on M, the number of micro-batches in the step, and on nothing else: a *node* is a run of neighbours [lo, hi); a
run of more than one splits into halves, the first of which is the longer one where they differ.

    M = 7:   ((0+1) + (2+3)) + ((4+5) + 6)

Who adds what:

- one process adds leaves as they come. A sum is made as soon as both of its sides are there, so of K leaves at most
  ⌈log₂ K⌉ + 1 partial sums are held at any time (`Partials`);
- ranks that reduce once a step (ddp, replicas, pipelines × ddp) each run whole nodes (`tree_assignment`). On 2ⁿ ranks
  each runs exactly one, whatever M is, because the n-th level of the tree has 2ⁿ nodes whose sizes differ by one at
  most: one partial sum a rank is sent, as in any all-reduce. On 3, 5, 6 … ranks a rank may run several nodes, and each
  is sent (`lockstep.parallel.tree_reduce`);
- ranks that reduce each micro-batch (fsdp) run every S-th one, and the reduce-scatter brings a rank its shard of S
  neighbours at once. It adds them as one process would. So *any* number of shards adds up the tree, and sends no more.

**Missing leaves** (a zero-weight dummy; a parameter that a micro-batch did not use) are left out, or stand as +0 where
a buffer has a place for them. The two differ in the sign of a zero at most, and `finish` gives every zero the sign +.
A dummy's gradient is never added: 0 × inf is nan.

**Weights that several segments use** have one leaf a micro-batch all the same: the uses' gradients, added from the last
use to the first, which is what autograd does within one process. A pipeline hands that running sum from stage to stage,
each micro-batch (`lockstep.parallel.pipeline.trees`).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.torch_compat import foreach

Node = tuple[int, int]
"""A run [lo, hi) of micro-batches that the tree sums as one."""

Values = list[Tensor | None]
"""One partial sum for each parameter (or one flat tensor for all of them); None where nothing was added."""


def children(node: Node) -> tuple[Node, Node]:
    """The two nodes whose sum `node` is; it has two leaves or more."""
    lo, hi = node
    assert hi - lo > 1
    middle = lo + (hi - lo + 1) // 2
    return (lo, middle), (middle, hi)


def path_to(index: int, leaves: int) -> list[tuple[Node, Node]]:
    """From the leaf `index` up to the root: (node, what it is added to), for each addition on the way."""
    steps = []
    node = (0, leaves)
    while node[1] - node[0] > 1:
        left, right = children(node)
        node, other = (left, right) if index < right[0] else (right, left)
        steps.append((node, other))
    return steps[::-1]


@lru_cache(maxsize=256)
def tree_assignment(leaves: int, ranks: int) -> tuple[tuple[Node, ...], ...]:
    """For each rank the nodes that it runs: every leaf once, as even as can be, in few nodes (a greedy choice).

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
    """Bytes that the busiest of `ranks` ranks sends which reduce once a step, against a plain all-reduce.

    Half of an all-reduce brings together partial sums, of which a rank has one for each of its nodes; the other half
    hands out the result. So 1 on 2ⁿ ranks.
    """
    return (max(map(len, tree_assignment(leaves, ranks))) + 1) / 2


def leaves_of(nodes: Iterable[Node]) -> list[int]:
    """The micro-batches in `nodes`, in order."""
    return sorted(index for lo, hi in nodes for index in range(lo, hi))


def assign_tree(micro_batches: int, rank: int, ranks: int, *, even: bool = False) -> list[tuple[int, bool]]:
    """What one of `ranks` ranks runs that reduce once a step: (index, real); one dummy if it is left with nothing.

    Args:
        even: as many on each rank, because they meet in each: those that are short run dummies at the end.
    """
    assignment = tree_assignment(micro_batches, ranks)
    mine = leaves_of(assignment[rank])
    least = max(len(leaves_of(nodes)) for nodes in assignment) if even else 1
    dummies = [(mine[-1] if mine else 0, False)] * (least - len(mine))
    return [(index, True) for index in mine] + dummies


def assign_hybrid(
    micro_batches: int, replica: int, replicas: int, shard: int, shards: int
) -> list[tuple[int, bool]]:  # fmt: skip
    """What a rank runs where shards reduce each micro-batch and replicas once a step: (index, real).

    A replica runs nodes of the tree; each of its shards runs every `shards`-th micro-batch of them, and those that are
    left short run a dummy at the end.
    """
    mine = leaves_of(tree_assignment(micro_batches, replicas)[replica])
    rounds = max(1, -(-len(mine) // shards))
    places = [shard + round_ * shards for round_ in range(rounds)]
    return [(mine[place], True) if place < len(mine) else (mine[0] if mine else 0, False) for place in places]


class Partials:
    """Partial sums of one step's leaves, added up as soon as both sides of an addition are there.

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
        """The sum of `node`, no longer held; None if none of its leaves was added. Missing leaves are left out."""
        if node in self._held:
            return self._held.pop(node)
        if node[1] - node[0] < 2 or not any(node[0] <= lo and hi <= node[1] for lo, hi in self._held):
            return None
        left, right = (self.take(child) for child in children(node))
        if left is None or right is None:
            return right if left is None else left
        return _added(left, right, True)

    def total(self) -> Values | None:
        """The sum over the step, no longer held."""
        return self.take((0, self.leaves))

    def move_out(self, places: Sequence[int]) -> "Partials":
        """What is held for some of the parameters, on its own; it is no longer held here."""
        moved = Partials(self.leaves)
        for node, values in self._held.items():
            moved._held[node] = [values[place] for place in places]
            for place in places:
                values[place] = None
        return moved

    def __len__(self) -> int:
        return len(self._held)


def _added(into: Values, values: Values, owned: bool) -> Values:
    """into + values, in place of `into`."""
    both = [i for i, (a, b) in enumerate(zip(into, values, strict=True)) if a is not None and b is not None]
    if both:
        foreach.add_([into[i] for i in both], [values[i] for i in both])  # type: ignore[misc]
    for i, (a, b) in enumerate(zip(into, values, strict=True)):
        if a is None and b is not None:
            into[i] = b if owned else b.clone()
    return into


@torch.no_grad()
def finish(gradients: Sequence[Tensor]) -> None:
    """Give every zero of the step's gradients the sign +, in place: what a missing leaf may have changed."""
    if gradients:
        foreach.add_(list(gradients), 0.0)
