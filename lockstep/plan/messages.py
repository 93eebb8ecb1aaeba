"""What ranks send along the axes of a layout, and how long they wait for it.

A rehearsal counts bytes by the name of an axis; the class of the axis says what they cost.

Tests: tests/plan/test_layouts.py, tests/seams/test_axis.py
"""

from lockstep.costs.hardware import Cost, GpuCluster
from lockstep.costs.steps import ModelSize, Sent
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.axes.axis import Axis, axes_named
from lockstep.registry import BY_SIZE
from lockstep.strategy import strategy_named


class Messages:
    """The messages of a layout's axes on a cluster."""

    def __init__(self, layout: Layout, cluster: GpuCluster) -> None:
        self._layout = layout
        self._cluster = cluster
        own = [kind.name for kind in strategy_named(layout.strategy).kinds]
        self._own = frozenset(own) - frozenset(BY_SIZE)
        names = (*(strategy_named(layout.strategy).axes or ()), *BY_SIZE)
        self._kinds: dict[str, type[Axis]] = {kind.name: kind for kind in axes_named(names)}

    def of(self, cost: Cost) -> Sent:
        """Return what ranks send in a pass or an update, and wait for."""
        sent = Sent()
        for axis, size in cost.sent.items():
            if axis not in self._kinds:
                what = f"site.on_send({axis!r}) is told of messages along an axis that is not there"
                fix = f"write site.on_send(cls.name), which is one of {', '.join(self._kinds)}"
                raise UsageError(what, where=f"strategy {self._layout.strategy}", fix=fix)
            sent = sent.plus(self._kinds[axis].message_cost(size, self._layout, self._cluster))
        return sent

    def at_last(self, model: ModelSize) -> Sent:
        """Return what ranks send once a step, after their last pass."""
        sent = Sent()
        for kind in self._kinds.values():
            sent = sent.plus(kind.step_end_cost(model, self._layout, self._cluster))
        return sent

    def seconds(self, cost: Cost) -> float:
        """Return the seconds in which a rank computes and waits for messages."""
        return self._cluster.seconds(cost) + self.of(cost).seconds

    def are_told(self, *costs: Cost) -> bool:
        """Return whether axes of the strategy have told what they send, and not by their sizes."""
        return any(self._own & cost.sent.keys() for cost in costs)
