"""How long collectives take: alpha-beta cost on a network of two levels, links inside of nodes and links between them.

A collective over several nodes runs as rings over all GPUs, one for each of a node's cards: what crosses between two
nodes is spread over the cards, and both levels work at once, so the slower one decides. Each of a ring's steps costs
one latency. Source of the costs: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

import math
from dataclasses import dataclass

from lockstep.costs.hardware import GpuCluster


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, on a cluster.

    Attributes:
        size: how many ranks.
        local: how many of them stand in one node.
    """

    cluster: GpuCluster
    size: int
    local: int

    @property
    def nodes(self) -> int:
        return max(1, self.size // self.local)

    def _moved(self, whole: float) -> float:
        """Seconds to move `whole` bytes to every rank that holds 1/size of them, or the other way round."""
        c = self.cluster
        inside = (self.local - 1) / self.local * whole / c.inside.bandwidth if self.local > 1 else 0.0
        between = (self.nodes - 1) / self.nodes * whole / (c.between.bandwidth * self.local) if self.nodes > 1 else 0.0
        return max(inside, between) / (1e9 * c.efficiency.links)

    def _latency(self) -> float:
        """Of one pass: the library takes a tree where that has fewer steps."""
        c = self.cluster
        inside = (self.local - 1) * c.inside.latency
        between = min(self.nodes - 1, 2 * math.log2(max(2, self.nodes))) * c.between.latency if self.nodes > 1 else 0.0
        return inside + between

    def gather(self, whole: float) -> float:
        """All-gather, or reduce-scatter, of `whole` bytes: the size of the unsharded tensor."""
        return 0.0 if self.size == 1 or not whole else self._latency() + self._moved(whole)

    def all_reduce(self, size: float) -> float:
        """Of `size` bytes on each rank: a reduce-scatter and an all-gather."""
        return 2 * self.gather(size)

    def bytes_sent(self, whole: float) -> tuple[float, float]:
        """Bytes that one rank sends in a `gather`: (over links inside of the node, between nodes)."""
        if self.size == 1:
            return 0.0, 0.0
        in_all = (self.size - 1) / self.size * whole
        crossing = (self.nodes - 1) / self.nodes * whole / self.local if self.nodes > 1 else 0.0
        return in_all - crossing, crossing


def group_of(cluster: GpuCluster, size: int, stride: int = 1) -> Group:
    """`size` ranks, each `stride` ranks from the next."""
    local = max(1, min(size, cluster.per_node // stride))
    return Group(cluster, size, local)


def send(cluster: GpuCluster, size: float, stride: int) -> float:
    """Seconds from one rank to another that is `stride` ranks away."""
    link = cluster.inside if stride < cluster.per_node else cluster.between
    return link.latency + size / (link.bandwidth * 1e9 * cluster.efficiency.links)
