"""Lists GPUs and links with their makers' figures and sources.

The time of collectives is computed from them.

Peaks are dense (without sparsity), in TFLOP/s; memory in GiB as sold; bandwidths in GB/s (10⁹
bytes), of links in one direction and per GPU.

Collectives have alpha-beta costs on a network of two levels, links inside of nodes and between
them. A collective over several nodes runs as rings over all GPUs, one for each network card of a
node: traffic between two nodes is spread over the cards, and both levels work at once, so the
slower one decides. Each of a ring's steps costs one latency. Source: Thakur et al. 2005,
"Optimization of Collective Communication Operations in MPICH".

Tests: tests/plan/test_published.py, tests/plan/test_resources.py
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from lockstep.errors import UsageError

_NOTHING: Mapping[str, int] = {}


class Cost(NamedTuple):
    """Work of an operation."""

    # floating-point operations in bf16 or fp16, by the formulas of torch.utils.flop_counter
    low: int = 0
    full: int = 0  # the same in fp32
    # bytes read and written by operations without a formula: they are bound by memory bandwidth
    moved: int = 0
    # name of an axis → bytes that a rank sends along it, and waits for
    sent: Mapping[str, int] = _NOTHING

    def plus(self, other: "Cost") -> "Cost":
        """Return the sum of both costs."""
        sent = self.sent or other.sent
        if self.sent and other.sent:
            sent = {
                axis: self.sent.get(axis, 0) + other.sent.get(axis, 0)
                for axis in {**self.sent, **other.sent}
            }
        return Cost(self.low + other.low, self.full + other.full, self.moved + other.moved, sent)

    def with_sent_of(self, passes: "Sequence[Cost]") -> "Cost":
        """Return it with the mean of what several passes send: some send for the next one, too."""
        axes = dict.fromkeys(axis for one in passes for axis in one.sent)
        sent = {
            axis: round(sum(one.sent.get(axis, 0) for one in passes) / len(passes)) for axis in axes
        }
        return self._replace(sent=sent or _NOTHING)

    def grown(self, once: "Cost", everything: "Cost") -> "Cost":
        """Return it, each number larger by as much as `everything` is larger than `once`."""

        def larger(of_this: int, of_one: int, of_all: int) -> int:
            return round(of_this * of_all / max(1, of_one))

        return Cost(
            larger(self.low, once.low, everything.low),
            larger(self.full, once.full, everything.full),
            larger(self.moved, once.moved, everything.moved),
            {
                axis: larger(size, once.sent.get(axis, 0), everything.sent.get(axis, 0))
                for axis, size in self.sent.items()
            },
        )

    @property
    def flops(self) -> int:
        """All floating-point operations."""
        return self.low + self.full


GIB = 2**30
# fraction of a GPU's memory for CUDA's context, kernels' workspaces and fragmentation
RESERVED = 0.08


@dataclass(frozen=True)
class Link:
    """A link between GPUs."""

    name: str
    bandwidth: float  # GB/s per GPU and direction
    # seconds for an empty message, including software: an estimate, not from a data sheet
    latency: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """A GPU model."""

    name: str
    memory: float  # GiB
    # half, single: TFLOP/s of matrix products in bf16 or fp16, and in fp32 without TF32
    half: float
    single: float
    bandwidth: float  # GB/s of its memory
    inside: str  # name of the link between GPUs of a node
    source: str
    has_bf16: bool = True  # whether it computes in bf16; else `half` is for fp16 alone
    # fraction of `half` and `single` that training reaches in matrix products, between
    # communication
    products: float = 0.6

    @property
    def tf32(self) -> float:
        """TFLOP/s of matrix products in fp32 with TF32.

        On GPUs that have it, it is half of those in bf16.
        """
        return self.half / 2 if self.has_bf16 else self.single


_GPUS = (
    Gpu(
        "V100-16GB", 16, 125, 15.7, 900, "NVLink 2", "NVIDIA V100 data sheet, SXM2", has_bf16=False
    ),
    Gpu(
        "V100-32GB", 32, 125, 15.7, 900, "NVLink 2", "NVIDIA V100 data sheet, SXM2", has_bf16=False
    ),
    Gpu("T4", 16, 65, 8.1, 320, "PCIe 3", "NVIDIA T4 data sheet", has_bf16=False),
    Gpu(
        "A100-40GB", 40, 312, 19.5, 1555, "NVLink 3", "NVIDIA A100 data sheet, SXM4", products=0.70
    ),
    Gpu(
        "A100-80GB", 80, 312, 19.5, 2039, "NVLink 3", "NVIDIA A100 data sheet, SXM4", products=0.70
    ),
    Gpu("A40", 48, 149.7, 37.4, 696, "PCIe 4", "NVIDIA A40 data sheet"),
    Gpu("A10", 24, 125, 31.2, 600, "PCIe 4", "NVIDIA A10 data sheet"),
    Gpu(
        "L4",
        24,
        121,
        30.3,
        300,
        "PCIe 4",
        "NVIDIA L4 data sheet (half of its figures with sparsity)",
    ),
    Gpu("L40", 48, 181, 90.5, 864, "PCIe 4", "NVIDIA L40 data sheet"),
    Gpu("L40S", 48, 362, 91.6, 864, "PCIe 4", "NVIDIA L40S data sheet"),
    Gpu("RTX-3080-Ti", 12, 68.2, 34.1, 912, "PCIe 4", "NVIDIA GA102 whitepaper, fp32 accumulation"),
    Gpu("RTX-3090", 24, 71, 35.6, 936, "PCIe 4", "NVIDIA GA102 whitepaper, fp32 accumulation"),
    Gpu("RTX-4090", 24, 165.2, 82.6, 1008, "PCIe 4", "NVIDIA Ada whitepaper, fp32 accumulation"),
    Gpu("H100", 80, 989.4, 66.9, 3350, "NVLink 4", "NVIDIA H100 data sheet, SXM5", products=0.55),
    Gpu("H100-PCIe", 80, 756, 51, 2000, "PCIe 5", "NVIDIA H100 data sheet, PCIe", products=0.55),
    Gpu("H100-NVL", 94, 835, 60, 3900, "NVLink 4", "NVIDIA H100 data sheet, NVL", products=0.55),
    Gpu("H200", 141, 989.4, 66.9, 4800, "NVLink 4", "NVIDIA H200 data sheet, SXM5", products=0.55),
    Gpu("B200", 180, 2250, 75, 8000, "NVLink 5", "NVIDIA Blackwell data sheet, HGX B200"),
    Gpu("MI300X", 192, 1307.4, 163.4, 5300, "Infinity Fabric 3", "AMD Instinct MI300X data sheet"),
)

_LINKS = (
    Link("NVLink 2", 150, 5e-6, "NVIDIA V100 data sheet: 300 GB/s both ways"),
    Link("NVLink 3", 300, 5e-6, "NVIDIA A100 data sheet: 600 GB/s both ways"),
    Link("NVLink 4", 450, 5e-6, "NVIDIA H100 data sheet: 900 GB/s both ways"),
    Link("NVLink 5", 900, 5e-6, "NVIDIA Blackwell data sheet: 1.8 TB/s both ways"),
    Link("Infinity Fabric 3", 448, 5e-6, "AMD MI300X data sheet: 7 links of 128 GB/s both ways"),
    Link("PCIe 3", 15.75, 1e-5, "PCI-SIG: 8 GT/s × 16 lanes, 128b/130b"),
    Link("PCIe 4", 31.5, 1e-5, "PCI-SIG: 16 GT/s × 16 lanes, 128b/130b"),
    Link("PCIe 5", 63.0, 1e-5, "PCI-SIG: 32 GT/s × 16 lanes, 128b/130b"),
    Link("InfiniBand EDR", 12.5, 1.5e-5, "InfiniBand roadmap: 100 Gbit/s, a card a GPU"),
    Link("InfiniBand HDR", 25.0, 1.5e-5, "InfiniBand roadmap: 200 Gbit/s, a card a GPU"),
    Link("InfiniBand NDR", 50.0, 1.5e-5, "InfiniBand roadmap: 400 Gbit/s, a card a GPU"),
    Link("InfiniBand XDR", 100.0, 1.5e-5, "InfiniBand roadmap: 800 Gbit/s, a card a GPU"),
    Link("RoCE 400G", 50.0, 2e-5, "IEEE 802.3bs: 400 Gbit/s, a card a GPU"),
    Link("Ethernet 400G", 50.0, 3e-5, "IEEE 802.3bs: 400 Gbit/s, a card a GPU"),
    Link("Ethernet 100G", 12.5, 3e-5, "IEEE 802.3ba: 100 Gbit/s, a card a GPU"),
    Link("Ethernet 25G", 3.125, 5e-5, "IEEE 802.3by: 25 Gbit/s, a card a GPU"),
    Link("Ethernet 10G", 1.25, 5e-5, "IEEE 802.3ae: 10 Gbit/s, a card a GPU"),
    Link("Ethernet 1G", 0.125, 1e-4, "IEEE 802.3ab: 1 Gbit/s, a card a GPU"),
)
T = TypeVar("T")
GPUS = {gpu.name: gpu for gpu in _GPUS}
LINKS = {link.name: link for link in _LINKS}


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the makers' figures that are reached in practice.

    They are those of torchtitan's published runs (`benchmarks.published_figures`).
    """

    memory: float = 0.80  # of the memory's bandwidth, in operations bound by it
    # of the bytes that such operations move one by one, those that fused kernels move
    fused: float = 0.45
    links: float = 0.70  # of the links' bandwidth


@dataclass(frozen=True)
class GpuCluster:
    """Nodes of equal GPUs."""

    gpu: Gpu
    num_gpus: int
    per_node: int
    inside: Link
    between: Link  # the link between nodes; every GPU has its own
    efficiency: Efficiency = Efficiency()

    @property
    def usable_memory(self) -> float:
        """Bytes of a GPU available to tensors."""
        return self.gpu.memory * GIB * (1 - RESERVED)

    def seconds(self, cost: Cost) -> float:
        """Return the seconds that one GPU computes."""
        e = self.efficiency
        products = (cost.low / self.gpu.half + cost.full / self.gpu.single) / (
            1e12 * self.gpu.products
        )
        return products + cost.moved * e.fused / (self.gpu.bandwidth * 1e9 * e.memory)

    def of_batch_groups(self, ranks: int) -> "GpuCluster":
        """Return the cluster whose members are groups of `ranks` neighbours.

        Each group works on the same micro-batches.
        """
        return replace(
            self, num_gpus=max(1, self.num_gpus // ranks), per_node=max(1, self.per_node // ranks)
        )


def cluster_of(
    num_gpus: int, gpu: str, interconnect: str | None = None, *, per_node: int = 8
) -> GpuCluster:
    """Return a cluster from names as people write them.

    Raises UsageError: one is unknown, or a number is below 1.
    """
    for name, number in (("number of GPUs", num_gpus), ("number of GPUs a node", per_node)):
        if number < 1:
            raise UsageError(
                f"a {name} of {number} makes no cluster", fix="write a number from 1 on"
            )
    device = find_gpu(gpu)
    inside = LINKS[device.inside]
    between = LINKS["InfiniBand NDR"] if num_gpus > per_node else inside
    if interconnect:
        between = _find(interconnect, LINKS, "link")
    return GpuCluster(device, num_gpus, min(per_node, num_gpus), inside, between)


def known_gpu(device_name: str) -> Gpu | None:
    """Return the entry for a driver's name: "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"."""
    # whole words: an "NVIDIA L40" is not an L4
    words = set(re.findall(r"\w+", device_name.lower()))
    fitting = [gpu for gpu in _GPUS if words.issuperset(gpu.name.lower().split("-"))]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)


def find_gpu(name: str) -> Gpu:
    """Return the entry for a name as people write it: "a100", "RTX 4090".

    Raises UsageError: there is none.
    """
    return _find(name, GPUS, "GPU")


def _plain(name: str) -> str:
    letters = "".join(letter for letter in name.lower() if letter.isalnum())
    return letters.removeprefix("nvidia").removesuffix("gb")


def _find(name: str, table: dict[str, T], what: str) -> T:
    plain = {_plain(key): key for key in table}
    wanted = _plain(name)
    starts = [key for short, key in plain.items() if short.startswith(wanted)]
    if wanted in plain or starts:
        return table[plain.get(wanted) or starts[-1]]
    near = difflib.get_close_matches(wanted, plain, n=1)
    guess = f"; did you mean {plain[near[0]]!r}?" if near else ""
    raise UsageError(
        f"there is no {what} {name!r} in the table{guess}", fix=f"write one of {', '.join(table)}"
    )


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, on a cluster."""

    cluster: GpuCluster
    size: int  # number of ranks
    local: int  # number of them in one node

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.size // self.local)

    def moved(self, whole: float) -> float:
        """Return the seconds to move `whole` bytes to every rank from their shards.

        The reverse takes as long.
        """
        c = self.cluster
        inside = (
            (self.local - 1) / self.local * whole / c.inside.bandwidth if self.local > 1 else 0.0
        )
        between = (
            (self.nodes - 1) / self.nodes * whole / (c.between.bandwidth * self.local)
            if self.nodes > 1
            else 0.0
        )
        return max(inside, between) / (1e9 * c.efficiency.links)

    def gather(self, whole: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter.

        The tensor has `whole` bytes before it is sharded.
        """
        if self.size == 1 or not whole:
            return 0.0
        c = self.cluster
        inside = (self.local - 1) * c.inside.latency
        # The library uses a tree if that has fewer steps.
        between = (
            min(self.nodes - 1, 2 * math.log2(max(2, self.nodes))) * c.between.latency
            if self.nodes > 1
            else 0.0
        )
        return inside + between + self.moved(whole)

    def all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes per rank.

        It is a reduce-scatter and an all-gather.
        """
        return 2 * self.gather(size)

    def all_to_all(self, sent: float) -> tuple[float, float, float]:
        """Return the costs of an all-to-all in which a rank sends each other one as much.

        They are (seconds, bytes inside of the node, bytes between nodes).
        """
        if self.size == 1:
            return 0.0, 0.0, 0.0
        c = self.cluster
        crossing = (self.size - self.local) / (self.size - 1) * sent
        seconds = max((sent - crossing) / c.inside.bandwidth, crossing / c.between.bandwidth)
        return seconds / (1e9 * c.efficiency.links), sent - crossing, crossing

    def bytes_sent(self, whole: float) -> tuple[float, float]:
        """Return the bytes that one rank sends in a `gather`.

        They are (over links inside of the node, between nodes).
        """
        if self.size == 1:
            return 0.0, 0.0
        in_all = (self.size - 1) / self.size * whole
        crossing = (self.nodes - 1) / self.nodes * whole / self.local if self.nodes > 1 else 0.0
        return in_all - crossing, crossing


def group_of(cluster: GpuCluster, size: int, stride: int = 1) -> Group:
    """Return a group of `size` ranks, each `stride` ranks from the next."""
    return Group(cluster, size, max(1, min(size, cluster.per_node // stride)))


def send(cluster: GpuCluster, size: float, stride: int) -> float:
    """Return the seconds of a message from one rank to another that is `stride` ranks away."""
    link = cluster.inside if stride < cluster.per_node else cluster.between
    return link.latency + size / (link.bandwidth * 1e9 * cluster.efficiency.links)
