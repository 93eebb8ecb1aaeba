"""`Axis`: what one axis of the mesh does to a model, from its layers to a step's final gradients.

A strategy is a list of axes. `place` goes through the list, and asks each axis the same questions,
in this order. It shows an axis the model once, by its site; the axis keeps what it needs later.

    contradictions      → settings that it does not go with, when a config is loaded and again here
    apply               → the axis on this rank, which has changed the layers; None: nothing to do
    apply_after_others  → what it changes once all others have changed theirs
    objective_of_parts  → how the loss is computed from parts
    local_piece         → what this rank keeps of a parameter's first value
    place_model         → the placed model, if this axis holds it: as stages, cut, or as a replica
    around_passes       → what stands around each pass of the model, or of one of its stages
    add_to_step_end     → the placed model with finishers, whole parameters, what a norm counts
    spread_names        → parameters of which replicas hold different pieces
    replica_groups      → ranks along the axis that hold the same, and are compared

and `lockstep plan`, of each class:

    step_time           → the time of a step, if it sends while it computes
    message_cost        → what the bytes that a rehearsal has counted cost on a cluster
    step_end_cost       → what is sent once a step

Those of the strategy come first, then those that any strategy may have, by their sizes
(`lockstep.registry.BY_SIZE`).

Tests: tests/parallel/axes/test_axes.py, tests/seams/test_axis.py
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize, Pieces, Sent, StepTime, all_reduced
from lockstep.data.batches import AssignAnyRank
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout
from lockstep.models.objective import Objective
from lockstep.parallel.execution.passes import AroundMicroBatch
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.site import Site as Site  # which `Strategy.place` is given, too
from lockstep.registry import AXES, BY_SIZE, require_call, require_methods


@dataclass(frozen=True)
class PartOfModel:
    """Holds the part of the model that this rank runs, and its source of micro-batches."""

    module: nn.Module  # the model, or a stage of it
    is_stage: bool
    assign: AssignAnyRank  # the micro-batches of any rank
    # what gradients are multiplied by where the reduction takes a mean
    scale: float = 1.0


class Axis:
    """An axis of one placed model, on this rank. What a subclass does not write, it does not do.

    It keeps its site for the questions that come after `apply`.
    """

    name: ClassVar[str]  # where it has a size: as in `distributed.{name}_size`
    # Of the axes of `BY_SIZE` and `pipeline`, the names of those beside which it works.
    goes_with: ClassVar[frozenset[str]] = frozenset()
    in_stages: ClassVar[bool] = False  # a rank keeps only some of the model's modules
    # DistributedDataParallel reduces gradients: `distributed.ddp` applies
    in_buckets: ClassVar[bool] = False
    in_threads: ClassVar[bool] = False  # threads of one process run parts of a micro-batch

    def __init__(self, site: Site) -> None:
        self.site = site

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        """Yield the settings that several ranks along the axis contradict.

        `layout`: None while a config is loaded.
        """
        yield from ()

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        """Change layers of the model in place, and return the axis on this rank.

        None where there is nothing to do: one rank along it, and no bits to keep.
        """
        raise NotImplementedError

    def apply_after_others(self) -> None:
        """Change what has to wait until all axes have changed their layers."""

    def objective_of_parts(self, objective: Objective) -> Objective:
        """Return an objective whose loss is that of whole batches, from this rank's part."""
        return objective

    def local_piece(self, name: str, value: Tensor) -> Tensor:
        """Return what this rank keeps of a parameter's value, in memory of its own."""
        return value

    def place_model(self) -> ParallelModel | None:
        """Return the placed model, if it is this axis that brings it to the device.

        One axis does, the first of the list that returns a model. Where none does, each rank holds
        all of it, and those that share out micro-batches run equally many.
        """
        return None

    def around_passes(self, part: PartOfModel) -> Sequence[AroundMicroBatch]:
        """Return what stands around each pass of the model, or of a stage, outermost first."""
        return ()

    def add_to_step_end(self, placed: ParallelModel) -> ParallelModel:
        """Return the placed model with what the axis adds to the end of a step.

        It may finish gradients, train whole parameters in place of pieces, and change what a norm
        counts. Each element of each gradient has to be counted once over all ranks.
        """
        return placed

    @property
    def spread_names(self) -> AbstractSet[str]:
        """Names of the parameters of which replicas hold different pieces."""
        return frozenset()

    def replica_groups(
        self, placed: ParallelModel
    ) -> Iterator[tuple[dist.ProcessGroup, AbstractSet[str]]]:
        """Yield groups whose ranks hold the same parameters, and the names of those left out."""
        yield from ()

    # ---- what it costs, for `lockstep plan` ----

    @classmethod
    def step_time(
        cls,
        pieces: Pieces,
        config: StepConfig,
        layout: Layout,
        cluster: GpuCluster,
        micro_batches: int,
    ) -> StepTime | None:
        """Return the time of a step, of an axis that sends while it computes; None: it waits."""
        return None

    @classmethod
    def message_cost(cls, size: float, layout: Layout, cluster: GpuCluster) -> Sent:
        """Return the seconds and the bytes on links of messages that a rank waits for.

        By default they are an all-reduce among the ranks that share out a step.

        Args:
            size: the bytes that `site.on_send(cls.name)` was told of in a pass or an update, which
                were rehearsed on no more than a few replicas.
            layout: with all of them.
            cluster: what the ranks run on.
        """
        return all_reduced(size, layout, cluster)

    @classmethod
    def step_end_cost(cls, model: ModelSize, layout: Layout, cluster: GpuCluster) -> Sent:
        """Return what a rank sends once a step, after its last pass, beside what it has told."""
        return Sent()


def axes_named(names: Iterable[str]) -> Iterator[type[Axis]]:
    """Yield the classes of axes that ship, or that a package has, by name.

    Raises:
        UsageError: one is not an axis, or its methods do not fit.
    """
    for name in names:
        kind = AXES.load(name)
        if ":" in name:  # one that ships is an axis: a test asks
            require_axis(kind, name)
        yield kind


def require_axis(kind: Any, name: str) -> None:
    """Refuse what a name stands for, if it is not an axis, or its methods do not fit."""
    if not (isinstance(kind, type) and issubclass(kind, Axis)):
        what = f"{name} is not a subclass of lockstep.parallel.axes.axis.Axis"
        raise UsageError(what, where=AXES.where, fix="name a class that is one")
    if inspect.getattr_static(kind, "apply") is vars(Axis)["apply"]:
        fix = (
            "write @classmethod def apply(cls, site), which returns the axis on this rank, or None"
        )
        raise UsageError(f"{name} has no method apply", where=AXES.where, fix=fix)
    require_methods(kind, Axis, name, AXES.where)
    _require_classmethods(kind, name)
    _require_own_name(kind, name)


def _require_classmethods(kind: type[Axis], name: str) -> None:
    """Refuse a class whose methods are asked of an object where the class is asked."""
    for method, defined in vars(Axis).items():
        if not isinstance(defined, classmethod):
            continue
        arguments = list(inspect.signature(defined.__func__).parameters)
        line = f"write @classmethod def {method}({', '.join(arguments)})"
        if not isinstance(inspect.getattr_static(kind, method), classmethod):
            what = f"{name}.{method} is not a classmethod"
            raise UsageError(what, where=AXES.where, fix=line)
        own = getattr(kind, method)
        require_call(own, arguments[1:], f"{name}.{method}", AXES.where, fix=line)


def _require_own_name(kind: type[Axis], name: str) -> None:
    """Refuse a class without a name, or with that of an axis that stands beside it."""
    own = getattr(kind, "name", None)
    if not isinstance(own, str):
        fix = 'write name = "…" in the class, as in `site.axes` and `site.on_send(cls.name)`'
        raise UsageError(f"{name} has no name", where=AXES.where, fix=fix)
    if own in BY_SIZE and name != own:
        what = f"{name} is called {own}, as the axis that ships and stands beside it"
        raise UsageError(what, where=AXES.where, fix="write another name in the class")
