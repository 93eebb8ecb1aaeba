"""The seam for strategies: what a strategy is to the rest of Lockstep, and the table of those that ship.

A strategy is one object: it says how it is written as a topology, how many ranks go along each axis of the mesh, what
contradicts it, how it places a model, what it costs, and what it cannot promise. Everything else asks the object and
names no strategy. One that ships is a file in `lockstep.parallel` and a line in `STRATEGIES`; one of the user's own is
a subclass of `Strategy` in any package, written `distributed.strategy: package.module:Name`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.costs.steps import replicated_step
from lockstep.errors import UsageError
from lockstep.layout import AXES, Layout, multiplied
from lockstep.registry import STRATEGIES
from lockstep.rules import Contradiction

if TYPE_CHECKING:
    import torch

    from lockstep.config import DistributedConfig, StepConfig
    from lockstep.costs.hardware import GpuCluster
    from lockstep.costs.steps import ModelSize, Pieces, StepTime
    from lockstep.parallel.parallel_model import ParallelModel
    from lockstep.parallel.placement import PlacementContext

AUTO = "auto"
SINGLE, REPLICAS = "single", "ddp"  # what `auto` means in Python: on one rank, and on several


class Strategy:
    """How micro-batches and parameters are laid over ranks. The defaults are those of plain replicas.

    A subclass needs only `place`. It is made without arguments, once in a process; what a run asks of it is in the
    config that each method is given.

    Attributes:
        name: as the config gives it; set when the strategy is loaded.
        topologies: the names that `--against` and tables know it by → the axes that the numbers after the colon are
            sizes of. Unset: the strategy's own name, with the number of replicas.
        values: a topology's name → further keys of the section `distributed` that it stands for.
        divides: axes that topologies written after `*` may fill, as in `pipeline:2*fsdp:2`.
        one_process: why it is for one process; empty where it runs on several.
        equal_bits: whether `distributed.reproducible` is offered.
        same_training: whether its steps are those of one process; `verify` compares no other.
        uses_threads: whether threads of one process run parts of a micro-batch.
        splits_model: whether a rank keeps only some of the model's modules.
        reduces_by_ddp: whether gradients are reduced by DistributedDataParallel, so that `distributed.ddp` applies.
        own_loops: whether `lockstep.place` offers it to loops of the user's own.
    """

    name: str = ""
    topologies: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    values: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    divides: ClassVar[frozenset[str]] = frozenset()
    one_process: ClassVar[str] = ""
    equal_bits: ClassVar[bool] = True
    same_training: ClassVar[bool] = True
    uses_threads: ClassVar[bool] = False
    splits_model: ClassVar[bool] = False
    reduces_by_ddp: ClassVar[bool] = False
    own_loops: ClassVar[bool] = True

    # ---- before ranks start ----

    def layout(self, config: "DistributedConfig", world_size: int, per_node: int) -> Layout:
        """Return how many ranks go along each axis.

        Args:
            config: sizes that are unset follow from the number of ranks.
            per_node: ranks on each machine.

        Raises:
            UsageError: the sizes do not multiply to the number of ranks.
        """
        sizes = {"replicate": config.replicate_size or world_size, "shard": config.shard_size or 1}
        return multiplied(self.name, sizes, world_size, given_sizes(config))

    def describe(self, layout: Layout) -> str:
        """Return the layout as people write it."""
        return f"{self.name}:{layout.world_size}"

    def contradictions(
        self, config: "StepConfig", layout: Layout | None = None, device_type: str | None = None
    ) -> Iterator[Contradiction]:
        """Yield what in the config contradicts this strategy.

        Args:
            layout, device_type: None while a config is loaded; known at placement.
        """
        yield from ()

    def instead_of_compression(self, kind: str) -> str | None:
        """Return what to write where `distributed.ddp.compression.kind` is set; None where that is well."""
        return None if self.reduces_by_ddp else "write kind: none, or strategy: ddp"

    # ---- on the ranks ----

    def on(self, layout: Layout) -> "Strategy":
        """Return the strategy that places the model on such ranks: on one rank there is nothing to exchange."""
        return self if layout.world_size > 1 else strategy_named(SINGLE)

    def place(self, placement: "PlacementContext") -> "ParallelModel":
        """Place a model on this rank.

        Args:
            placement: the model, keyed and transformed, with all that is known of the run.
        """
        raise NotImplementedError(f"{type(self).__name__}.place")

    def keys_random_numbers(self, device: "torch.device") -> bool:
        """Return whether the model's random numbers can be keyed, so that they are the same on any layout."""
        return True

    def cuts_parameters(self, layout: Layout) -> bool:
        """Return whether ranks hold parts of parameters."""
        return layout.shard > 1

    def casts_parameters(self, layout: Layout) -> bool:
        """Return whether `precision.param_dtype` is offered: parameters are cast as they are gathered."""
        return False

    def replicas(self, layout: Layout) -> int:
        """Return over how many ranks whole gradients are summed."""
        return layout.data_parallel_size

    def message_type(self, config: "StepConfig") -> str | None:
        """Return the type that gradients have on the link (`bf16`), None where nothing is rounded."""
        return config.distributed.ddp.compression.kind if self.reduces_by_ddp else None

    # ---- what it costs ----

    def layouts_to_plan(
        self, model: "ModelSize", config: "StepConfig", cluster: "GpuCluster"
    ) -> Iterator[dict[str, Any]]:
        """Yield the layouts that `lockstep plan` looks at on this cluster, as keys of the config.

        Args:
            model: of which the plan is made.
        """
        if cluster.num_gpus > 1 and config.distributed.strategy == self.name:
            yield {STRATEGIES.where: self.name}

    def layout_with_offload(self) -> dict[str, Any]:
        """Return the layout that needs least of a GPU's memory, moving state to the host; empty where there is none."""
        return {}

    def step_time(
        self, pieces: "Pieces", config: "StepConfig", layout: Layout, cluster: "GpuCluster", micro_batches: int
    ) -> "StepTime":
        """Return how long a step takes; replicas all-reduce fp32 gradients after the last backward pass.

        Args:
            pieces: of the model's step.
            micro_batches: on each rank.
        """
        whole = pieces.parameter_bytes
        return replicated_step(pieces, layout, cluster, micro_batches, sent=whole, bucket_bytes=whole)

    def further_state(self, config: "StepConfig", parameters: int) -> float:
        """Return bytes on each rank that outlive a step, besides parameters, gradients and optimizer state."""
        return 0.0

    # ---- what it promises ----

    def topologies_to_verify(self, config: "StepConfig") -> list[str]:
        """Return what `lockstep verify` compares, besides replicas and shards, when nothing is said."""
        return []


def given_sizes(config: "DistributedConfig") -> dict[str, int | None]:
    """Return what the config says of each axis."""
    return {axis: getattr(config, f"{axis}_size") for axis in AXES}


@cache
def strategy_named(name: str) -> Strategy:
    """Return the strategy that a config names.

    Raises:
        UsageError: there is none, or the name is that of something else.
    """
    found = STRATEGIES.load(name)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise UsageError(
            f"{name} is not a subclass of lockstep.strategy.Strategy",
            where=STRATEGIES.where,
            fix="name a class that is one, as package.module:Name",
        )
    strategy = found()
    strategy.name = name
    return strategy


def known_strategies(further: str = AUTO) -> list[Strategy]:
    """Return those that ship, and the one that a config names."""
    names = dict.fromkeys([*STRATEGIES.shipped, *([] if further == AUTO else [further])])
    return [strategy_named(name) for name in names]


def resolve(config: "DistributedConfig", world_size: int, local_world_size: int | None = None) -> Layout:
    """Return the layout that the config asks for on `world_size` ranks.

    Raises:
        UsageError: the sizes do not multiply out (the message shows the equation), or the strategy does not fit the
            ranks.
    """
    assert config.strategy != AUTO, "auto is resolved before a layout is made"
    strategy = strategy_named(config.strategy)
    if strategy.one_process and world_size > 1:
        raise UsageError(
            f"strategy {config.strategy} is for one process, but {world_size} were started",
            where=STRATEGIES.where,
            why=f"{world_size} processes would train {world_size} models, each on its own",
            fix="set distributed.strategy to ddp or fsdp, or start one process",
        )
    return named(strategy.layout(config, world_size, local_world_size or world_size))


def named(layout: Layout) -> Layout:
    """Return the layout with its topology as people write it."""
    return replace(layout, topology=strategy_named(layout.strategy).describe(layout))


def parse_topology(text: str) -> tuple[dict[str, Any], int]:
    """Read a topology as people write it: `single`, `ddp:2`, `hybrid:2x2`, `pipeline:2*fsdp:2`.

    A strategy of the user's own is written `package.module:Name:2`.

    Returns:
        values for the section `distributed`, and the number of ranks.

    Raises:
        UsageError: the text is not a topology.
    """
    wrong = UsageError(
        f"{text!r} is not a topology", fix="write single, ddp:2, fsdp:4, hybrid:2x2, pipeline:2 or pipeline:2*fsdp:2"
    )
    values: dict[str, Any] = {}
    ranks, may_fill = 1, frozenset(AXES)
    for place, part in enumerate(text.strip().split("*")):
        match = re.fullmatch(r"(.+?)(?::(\d+(?:x\d+)*))?", part.strip())
        if match is None:
            raise wrong
        name, sizes = match[1], [int(size) for size in (match[2] or "").split("x") if size]
        strategy = _strategy_of_topology(name)
        if strategy is None:
            raise wrong
        axes = _topologies(strategy)[name]
        if not sizes and len(axes) == 1:
            sizes = [1]
        if len(sizes) != len(axes) or not all(sizes) or not set(axes) <= may_fill or (place and not axes):
            raise wrong
        if not place:
            values = {"strategy": strategy.name, **strategy.values.get(name, {})}
        values |= {f"{axis}_size": size for axis, size in zip(axes, sizes, strict=True)}
        may_fill = strategy.divides if not place else frozenset()
        for size in sizes:
            ranks *= size
    return values, ranks


def _topologies(strategy: Strategy) -> Mapping[str, tuple[str, ...]]:
    return strategy.topologies if strategy.topologies is not None else {strategy.name: ("replicate",)}


def _strategy_of_topology(name: str) -> Strategy | None:
    known = [strategy_named(name)] if ":" in name else known_strategies()
    return next((strategy for strategy in known if name in _topologies(strategy)), None)
