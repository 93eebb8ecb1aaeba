"""What stands around the passes of a sharded model, and around the calls of its units.

One list for each moment, in the order in which things happen:

    before a pass           which units are used; their order; what this pass sends
    before a unit's call    units that other ranks call here are joined; the call is noted; one that
                            a backward pass repeats is a new one. Then FSDP2 gathers the unit.
    after the model's call  the rest of the order is joined. Then FSDP2 frees the root.
    after a pass            the order is completed; ranks compare which parameters were used

Tests: tests/parallel/fsdp/test_fsdp.py, tests/parallel/fsdp/test_fsdp_order.py,
tests/parity/test_own_recomputation.py
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.parallel.comm.gloo import GlooMessages
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.fsdp.order import UnitOrder
from lockstep.parallel.fsdp.units import Unit, UnitUsage, in_order
from lockstep.parallel.site import Site
from lockstep.process_group.mesh import replica_group
from lockstep.torch_compat.backward_pass import graph_task
from lockstep.torch_compat.fsdp_state import begin_anew


class UnitCalls(AroundMicroBatch):
    """The calls of a sharded model's units.

    A stage of a pipeline has them without standing around passes: `StageSync` does there.

    Args:
        units: sharded, the root first, which is the model itself.
        usage: notes which units and parameters a step uses; None in a dry run and in stages.
        order: has all ranks gather in one order; None: they exchange nothing, or never differ.
        accumulate: `sharded`: each micro-batch's gradient is scattered at once, a rank never holds
            more than its share, and replicas add up once a step. `unsharded`: nothing is sent
            before the last micro-batch, and each rank holds the whole model's gradient until then.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        usage: UnitUsage | None = None,
        order: UnitOrder | None = None,
        *,
        accumulate: str = "sharded",
    ) -> None:
        model = units[0].module
        assert isinstance(model, FSDPModule)
        self._model = model
        self._usage = usage
        self._order = order
        self._accumulate = accumulate
        for position, unit in enumerate(units):
            unit.module.register_forward_pre_hook(
                partial(self._before_call, position), prepend=True, with_kwargs=True
            )
        model.register_forward_hook(self._after_model, prepend=True)

    def before(self, passing: MicroBatchPass) -> None:
        if self._usage is not None:
            self._usage.begin_pass()
        if self._order is not None:
            self._order.begin_pass(passing)
        self._model.set_is_last_backward(passing.last)
        if self._accumulate == "unsharded":
            self._model.set_requires_gradient_sync(passing.last)
        else:
            self._model.set_requires_all_reduce(passing.last)

    def after(self, passing: MicroBatchPass) -> None:
        if self._order is not None:
            self._order.end_pass(passing)
        if self._usage is not None:
            self._usage.end_pass(passing)

    def failed(self, error: BaseException) -> Exception | None:
        return None if self._usage is None else self._usage.failed(error)

    def _before_call(self, position: int, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """Prepare a unit's call, before FSDP2 gathers it; return other inputs, or None."""
        inputs = None
        if self._order is not None:
            inputs = self._order.before_call(position, args, kwargs)
        if self._usage is not None:
            self._usage.before_call(position, unit)
        if graph_task() != -1:  # a backward pass repeats the call
            begin_anew(unit)
        return inputs

    def _after_model(self, _model: nn.Module, _args: object, outputs: Any) -> Any:
        """End the model's call, before FSDP2 does; return other outputs, or None."""
        if self._usage is not None:
            self._usage.end_forward()
        return None if self._order is None else self._order.end_forward(outputs)


def around_units(site: Site, shards: dist.ProcessGroup | None) -> list[AroundMicroBatch]:
    """Return what stands around passes of a model in units, and what carries messages of gloo.

    `shards`: the ranks with the other pieces of its parameters; None: there are none.
    """
    units = in_order(site.units)
    usage = None
    order = None
    # ranks compare what they use, and without values there is nothing to compare
    if site.dry_run is None:
        usage = UnitUsage(units, site.device)
        exchanging: dict[bool, dist.ProcessGroup | None] = (
            {} if shards is None else {True: shards, False: shards}
        )
        if not site.reproducible:  # replicas add up unit by unit, too
            exchanging[True] = site.dp_group
        order = UnitOrder(units, site.device, exchanging, site.dp_group)
    accumulate = site.config.distributed.fsdp.accumulate
    calls = UnitCalls(units, usage, order, accumulate=accumulate)
    around: list[AroundMicroBatch] = [calls]
    if site.device_type == "cpu":
        # else a sum follows on what FSDP2 is given
        may_wait = not site.reproducible and replica_group(site.mesh) is None
        messages = GlooMessages(units, may_wait=may_wait)
        around += [messages] if may_wait else []
    return around


def watch_stage(
    units: Sequence[Unit], shards: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Prepare the calls of a stage's units.

    It is an error if the data of some of the ranks `shards` leave out a unit that others gather.
    """
    order = None
    if shards is not None:
        order = UnitOrder(units, device, {True: shards, False: shards}, shards, joins=False)
    UnitCalls(units, order=order)
