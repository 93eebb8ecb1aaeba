"""Where ranks stand: pipeline × replicate × shard.

`resolve` is the one table from the config and the number of ranks to a `Layout`; `Layout.mesh` makes the device mesh.
The mesh is passed along, never global. Sizes that do not multiply out are an error that shows the equation.
A launcher asks for the layout before it starts ranks, so torch is loaded only where a mesh is made.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lockstep.config import DistributedConfig
from lockstep.environment import RankFacts
from lockstep.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pipeline", "replicate", "shard")
Strategy = Literal["single", "dp", "ddp", "fsdp", "pipeline", "accelerate", "diloco"]


@dataclass(frozen=True)
class Layout:
    """How micro-batches and parameters are laid over ranks."""

    strategy: Strategy = "single"
    pipeline: int = 1  # ranks along each axis
    replicate: int = 1
    shard: int = 1
    workers: int = 0  # under diloco: models that train by themselves, on ranks that share them out
    notice: str = ""  # what was chosen for the user, to be said at start

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self.replicate * self.shard

    @property
    def data_parallel_size(self) -> int:
        """Ranks among which a step's micro-batches are shared out; of pipelines, how many there are side by side."""
        return self.replicate * self.shard

    @property
    def batch_shares(self) -> int:
        """Into how many equal parts a step's samples are shared out: over data-parallel ranks, or diloco's workers."""
        return self.workers or self.data_parallel_size

    def __str__(self) -> str:
        if self.strategy in ("single", "dp"):
            return self.strategy
        if self.strategy == "accelerate":
            return f"accelerate:{self.replicate}"
        if self.strategy == "diloco":
            more = f" ({self.workers} workers)" if self.workers != self.replicate else ""
            return f"diloco:{self.replicate}{more}"
        data = self._data_part()
        if self.strategy == "pipeline":
            return f"pipeline:{self.pipeline}" + (f"*{data}" if self.data_parallel_size > 1 else "")
        return data

    def _data_part(self) -> str:
        if self.strategy == "ddp" or (self.shard == 1 and self.strategy == "pipeline"):
            return f"ddp:{self.replicate}"
        if self.replicate > 1 and self.shard > 1:
            return f"hybrid:{self.replicate}x{self.shard}"
        return f"fsdp:{self.replicate * self.shard}"

    def mesh(self, device_type: str) -> "DeviceMesh":
        """The device mesh with the axes `pipeline`, `replicate`, `shard`; needs an initialised process group."""
        from torch.distributed.device_mesh import init_device_mesh

        from lockstep.groups import once

        sizes = (self.pipeline, self.replicate, self.shard)
        return once(("mesh", device_type, sizes), lambda: init_device_mesh(device_type, sizes, mesh_dim_names=AXES))


def parse_topology(text: str) -> tuple[dict[str, Any], int]:
    """A topology as people write it (`single`, `ddp:2`, `fsdp:4`, `hybrid:2x2`, `pipeline:2*fsdp:2`).

    Returns:
        values for the `distributed` section, and the number of ranks.

    Raises:
        UsageError: the text is not a topology.
    """
    wrong = UsageError(
        f"{text!r} is not a topology", fix="write single, ddp:2, fsdp:4, hybrid:2x2, pipeline:2 or pipeline:2*fsdp:2"
    )
    parts = text.strip().split("*")
    values: dict[str, Any] = {}
    ranks = 1
    for place, part in enumerate(parts):
        match = re.fullmatch(r"(single|dp|ddp|fsdp|hybrid|pipeline|accelerate)(?::(\d+)(?:x(\d+))?)?", part.strip())
        if match is None:
            raise wrong
        name, first, second = match[1], int(match[2] or 1), int(match[3] or 1)
        misplaced = (place > 0) == (name == "pipeline") and len(parts) > 1
        if misplaced or (second != 1) != (name == "hybrid") or min(first, second) < 1:
            raise wrong
        ranks *= first * second
        if name == "pipeline":
            values |= {"strategy": "pipeline", "pipeline_size": first}
        elif name == "hybrid":
            values |= {"strategy": "fsdp", "replicate_size": first, "shard_size": second} | values
        elif name == "fsdp":
            values |= {"strategy": "fsdp", "shard_size": first} | values
        elif name == "ddp":
            values |= {"strategy": "ddp", "replicate_size": first} | values
        else:
            values |= {"strategy": name}
    return values, ranks


def resolve(config: DistributedConfig, world_size: int, local_world_size: int | None = None) -> Layout:
    """The layout for `world_size` ranks. One table; unset sizes follow from the world size, leftover ranks replicate.

    Raises:
        UsageError: the sizes do not multiply out (the equation is shown), or the strategy does not fit the ranks.
    """
    strategy = config.strategy
    assert strategy != "auto", "auto is resolved before a layout is made"
    if strategy in ("single", "dp"):
        if world_size > 1:
            raise UsageError(
                f"strategy {strategy} is for one process, but {world_size} were started",
                where="distributed.strategy",
                why=f"{world_size} processes would train {world_size} models, each on its own",
                fix="set distributed.strategy to ddp or fsdp, or start one process",
            )
        return Layout(strategy)
    sizes = (config.pipeline_size, config.replicate_size, config.shard_size)
    if strategy in ("ddp", "accelerate"):
        return _multiplied(strategy, 1, config.replicate_size or world_size, config.shard_size or 1, world_size, sizes)
    if strategy == "diloco":
        return _diloco(config, world_size)
    if strategy == "fsdp":
        return _fsdp(config, world_size, local_world_size or world_size)
    shard = config.shard_size or 1
    if config.pipeline_size:
        pipeline = config.pipeline_size
        replicate = config.replicate_size or max(1, world_size // (pipeline * shard))
    else:
        replicate = config.replicate_size or 1
        pipeline = max(1, world_size // (replicate * shard))
    return _multiplied("pipeline", pipeline, replicate, shard, world_size, sizes)


def layout_of(config: DistributedConfig, facts: RankFacts) -> Layout:
    """The layout that the config names, for the ranks that run; left to us (`auto`), replicas."""
    if config.strategy == "auto":
        config = config.model_copy(update={"strategy": "ddp" if facts.world_size > 1 else "single"})
    return resolve(config, facts.world_size, facts.local_world_size)


def _diloco(config: DistributedConfig, ranks: int) -> Layout:
    workers = config.diloco.workers or ranks
    asked = (config.pipeline_size, config.replicate_size, config.shard_size)
    if max(config.shard_size or 1, config.pipeline_size or 1) > 1:
        raise UsageError(
            "under diloco each worker's model is whole on one rank",
            where="distributed.shard_size, distributed.pipeline_size",
            fix="leave them out, or choose strategy fsdp or pipeline",
        )
    if workers % ranks:
        whole, rest = divmod(workers, ranks)
        raise UsageError(
            f"{workers} workers can't be shared out evenly among {ranks} ranks: {workers} = {whole} × {ranks} + {rest}",
            where="distributed.diloco.workers",
            fix=f"start {_less(workers, ranks)} ranks, or set workers to {(whole + 1) * ranks}",
        )
    layout = _multiplied("diloco", 1, config.replicate_size or ranks, 1, ranks, asked)
    return replace(layout, workers=workers)


def _less(workers: int, ranks: int) -> int:
    """The largest number of ranks, not above `ranks`, that divides the workers."""
    return next(n for n in range(min(workers, ranks), 0, -1) if workers % n == 0)


def _fsdp(config: DistributedConfig, world_size: int, local_world_size: int) -> Layout:
    kind = config.fsdp.sharding_strategy
    sizes = (config.pipeline_size, config.replicate_size, config.shard_size)
    notice = ""
    if kind == "no_shard":
        replicate, shard = config.replicate_size or world_size, config.shard_size or 1
    elif config.shard_size or config.replicate_size:
        shard = config.shard_size or max(1, world_size // (config.replicate_size or 1))
        replicate = config.replicate_size or max(1, world_size // shard)
    elif kind == "hybrid_shard":
        shard = local_world_size
        if shard == world_size:  # one node: one replica would be plain full_shard
            if world_size % 2:
                raise UsageError(
                    f"hybrid_shard can't split {world_size} ranks of one node into two replicas",
                    where="distributed.fsdp.sharding_strategy",
                    fix="use an even number of ranks, or full_shard",
                )
            shard = world_size // 2
            notice = f"hybrid_shard on one node: 2 replicas × {shard} shards (distributed.shard_size sets it)"
        replicate = world_size // shard
    else:
        replicate, shard = 1, world_size
    return _multiplied("fsdp", 1, replicate, shard, world_size, sizes, notice)


def _multiplied(
    strategy: Strategy, pipeline: int, replicate: int, shard: int, world_size: int,
    asked: tuple[int | None, int | None, int | None], notice: str = "",
) -> Layout:  # fmt: skip
    if pipeline * replicate * shard != world_size:
        given = ", ".join(f"{axis}_size={n}" for axis, n in zip(AXES, asked, strict=True) if n) or "no sizes"
        raise UsageError(
            f"pipeline {pipeline} × replicate {replicate} × shard {shard} = {pipeline * replicate * shard} ranks, "
            f"but {world_size} were started",
            where="distributed",
            why=f"strategy {strategy} with {given}",
            fix=f"start {pipeline * replicate * shard} ranks, or let the sizes multiply to {world_size}",
        )
    return Layout(strategy, pipeline, replicate, shard, notice=notice)


def local_chunk(full: "torch.Tensor", dim: int, size: int, coordinate: int) -> "torch.Tensor":
    """The piece of `full` that FSDP2 gives to `coordinate` of `size` ranks: `torch.chunk` along `dim`, maybe empty."""
    chunks = full.chunk(size, dim)
    if coordinate < len(chunks):
        return chunks[coordinate]
    return full.narrow(dim, 0, 0)
