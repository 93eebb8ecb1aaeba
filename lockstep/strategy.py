"""Defines the interface of strategies, and how their names and topologies are resolved.

A strategy is a list of axes, and says how ranks go along them and what they cost. Everything else
calls the object and names no strategy. A shipped one is a file in `lockstep.parallel` and a line in
`STRATEGIES`; a user's is a subclass of `Strategy` in any package, written `distributed.strategy:
package.module:Name`.

Tests: tests/process_group/test_mesh.py, tests/seams/test_strategy.py
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.costs.steps import replicated_step
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import SAME_BATCH, SIZED, Layout, layout_of_sizes
from lockstep.machine.environment import RankFacts, ranks_per_machine
from lockstep.registry import AXES, STRATEGIES, require_call, require_methods

if TYPE_CHECKING:
    import torch

    from lockstep.config import DistributedConfig, StepConfig
    from lockstep.costs.hardware import GpuCluster
    from lockstep.costs.steps import ModelSize, Pieces, StepTime
    from lockstep.parallel.axes.axis import Axis, Site
    from lockstep.parallel.parallel_model import ParallelModel

AUTO = "auto"
# the strategies of layouts without an axis that shares out micro-batches
TENSOR = "tensor"
CONTEXT = "context"
EXPERT = "expert"  # in a topology: how many of the ranks before it share out experts
# the meaning of `auto` in Python: on one rank, and on several
SINGLE = "single"
REPLICAS = "ddp"
# Sections of options under `distributed` → the strategies that read them.
OPTIONS_OF = {
    REPLICAS: (REPLICAS, "accelerate", "pipeline", TENSOR, CONTEXT, EXPERT),
    "fsdp": ("fsdp", "pipeline", TENSOR, CONTEXT, EXPERT),
    "pipeline": ("pipeline",),
    "accelerate": ("accelerate",),
    "diloco": ("diloco",),
}


class Strategy:
    """The distribution of micro-batches and parameters over ranks.

    The defaults are those of plain replicas.

    A subclass needs only `axes`, or `place`. It is created without arguments, once per process.
    """

    name: str = ""  # as in the config; set when the strategy is loaded
    # Its names in `--against` and tables → the axes whose sizes are the numbers after the colon;
    # None: its own name, with the number of replicas.
    topologies: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    # topology → further keys of `distributed` that it implies
    values: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # axes of topologies after `*`, as in `pipeline:2*fsdp:2`
    divides: ClassVar[frozenset[str]] = frozenset()
    # Of another package, whose axes stand in place of those that it divides: see `over`.
    replicas: "Strategy | None" = None
    # Its axes, in order: names of `lockstep.registry.AXES`, or package.module:Name of subclasses of
    # `lockstep.parallel.axes.axis.Axis`. None: its `place` does without.
    axes: ClassVar[tuple[str, ...] | None] = None
    # Where it has no axes: the names of those of `lockstep.registry.BY_SIZE` that it goes with.
    beside: ClassVar[frozenset[str]] = frozenset()
    one_process: ClassVar[str] = ""  # why it is for one process; empty if it runs on several
    equal_bits: ClassVar[bool] = True  # `distributed.reproducible` is supported
    # its steps are those of one process; `verify` compares no other
    same_training: ClassVar[bool] = True
    own_loops: ClassVar[bool] = True  # `lockstep.place` supports it in a user's own loop
    holds_parts: ClassVar[bool] = False  # of parameters, on whatever ranks: optimizers see these

    # ---- what its axes say ----

    @cached_property
    def kinds(self) -> "list[type[Axis]]":
        """The classes of its axes."""
        return [AXES.load(name) for name in self.axes or ()]

    def goes_with(self, axis: str) -> bool:
        """Return whether an axis that no strategy lists may have several ranks beside its own."""
        if not self.kinds:
            return axis in self.beside
        return all(axis in kind.goes_with for kind in self.kinds)

    @property
    def in_stages(self) -> bool:
        """Return whether a rank keeps only some of the model's modules."""
        return any(kind.in_stages for kind in self.kinds)

    @property
    def in_buckets(self) -> bool:
        """Return whether DistributedDataParallel reduces gradients: `distributed.ddp` applies."""
        return any(kind.in_buckets for kind in self.kinds)

    @property
    def in_threads(self) -> bool:
        """Return whether threads of one process run parts of a micro-batch."""
        return any(kind.in_threads for kind in self.kinds)

    # ---- before ranks start ----

    def layout(self, config: "DistributedConfig", world_size: int, per_node: int) -> Layout:
        """Return the number of ranks along each axis; unset sizes follow from the number of ranks.

        It raises a UsageError if the product of the sizes is not the number of ranks.
        """
        shard = config.shard_size or 1
        replicate = config.replicate_size or max(1, world_size // shard)
        sizes = {"replicate": replicate, "shard": shard}
        return layout_of_sizes(self.name, sizes, world_size, given_sizes(config))

    def describe(self, layout: Layout) -> str:
        """Return the layout as a topology; one whose name has no axes has no number."""
        return f"{self.name}:{layout.world_size}" if any(_topologies(self).values()) else self.name

    def contradictions(
        self, config: "StepConfig", layout: Layout | None = None
    ) -> Iterator[Contradiction]:
        """Yield the settings that contradict this strategy.

        `layout`: None while a config is loaded.
        """
        yield from ()

    def instead_of_compression(self, kind: str) -> str | None:
        """Return what to write if `distributed.ddp.compression.kind` is set.

        None if it is supported.
        """
        return None if self.in_buckets else "write kind: none, or strategy: ddp"

    def over(self, replicas: "Strategy", topology: str) -> "Strategy":
        """Return this strategy with the axes of another one for the ranks that it divides.

        A UsageError if they do not stand beside its own.
        """
        own = [name for name in self.axes or () if name not in self.divides]
        fits = replicas.kinds and all(set(own) <= kind.goes_with for kind in replicas.kinds)
        if not self.divides or not fits:
            what = f"{replicas.name} can't be the replicas of {topology}"
            why = f"it has no axes that go with {' and '.join(own) or self.name}"
            fix = (
                "write ddp:2, fsdp:2 or hybrid:2x2 there, or begin the topology with it; or give"
                f" it axes, whose goes_with names {' and '.join(own) or 'another'}"
            )
            raise UsageError(what, where="the topology", why=why, fix=fix)
        made = type(self)()
        made.name = f"{self.name}*{replicas.name}"
        made.axes = (*own, *(replicas.axes or ()))  # type: ignore[misc]
        made.replicas = replicas
        return made

    # ---- on the ranks ----

    def place(self, placement: "Site") -> "ParallelModel":
        """Place a model, to which random keys and transformations are applied, on this rank.

        A strategy that lists axes leaves this to them. It is not called where all ranks run each
        micro-batch together. `placement.dry_run` is set where `lockstep plan` places a model
        without values: collectives do nothing, and allocations are counted.
        """
        raise NotImplementedError

    @property
    def places_by_itself(self) -> bool:
        """Return whether it has a `place` of its own."""
        return type(self).place is not Strategy.place

    def keys_random_numbers(self, device: "torch.device") -> bool:
        """Return whether the model's random numbers can be keyed.

        Keyed numbers are the same on any layout.
        """
        return True

    def cuts_parameters(self, layout: Layout) -> bool:
        """Return whether ranks hold shards of parameters."""
        return layout.shard > 1

    def casts_parameters(self, layout: Layout) -> bool:
        """Return whether `precision.param_dtype` is supported.

        With it, parameters are cast when they are gathered.
        """
        return False

    def message_type(self, config: "StepConfig") -> str | None:
        """Return the type in which gradients are sent (`bf16`); None if they are not rounded."""
        return config.distributed.ddp.compression.kind if self.in_buckets else None

    # ---- what it costs ----

    def layouts_to_plan(
        self, model: "ModelSize", config: "StepConfig", cluster: "GpuCluster"
    ) -> Iterator[dict[str, Any]]:
        """Yield the layouts that `lockstep plan` considers on this cluster, as config keys."""
        if cluster.num_gpus > 1 and config.distributed.strategy == self.name:
            yield {STRATEGIES.where: self.name}

    def layout_with_offload(self) -> dict[str, Any]:
        """Return the layout with the least GPU memory and state offloaded to the host.

        It is empty if there is none.
        """
        return {}

    def step_time(
        self,
        pieces: "Pieces",
        config: "StepConfig",
        layout: Layout,
        cluster: "GpuCluster",
        micro_batches: int,
    ) -> "StepTime":
        """Return the time of a step: that of the first of its axes that has one.

        Else ranks compute, and all-reduce fp32 gradients after the last backward pass, unless its
        axes tell what they send.
        """
        for kind in self.kinds:
            step = kind.step_time(pieces, config, layout, cluster, micro_batches)
            if step is not None:
                return step
        gradients = pieces.parameter_bytes
        return replicated_step(
            pieces,
            layout,
            cluster,
            micro_batches,
            sent=0.0 if pieces.are_sent else gradients,
            bucket_bytes=gradients,
        )

    def further_state(self, config: "StepConfig", parameters: int) -> float:
        """Return the bytes of further state on each rank that outlives a step.

        Parameters, gradients and optimizer state are not counted.
        """
        return 0.0

    # ---- what it promises ----

    def topologies_to_verify(self, config: "StepConfig") -> list[str]:
        """Return the topologies that `lockstep verify` compares by default.

        Replicas and shards are compared besides them.
        """
        return []


def given_sizes(config: "DistributedConfig") -> dict[str, int | None]:
    """Return the config's size of each axis."""
    return {axis: getattr(config, f"{axis}_size") for axis in SIZED}


@cache
def strategy_named(name: str) -> Strategy:
    """Return the strategy that a config names.

    `pipeline*package.module:Name` is a pipeline whose replicas are another strategy's. A UsageError
    if it is none, or its methods do not fit.
    """
    outer, _, inner = name.partition("*")
    if inner:
        return strategy_named(outer).over(strategy_named(inner), outer)

    found = STRATEGIES.load(name)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        what = f"{name} is not a subclass of lockstep.strategy.Strategy"
        raise UsageError(
            what, where=STRATEGIES.where, fix="name a class that is one, as package.module:Name"
        )
    require_methods(found, Strategy, name, STRATEGIES.where)
    if found.axes is None and found.place is Strategy.place:
        fix = "write def place(self, placement), or axes = (…), the names of those that place it"
        raise UsageError(
            f"{name} has no method place, and no axes", where=STRATEGIES.where, fix=fix
        )
    require_call(
        found,
        (),
        name,
        STRATEGIES.where,
        fix="let __init__ take no arguments; each method gets the config",
    )
    strategy: Strategy = found()
    strategy.name = name
    return strategy


def known_strategies(further: str = AUTO) -> list[Strategy]:
    """Return the shipped strategies, and the one that a config names."""
    names = dict.fromkeys([*STRATEGIES.shipped, *([] if further == AUTO else [further])])
    return [strategy_named(name) for name in names]


def layout_of_ranks(config: "DistributedConfig", facts: RankFacts) -> Layout:
    """Return the layout that the config names for the running ranks.

    `auto` in Python means replicas.
    """
    if config.strategy == AUTO:
        config = config.model_copy(
            update={"strategy": REPLICAS if facts.world_size > 1 else SINGLE}
        )
    return resolve(config, facts.world_size, ranks_per_machine(facts))


def resolve(
    config: "DistributedConfig", world_size: int, local_world_size: int | None = None
) -> Layout:
    """Return the layout for the config on `world_size` ranks.

    A UsageError with the equation if it does not fit.
    """
    assert config.strategy != AUTO, "auto is resolved before a layout is made"
    strategy = strategy_named(config.strategy)
    if strategy.one_process and world_size > 1:
        what = f"strategy {config.strategy} is for one process, but {world_size} were started"
        why = f"{world_size} processes would train {world_size} models, each on its own"
        fix = "set distributed.strategy to ddp or fsdp, or start one process"
        raise UsageError(what, where=STRATEGIES.where, why=why, fix=fix)
    sizes: dict[str, Any] = {axis: getattr(config, f"{axis}_size") or 1 for axis in SAME_BATCH}
    if strategy.name in sizes and getattr(config, f"{strategy.name}_size") is None:
        sizes[strategy.name] = max(1, world_size // math.prod(sizes.values()))
    same_batch = math.prod(sizes.values())
    if world_size % same_batch:
        written = {f"{axis}_size": size for axis, size in sizes.items() if size > 1}
        product = " × ".join(f"{key}={size}" for key, size in written.items())
        what = f"{product} does not divide the number of ranks, {world_size}"
        fix = f"start a multiple of {same_batch} ranks, or write another size"
        raise UsageError(what, where=f"distributed.{next(iter(written))}", fix=fix)
    per_node = max(1, (local_world_size or world_size) // same_batch)
    layout = replace(strategy.layout(config, world_size // same_batch, per_node), **sizes)
    _refuse_unknown_axes(strategy, config, layout)
    size = config.expert_size or 1
    ranks = layout.data_parallel_size
    if ranks % size:
        what = f"expert_size={size} does not divide the data-parallel size, {ranks}"
        why = "experts are spread over ranks that share out the micro-batches"
        near = sorted(
            (each for each in range(1, ranks + 1) if ranks % each == 0),
            key=lambda each: abs(each - size),
        )
        fix = f"write expert_size: {' or '.join(map(str, sorted(near[:3])))}"
        raise UsageError(what, where="distributed.expert_size", why=why, fix=fix)
    layout = replace(layout, expert=size)
    parts = [f"{axis}:{sizes[axis]}" for axis in SAME_BATCH if sizes[axis] > 1]
    if not parts or not layout.is_one_group:
        parts.insert(0, strategy.describe(layout.alone()))
    if layout.expert > 1:
        parts.append(f"{EXPERT}:{layout.expert}")
    return replace(layout, topology="*".join(parts))


# axis → a strategy that has it, for advice
_HAVE = {"replicate": REPLICAS, "shard": "fsdp", "pipeline": "pipeline"}


def _refuse_unknown_axes(strategy: Strategy, config: "DistributedConfig", layout: Layout) -> None:
    """Refuse several ranks along an axis that a strategy does not have, or makes nothing of.

    They would share out micro-batches, and nobody would sum their gradients; or the size in the
    config would be passed over without a word.
    """
    divided = strategy.divides if strategy.replicas is None else ()
    named = {axis for axes in _topologies(strategy).values() for axis in axes}
    known = named | {*divided, *(strategy.axes or ())}
    for axis, instead in _HAVE.items():
        given = getattr(config, f"{axis}_size")
        size = getattr(layout, axis)
        fix = f"leave {axis}_size out, or write strategy: {instead}"
        where = f"distributed.{axis}_size"
        if size > 1 and axis not in known and axis != "replicate":
            what = (
                f"strategy {strategy.name} has no axis {axis}, along which there are {size} ranks"
            )
            why = "they would share out micro-batches, and nobody would sum their gradients"
            raise UsageError(what, where=where, why=why, fix=fix)
        if given not in (None, size):
            what = f"strategy {strategy.name} makes nothing of {axis}_size={given}"
            why = f"it has {size} rank{'s' * (size > 1)} along the axis {axis}, on these ranks"
            raise UsageError(what, where=where, why=why, fix=fix)


def parse_topology(text: str) -> tuple[dict[str, Any], int]:
    """Return the values for `distributed` and the number of ranks of a topology.

    A topology is like `pipeline:2*hybrid:2x2`.
    """
    wrong = UsageError(f"{text!r} is not a topology", fix=f"write {_near_topology(text)}")
    values: dict[str, Any] = {}
    ranks = 1
    may_fill = frozenset(SIZED)
    for position, part in enumerate(text.strip().split("*")):
        match = re.fullmatch(r"(.+?)(?::(\d+(?:x\d+)*))?", part.strip())
        if match is None:
            raise wrong
        name = match[1]
        sizes = [int(size) for size in (match[2] or "").split("x") if size]
        if (
            name == EXPERT
            and position
            and len(sizes) == 1
            and sizes[0]
            and "expert_size" not in values
        ):
            values["expert_size"] = sizes[0]
            continue
        if position and ":" in name:
            whole = strategy_named(values["strategy"])
            values["strategy"] = whole.over(strategy_named(name), text.partition("*")[0]).name
        known = [strategy_named(name)] if ":" in name else known_strategies()
        strategy = next((one for one in known if name in _topologies(one)), None)
        if strategy is None:
            raise wrong
        axes = _topologies(strategy)[name]
        if not sizes and len(axes) == 1:
            sizes = [1]
        if (
            len(sizes) != len(axes)
            or not all(sizes)
            or not set(axes) <= may_fill
            or (position and not axes)
        ):
            raise wrong
        if not position:
            values = {"strategy": strategy.name, **strategy.values.get(name, {})}
        values |= {f"{axis}_size": size for axis, size in zip(axes, sizes, strict=True)}
        may_fill = (may_fill if position else strategy.divides | {*SAME_BATCH}) - set(axes)
        ranks *= math.prod(sizes)
    return values, ranks


def _near_topology(text: str) -> str:
    """Return the parts with those first that others divide, or else some topologies."""
    divided = {name for one in known_strategies() if one.divides for name in _topologies(one)}
    parts = [part.strip() for part in text.split("*")]
    in_order = "*".join(sorted(parts, key=lambda part: part.partition(":")[0] not in divided))
    if in_order != "*".join(parts):
        return in_order
    return "single, ddp:2, fsdp:4, hybrid:2x2, pipeline:2 or pipeline:2*fsdp:2"


def _topologies(strategy: Strategy) -> Mapping[str, tuple[str, ...]]:
    return (
        strategy.topologies if strategy.topologies is not None else {strategy.name: ("replicate",)}
    )
