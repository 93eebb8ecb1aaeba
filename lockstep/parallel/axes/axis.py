"""`Axis`: what one axis of the mesh does to a model, from its layers to a step's final gradients.

`place` goes through the axes in the order of the registry (`lockstep.registry.AXES`), and asks each
of them the same questions:

    contradictions → settings that it does not go with, when a config is loaded and again here
    on             → the axis on this rank, which has changed the layers; None: nothing to do
    after_others   → what it changes once all others have changed theirs
    objective      → how the loss is computed from parts
    piece          → what this rank keeps of a parameter's first value
    around         → what stands around each micro-batch
    trained        → the placed model with its finishers, whole parameters, and what a norm counts
    replicas       → ranks along the axis that hold the same, and are compared

Tests: tests/parallel/test_axes.py, tests/seams/test_axis.py
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import StepConfig
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout
from lockstep.models.protocol import Objective
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.passes import AroundMicroBatch
from lockstep.parallel.tensor_blocks import OnSend
from lockstep.registry import AXES, require_methods

# (micro-batches, rank=, ranks=) → (index, real) of each that the rank runs
AssignAnyRank = Callable[..., list[tuple[int, bool]]]


@dataclass(frozen=True)
class AxisSite:
    """The site of an axis: the model, the ranks, and the axes that were there before it."""

    facts: ModelFacts
    layout: Layout
    config: StepConfig
    mesh: DeviceMesh | None  # None on one rank
    device_type: str
    objective: Objective  # as the model and its loss function have it
    others: Mapping[str, "Axis"]  # by name; all of them for `after_others`
    is_dry: bool = False  # the model has no values, and ranks exchange none
    on_send: OnSend | None = None  # in a dry run: told the bytes of each message along the axis

    @property
    def exact(self) -> bool:
        """Return whether the step is to be the same in every bit on any layout."""
        return self.config.distributed.reproducible


def axes_named(names: Iterable[str]) -> Iterator[type["Axis"]]:
    """Yield the classes of axes that ship, or that a package has, by name.

    Raises:
        UsageError: one is not an axis, or its methods do not fit.
    """
    for name in names:
        found = AXES.load(name)
        if not (isinstance(found, type) and issubclass(found, Axis)):
            what = f"{name} is not a subclass of lockstep.parallel.axes.axis.Axis"
            raise UsageError(what, where=AXES.where, fix="name a class that is one")
        if found.on.__func__ is Axis.on.__func__:  # type: ignore[attr-defined]
            fix = (
                "write @classmethod def on(cls, site), which returns the axis on this rank, or None"
            )
            raise UsageError(f"{name} has no method on", where=AXES.where, fix=fix)
        require_methods(found, Axis, name, AXES.where)
        yield found


class Axis:
    """An axis of one placed model, on this rank. What a subclass does not write, it does not do."""

    name: ClassVar[str]  # as in `distributed.{name}_size`

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        """Yield the settings that several ranks along the axis contradict.

        `layout`: None while a config is loaded.
        """
        yield from ()

    @classmethod
    def on(cls, site: AxisSite) -> Self | None:
        """Return the axis on this rank, after it has changed layers of the model in place.

        None where there is nothing to do: one rank along it, and no bits to keep.
        """
        raise NotImplementedError

    def after_others(self, site: AxisSite) -> None:
        """Change what has to wait until all axes have changed their layers."""

    def objective(self, objective: Objective) -> Objective:
        """Return an objective whose loss is that of whole batches, from this rank's part."""
        return objective

    def piece(self, name: str, value: Tensor) -> Tensor:
        """Return what this rank keeps of a parameter's value, in memory of its own."""
        return value

    def around(self, assign: AssignAnyRank | None, scale: float) -> Sequence[AroundMicroBatch]:
        """Return what stands around each micro-batch, outermost first.

        `assign`: what the strategy assigns to any rank. `scale`: what gradients are multiplied by
        where the strategy's own reduction takes a mean.
        """
        return ()

    def trained(self, placed: ParallelModel) -> ParallelModel:
        """Return the placed model with what the axis adds to the end of a step.

        It may finish gradients, train whole parameters in place of pieces, and change what a norm
        counts. Each element of each gradient has to be counted once over all ranks.
        """
        return placed

    @property
    def spread(self) -> AbstractSet[str]:
        """Names of the parameters of which replicas hold different pieces."""
        return frozenset()

    def replicas(
        self, placed: ParallelModel
    ) -> Iterator[tuple[dist.ProcessGroup, AbstractSet[str]]]:
        """Yield groups whose ranks hold the same parameters, and the names of those left out."""
        yield from ()
