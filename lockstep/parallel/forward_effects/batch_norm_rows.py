"""Batch normalisation over the micro-batches that neighbouring ranks run at the same time.

Mean and variance are those of `torch.nn.SyncBatchNorm`, which refuses CPUs, from the ranks' own
means and squared deviations. Source: Chan, Golub, LeVeque 1979. One channel, two samples on each
of two ranks:

                           rank 0                      rank 1
    values                 1 and 3                     5 and 7
    mean, deviations²      2 and 1 + 1 = 2             6 and 1 + 1 = 2
    mean, on each          (2 · 2 + 2 · 6) / 4 = 4
    variance, on each      (2 + 2 + 2 · (2 − 4)² + 2 · (6 − 4)²) / 4 = 5

The running variance takes 5 · 4 / 3, as torch's does. Squares of the values themselves, 84 less
4 · 4², would cancel where the mean is large.

Tests: tests/parallel/forward_effects/test_buffers.py, tests/parity/test_same_bits.py,
tests/parallel/test_worked_examples.py
"""

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.changes import replace_method
from lockstep.parallel.comm import all_gather_flat
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.tensor.layer_cut import with_backward
from lockstep.process_group.collectives import create_group
from lockstep.torch_compat.normalizations import BatchNorm


@dataclass
class BatchNormRows(AroundMicroBatch):
    """The modules whose statistics span a row: micro-batches run at once on neighbouring ranks.

    Outside of a step's micro-batches a module is torch's own.
    """

    ranks: int  # of a row
    group: dist.ProcessGroup  # of this rank's row
    _inside: bool = field(default=False, init=False)
    _real: bool = field(default=False, init=False)

    def before(self, passing: MicroBatchPass) -> None:
        self._inside = True
        self._real = passing.micro_batch.real

    def after(self, passing: MicroBatchPass) -> None:
        self._inside = False

    def failed(self, error: BaseException) -> None:
        self._inside = False

    def forward(self, module: BatchNorm, inputs: Tensor) -> Tensor:
        """Return a module's outputs for [samples, channels, …].

        Running statistics are updated as torch does it.
        """
        if not (self._inside and module.training):
            return type(module).forward(module, inputs)
        x = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
        dims = [0, *range(2, x.dim())]
        channels = x.shape[1]
        # A dummy has no sample: its count and its deviations are zero.
        count = x.new_full((1,), float(x.numel() // channels * self._real))
        mean = x.mean(dims)
        deviations = (x - _spread(mean, x)).square().sum(dims) * float(self._real)
        table = with_backward(self._gather, self._pull_back, torch.cat([mean, deviations, count]))
        means = table[:, :channels]
        deviations = table[:, channels:-1].sum(0)
        counts = table[:, -1:].detach()
        total = counts.sum().clamp(min=1.0)
        mean = (counts * means).sum(0) / total
        variance = (deviations + (counts * (means - mean).square()).sum(0)) / total
        _update(module, mean.detach(), variance.detach() * (total / (total - 1.0).clamp(min=1.0)))
        outputs = (x - _spread(mean, x)) * _spread((variance + module.eps).rsqrt(), x)
        if module.affine:
            outputs = outputs * _spread(module.weight, x) + _spread(module.bias, x)
        return outputs.to(inputs.dtype)

    def _gather(self, mine: Tensor) -> Tensor:
        """Return [numbers] of each rank as [ranks, numbers]."""
        table = mine.new_empty(self.ranks * mine.numel())
        all_gather_flat(table, mine.contiguous(), group=self.group)
        return table.view(self.ranks, -1)

    def _pull_back(self, pull: Tensor) -> Tensor:
        """Return the gradient of this rank's numbers, the sum of what all ranks' tables give."""
        of_all = pull.contiguous().clone()
        dist.all_reduce(of_all, group=self.group)
        return of_all[dist.get_rank(self.group)]


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Return [channels] as [channels, 1, …], to be used with [samples, channels, …]."""
    return values.view(-1, *[1] * (like.dim() - 2))


@torch.no_grad()
def _update(module: BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if module.running_mean is None or module.running_var is None:
        return
    share: Any = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        share = share if share is not None else 1.0 / module.num_batches_tracked
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
    module.running_var.lerp_(variance.to(module.running_var.dtype), share)


def apply_batch_norm_rows(
    model: nn.Module, samples: int | None, batch_size: int, ranks: int
) -> BatchNormRows | None:
    """Have batch normalisation cover rows of ranks, of so many samples.

    None where a row is one micro-batch.
    """
    in_row = 1 if samples is None else samples // batch_size
    if in_row == 1:
        return None
    norms = {
        name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)
    }
    other = next(
        (name for name, module in norms.items() if type(module).forward is not BatchNorm.forward),
        None,
    )
    if other is not None or not norms:
        what = (
            f"{other} ({type(norms[other]).__name__}) has a forward of its own"
            if other
            else "the model has none"
        )
        what = f"batch normalisation can't cover {samples} samples: {what}"
        fix = f"leave it out, or write training.batch_size: {samples}"
        fix += ", or use nn.BatchNorm1d, 2d or 3d" if other else ""
        raise UsageError(what, where="training.batch_norm_samples", fix=fix)
    group = create_group(
        "batch_norm", [range(first, first + in_row) for first in range(0, ranks, in_row)]
    )
    assert group is not None
    rows = BatchNormRows(in_row, group)

    def forward(self: BatchNorm, input: Tensor) -> Tensor:
        return rows.forward(self, input)

    for module in norms.values():
        replace_method(module, MethodType(forward, module), by="batch_norm")
    return rows
