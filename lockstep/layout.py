"""`Layout`: how many ranks stand along each axis of the mesh. Sizes only: nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.errors import UsageError

AXES = ("pipeline", "replicate", "shard")


@dataclass(frozen=True)
class Layout:
    """How micro-batches and parameters are laid over ranks.

    Attributes:
        strategy: its name, as `distributed.strategy` gives it.
        pipeline: ranks along the axis of that name; the next two likewise.
        workers: models that train by themselves, on ranks that share them out; 0 where all ranks train one.
        notice: what was chosen for the user, to be logged at the start.
        topology: the layout as people write it (`hybrid:2x2`).
    """

    strategy: str = "single"
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    workers: int = 0
    notice: str = field(default="", compare=False)
    topology: str = field(default="", compare=False)

    @property
    def world_size(self) -> int:
        """Return the number of all ranks."""
        return self.pipeline * self.replicate * self.shard

    @property
    def data_parallel_size(self) -> int:
        """Return among how many ranks (under a pipeline: pipelines) a step's micro-batches are shared out."""
        return self.replicate * self.shard

    @property
    def batch_shares(self) -> int:
        """Return into how many equal parts a step's samples go: data-parallel ranks, or workers."""
        return self.workers or self.data_parallel_size

    def __str__(self) -> str:
        return self.topology or f"{self.strategy} on {self.world_size} ranks"


def multiplied(strategy: str, sizes: Mapping[str, int], world_size: int, given: Mapping[str, int | None]) -> Layout:
    """Return the layout with these sizes, once they multiply to the number of ranks.

    Args:
        sizes: axis → ranks along it; axes left out have one.
        given: axis → what the config says of it, for the message.

    Raises:
        UsageError: they do not; the message shows the equation.
    """
    along = {axis: sizes.get(axis, 1) for axis in AXES}
    layout = Layout(strategy, along["pipeline"], along["replicate"], along["shard"])
    if layout.world_size != world_size:
        equation = " × ".join(f"{axis} {size}" for axis, size in along.items())
        said = ", ".join(f"{axis}_size={n}" for axis, n in given.items() if n) or "no sizes"
        raise UsageError(
            f"{equation} = {layout.world_size} ranks, but {world_size} were started",
            where="distributed",
            why=f"strategy {strategy} with {said}",
            fix=f"start {layout.world_size} ranks, or let the sizes multiply to {world_size}",
        )
    return layout
