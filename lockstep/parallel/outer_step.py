"""The outer step of `diloco`: where workers that train by themselves meet.

The mean over workers of what they changed, θ − θ_w, is an outer gradient; a step of SGD along it, with momentum
(Nesterov's or plain), takes the common parameters θ, and every worker goes on from there.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.config import DiLoCoConfig
from lockstep.parallel.local_worker import Flat, Worker
from lockstep.parallel.wire import BLOCK, QuantizedAllReduce


class OuterStep:
    """Rule and state of the exchange; every rank makes the same calls.

    Args:
        common: the parameters from which all workers go on.
        momentum: of the outer step, as `common`.
        buffers: the running statistics that go with `common`.
        wire: on which the workers meet.
    """

    def __init__(
        self, common: Flat, momentum: Flat, buffers: dict[str, Tensor], config: DiLoCoConfig, wire: QuantizedAllReduce
    ) -> None:
        self._common, self._momentum, self._buffers = common, momentum, buffers
        self._config, self._wire = config, wire
        blocks, parts = common.data.numel() // BLOCK, config.fragments
        bounds = [BLOCK * (blocks * k // parts) for k in range(parts + 1)]
        self._pieces = [slice(*ends) for ends in pairwise(bounds)]

    def after(self, step: int, workers: Sequence[Worker], *, last: bool) -> None:
        """Exchange what is due after so many steps; at the end of the run, everything.

        Args:
            workers: of this rank.
        """
        for piece in self._due(step, last):
            self._step(piece, workers)
        if last or step % self._config.inner_steps == 0:
            self._average_buffers(workers)

    def _due(self, step: int, last: bool) -> Iterator[slice]:
        inner = self._config.inner_steps
        for place, piece in enumerate(self._pieces, 1):
            if last or step % inner == place * inner // len(self._pieces) % inner:
                yield piece

    @torch.no_grad()
    def _step(self, piece: slice, workers: Sequence[Worker]) -> None:
        config = self._config
        common, momentum = self._common.data[piece], self._momentum.data[piece]
        changes = torch.stack([(common - worker.values.data[piece]).float() for worker in workers])
        errors = [worker.error.data[piece] for worker in workers if worker.error is not None]
        if errors:
            changes += torch.stack(errors)
        mean, lost = self._wire.mean(changes)
        for error, of_worker in zip(errors, lost, strict=False):
            error.copy_(of_worker)
        momentum.mul_(config.outer_momentum).add_(mean)
        along = mean.add(momentum, alpha=config.outer_momentum) if config.nesterov else momentum
        common.add_(along, alpha=-config.outer_learning_rate)
        for worker in workers:
            worker.values.data[piece].copy_(common)

    @torch.no_grad()
    def _average_buffers(self, workers: Sequence[Worker]) -> None:
        """Running statistics: their mean over workers, exactly as sent; counts are the same or nearly so."""
        if not self._buffers:
            return
        rows = [torch.cat([b.reshape(-1).float() for b in worker.buffers.values()]) for worker in workers]
        mean, _ = self._wire.mean(torch.stack(rows), "fp32")
        begin = 0
        for name, common in self._buffers.items():
            values, begin = mean[begin : begin + common.numel()], begin + common.numel()
            common.copy_((values if common.is_floating_point() else values.round()).view(common.shape))
            for worker in workers:
                worker.buffers[name].copy_(common)
