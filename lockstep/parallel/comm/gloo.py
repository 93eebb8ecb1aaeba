"""FSDP2's messages over gloo: sent while the model computes, with no more bytes than a ring sends.

A CPU has no streams: each collective would block the caller, and gloo's reduce-scatter is an
all-reduce of which a part is kept. Here parameters are gathered in pieces and waited for where they
are used; a unit's gradient goes by an all-to-all in pieces, which a rank adds up when the next
unit's gradient is there.

Two ranks, a unit with a weight [4, 6] of which each holds two rows. After its backward pass a rank
has a gradient of 24 numbers, rows of ranks [2, 12]: it keeps row 0 or 1, its own, and sends the
other. What it receives is [2, 12] again, its share of both gradients, and their sum [12] is its
rows' gradient. Sent: 12 numbers a rank, where an all-reduce sends 24.

Tests: tests/parallel/test_traffic.py, tests/parity/test_data_parallel.py,
tests/parallel/test_worked_examples.py
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.parallel.comm import MESSAGE, all_gather_flat
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.fsdp.units import Unit


class GlooMessages(AroundMicroBatch):
    """The gathers and reduce-scatters of a sharded model's units.

    Every rank makes the same calls in the same order.

    `units`: sharded, the root first. `may_wait`: gradients may be complete only after the
    micro-batch; then it is one of the steps around it.
    """

    def __init__(self, units: Sequence[Unit], *, may_wait: bool = False) -> None:
        self._dtypes = {parameter.dtype for parameter in units[0].module.parameters()}
        # with what it becomes
        self._under_way: tuple[AllToAll, Tensor, Sequence[nn.Parameter]] | None = None
        # over the step's micro-batches, all but the last
        self._sums: dict[nn.Parameter, DTensor] = {}
        self._may_wait = may_wait
        self._last = True
        for unit in units:
            module = unit.module
            assert isinstance(module, FSDPModule)
            sharded = [p for p in unit.parameters() if isinstance(p, DTensor)]
            reduces = _ReduceScatter(self, sharded)
            module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduces)  # type: ignore[arg-type]

    def before(self, passing: MicroBatchPass) -> None:
        self._last = passing.last

    def after(self, passing: MicroBatchPass) -> None:
        """Complete the gradients, which are added up here.

        FSDP2 would add to a sum that is still under way.
        """
        self.wait()
        if passing.last:
            # of those that this micro-batch has no gradient of
            for parameter, total in self._sums.items():
                parameter.grad = total
            self._sums.clear()

    def begin(
        self,
        output: Tensor,
        gradient: Tensor,
        group: dist.ProcessGroup,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Reduce-scatter a unit's gradient into `output`: now, or by the next `wait`."""
        self.wait()
        exchange = AllToAll(gradient, group)
        self._under_way = exchange, output, parameters
        converts = {output.dtype} != self._dtypes
        # the unit's second gradient in this pass
        adds = any(parameter.grad is not None for parameter in parameters)
        if not self._may_wait or converts or adds:  # FSDP2 uses what is there when this returns
            exchange.add_up(output)

    def wait(self) -> None:
        """Complete the reduce-scatter that is under way, if there is one."""
        if self._under_way is None:
            return
        exchange, output, parameters = self._under_way
        self._under_way = None
        exchange.add_up(output)
        # add them to those of the micro-batches before
        for parameter in parameters if self._may_wait else ():
            grad: Any = parameter.grad  # a DTensor
            if grad is None:  # not used this time: what it has stays
                continue
            before = self._sums.pop(parameter, None)
            if before is not None:
                grad.to_local().add_(before.to_local())
            if not self._last:
                self._sums[parameter] = grad
                parameter.grad = None


class AllToAll:
    """An all-to-all of `rows`, [W × share], flat, under way: row w goes to rank w."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        sent = rows.view(group.size(), -1)
        # works, with what they send and receive
        self._under_way: list[tuple[Any, Tensor, Tensor]] = []
        if sent.device.type == "cpu":
            pieces = [sent[:, piece].contiguous() for piece in _pieces(sent[0])]
        else:
            pieces = [sent]  # NCCL divides messages itself
        for piece in pieces:
            received = torch.empty_like(piece)
            work = dist.all_to_all_single(
                received.view(-1), piece.view(-1), group=group, async_op=True
            )
            self._under_way.append((work, piece, received))

    def received(self) -> Iterator[Tensor]:
        """Yield the received rows, [W, a part of the share], part by part, as they arrive; once."""
        under_way = self._under_way
        self._under_way = []
        for work, _, received in under_way:
            work.wait()
            yield received

    def add_up(self, out: Tensor) -> None:
        """Wait for all rows, and write their sum; once."""
        begin = 0
        for part in self.received():
            torch.sum(part, dim=0, out=out[begin : begin + part.size(1)])
            begin += part.size(1)


class InNewBuffers:
    """Makes buffers anew, which FSDP2 asks of a collective besides the call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer without values."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(InNewBuffers):
    """FSDP2's all-gather; FSDP2 waits for the returned work before it uses the parameters."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        pieces = list(_pieces(input_tensor))
        if len(pieces) == 1:
            work = all_gather_flat(output_tensor, input_tensor, group=group, async_op=True)
            return _Works([work])
        rows = output_tensor.view(group.size(), -1)
        return _Works(
            [
                dist.all_gather(
                    list(rows[:, piece].unbind()), input_tensor[piece], group=group, async_op=True
                )
                for piece in pieces
            ]
        )


class _ReduceScatter(InNewBuffers):
    """FSDP2's reduce-scatter, which always sums."""

    def __init__(self, messages: GlooMessages, parameters: Sequence[nn.Parameter]) -> None:
        self._messages = messages
        self._parameters = parameters

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._messages.begin(output_tensor, input_tensor, group, self._parameters)


class _Works(dist.Work):
    """Several messages, which are through when all of them are."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait()
        return True


def _pieces(share: Tensor) -> Iterator[slice]:
    """Return slices of at most `MESSAGE` bytes."""
    each = max(1, MESSAGE // share.element_size())
    return (
        slice(start, min(start + each, share.numel()))
        for start in range(0, max(1, share.numel()), each)
    )
