"""FSDP2's messages over gloo: on their way while the model computes, and no more of them than a ring sends.

On a GPU FSDP2 lays its collectives on streams beside computation. A CPU has none: each would hold the caller up, and
gloo's reduce-scatter is an all-reduce of which a part is kept, twice the bytes. Here

    a unit's parameters    are gathered in pieces and waited for where they are used; the next unit's are asked for
                           before this one computes
    a unit's gradient      goes by an all-to-all in pieces; each rank adds up its share when the next unit's
                           gradient is there

so that one unit's gradient is under way at a time, as on a GPU.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.parallel.ledger import Ledger, Share
from lockstep.parallel.placed import MicroStep, local
from lockstep.parallel.tree_reduce import MESSAGE, all_gather_flat


class GlooMessages:
    """The gathers and reduce-scatters of a sharded model's units; every rank makes the same calls in the same order.

    Args:
        model: sharded by FSDP2 over gloo.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._dtypes = {parameter.dtype for parameter in self._parameters}
        self._under_way: Exchange | None = None
        self._out: Tensor | None = None
        self._may_wait = False
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_ReduceScatter(self))  # type: ignore[arg-type]

    def over(self, micro_step: MicroStep) -> MicroStep:
        """`micro_step`, whose gradients are complete when it returns, and not before.

        Gradients of a step's micro-batches are added up here: FSDP2 would add a sum that is still under way.
        """
        sums: dict[nn.Parameter, Tensor] = {}  # over the step's micro-batches so far
        self._may_wait = True

        def step(share: Share, ledger: Ledger, factor: float, last: bool) -> tuple[Tensor, int | Tensor]:
            result = micro_step(share, ledger, factor, last)
            self.settle()
            if sums or not last:
                _move_gradients(self._parameters, sums)
            if last:
                for parameter, gradient in sums.items():
                    parameter.grad = gradient
                sums.clear()
            return result

        return step

    def begin(self, output: Tensor, gradient: Tensor, group: dist.ProcessGroup) -> None:
        """Reduce-scatter a unit's gradient into `output`: now, or by the next `settle`."""
        self.settle()
        self._under_way, self._out = Exchange(gradient, group), output
        if not self._may_wait or {output.dtype} != self._dtypes:  # FSDP2 converts what is there when this returns
            self.settle()

    def settle(self) -> None:
        """Wait for what is under way, and add it up."""
        if self._under_way is None:
            return
        assert self._out is not None
        torch.sum(self._under_way.received(), dim=0, out=self._out)
        self._under_way = self._out = None


class Exchange:
    """An all-to-all of rows under way: row w goes to rank w.

    Args:
        rows: [W × share], flat.
    """

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        sent = rows.view(group.size(), -1)
        whole = sent.device.type != "cpu"  # NCCL cuts messages itself
        self._pieces = [sent] if whole else [sent[:, cut].contiguous() for cut in _pieces(sent[0])]
        self._got = [torch.empty_like(piece) for piece in self._pieces]
        self._works = [
            dist.all_to_all_single(got.view(-1), piece.view(-1), group=group, async_op=True)
            for got, piece in zip(self._got, self._pieces, strict=True)
        ]

    def received(self) -> Tensor:
        """What the ranks sent here, [W, share], once it is there."""
        for work in self._works:
            work.wait()
        return self._got[0] if len(self._got) == 1 else torch.cat(self._got, dim=1)


class _Gather:
    """As FSDP2 calls it; what is returned is waited for before the parameters are used."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        cuts = list(_pieces(input_tensor))
        if len(cuts) == 1:
            return all_gather_flat(output_tensor, input_tensor, group=group, async_op=True)  # type: ignore[no-any-return]
        rows = output_tensor.view(group.size(), -1)
        return _Works([
            dist.all_gather(list(rows[:, cut].unbind()), input_tensor[cut], group=group, async_op=True) for cut in cuts
        ])  # fmt: skip


class _ReduceScatter:
    """As FSDP2 calls it; it only ever adds up."""

    def __init__(self, messages: GlooMessages) -> None:
        self._messages = messages

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._messages.begin(output_tensor, input_tensor, group)


class _Works(dist.Work):
    """Several at once."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait()
        return True


def _pieces(share: Tensor) -> Iterator[slice]:
    """Of so many elements as make one message."""
    each = max(1, MESSAGE // share.element_size())
    return (slice(start, min(start + each, share.numel())) for start in range(0, max(1, share.numel()), each))


def _move_gradients(parameters: list[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> None:
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            continue
        if parameter in sums:
            local(sums[parameter]).add_(local(gradient))
        else:
            sums[parameter] = gradient
