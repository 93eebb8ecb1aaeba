"""Buffers that a forward pass changes: running statistics of batch normalisation, and others.

A running average depends on the order in which micro-batches update it. So during a forward pass empty statistics
collect what this micro-batch adds, and after the last backward pass the records of all ranks are replayed in order.
With n earlier calls, momentum m and a module called k times in a forward pass, one micro-batch changes the average r to
(1 - m)^k r + c, where c is the result for an average of zero; without momentum (cumulative) to (n r + k c) / (n + k).

Spectral normalisation makes one power iteration a step, as a plain loop over the whole batch does. `step_counts` are
added up and handed to `end_step` (`lockstep.models.protocol`). Other buffers can't be replayed: ranks take rank 0's.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lockstep.collectives import create_group
from lockstep.errors import UsageError, listed
from lockstep.parallel.comm import all_gather_flat
from lockstep.parallel.micro_step import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.tensor_blocks import with_backward
from lockstep.torch_compat.module_hooks import forward_pre_hooks
from lockstep.torch_compat.normalizations import BatchNorm, SpectralNormParametrization
from lockstep.torch_compat.tensor_versions import version_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_COUNTS = "step_counts"
_EMPTIED = (*_STATISTICS, _COUNTS)  # at the begin of a micro-batch

_NOTHING = nullcontext()  # one for all micro-batches: making it is a call

_log = logging.getLogger("lockstep")


def refuse_synchronised(model: nn.Module) -> None:
    """Refuse a `SyncBatchNorm`, whose statistics mix the samples of all ranks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            why = "it normalises over the micro-batches of all ranks, so a step would depend on their number"
            fix = "use BatchNorm, and training.batch_norm_samples to say over how many samples it normalises; unset, "
            fix += "these are the batch_size samples of a micro-batch, on any number of ranks"
            raise UsageError(f"{name or type(model).__name__} is a SyncBatchNorm", why=why, fix=fix)


@contextmanager
def restored(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore buffers after the forward passes in the block."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)


@contextmanager
def restored_numbers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore plain numbers, texts and flags of modules after the forward passes in the block, except their mode."""
    numbers = [{k: v for k, v in vars(m).items() if isinstance(v, bool | int | float | str)} for m in modules]
    try:
        yield
    finally:
        for module, before in zip(modules, numbers, strict=True):
            for name, value in before.items():
                if name != "training" and vars(module).get(name) != value:
                    setattr(module, name, value)


@dataclass
class RunningBuffers(AroundMicroBatch):
    """Records what forward passes do to buffers, and replays it once a step."""

    model: nn.Module  # whose buffers, on this rank; all of its forward pass runs here
    ranks: int = 1  # how many ranks hold the same model
    group: dist.ProcessGroup | None = None  # of these ranks; None for the default group
    reproducible: bool = False  # refuse buffers whose changes can't be replayed
    row: int = 1  # ranks that have the same statistics, of which the first records them
    _norms: dict[str, BatchNorm] = field(init=False)
    _vectors: list[tuple[nn.Module, str]] = field(init=False)  # of spectral normalisation: module, and name there
    _iterated: list[Tensor] = field(default_factory=list)  # the vectors after a micro-batch of this step
    _counting: list[nn.Module] = field(init=False)
    _counts: Tensor | None = None  # of the step so far, of all of them
    _others: dict[str, tuple[nn.Module, str]] = field(init=False)  # name → its module, and its name there
    _records: dict[int, Tensor] = field(default_factory=dict)  # micro-batch → flat statistics
    _changing: list[str] | None = None  # other buffers that change; None before the first step's end
    _changed: set[str] = field(default_factory=set)
    _versions: dict[str, tuple[int, int]] = field(default_factory=dict)  # of the others, before the forward pass
    _index: int = 0  # of the micro-batch that runs
    _real: bool = False  # whether it counts
    _open: AbstractContextManager[None] = _NOTHING  # around the micro-batch that runs

    def __post_init__(self) -> None:
        self._norms = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, BatchNorm) and module.track_running_stats and module.running_mean is not None
        }
        self._vectors, self._counting = [], []
        for module in self.model.modules():
            if isinstance(module, SpectralNormParametrization):
                self._vectors += [(module, name) for name, _ in module.named_buffers(recurse=False)]
            for hook in forward_pre_hooks(module):
                if isinstance(hook, SpectralNorm):  # the old one
                    self._vectors += [(module, f"{hook.name}_u"), (module, f"{hook.name}_v")]
            if _COUNTS in dict(module.named_buffers(recurse=False)) and hasattr(module, "end_step"):
                self._counting.append(module)
        known = {(id(module), name) for module, name in self._vectors} | {(id(m), _COUNTS) for m in self._counting}
        self._others = {
            f"{path}.{name}" if path else name: (module, name)
            for path, module in self.model.named_modules()
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
            if not (path in self._norms and name in _STATISTICS) and (id(module), name) not in known
        }

    @property
    def any(self) -> bool:
        return bool(self._norms or self._others or self._vectors or self._counting)

    def before(self, run: MicroBatchPass) -> None:
        self._open = self.micro_batch(run.micro_batch.index, real=run.micro_batch.real)
        self._open.__enter__()

    def after_forward(self, run: MicroBatchPass) -> None:
        self.forward_done()

    def after(self, run: MicroBatchPass) -> None:
        self._open.__exit__(None, None, None)
        if run.last:
            self.finish_step(run.micro_batches_per_step)

    def failed(self, error: BaseException) -> None:
        self._open.__exit__(None, None, None)

    def micro_batch(self, index: int, *, real: bool) -> AbstractContextManager[None]:
        """Record a micro-batch's forward and backward pass, which run inside; call `forward_done` between them."""
        return self._recording(index, real) if self.any else _NOTHING

    @contextmanager
    def _recording(self, index: int, real: bool) -> Iterator[None]:
        exchanged: list[tuple[nn.Module, str]] = [(norm, key) for norm in self._active() for key in _STATISTICS]
        exchanged += [(module, _COUNTS) for module in self._counting]
        kept = [(module, name, getattr(module, name)) for module, name in (*exchanged, *self._vectors)]
        for module, name, buffer in kept:
            if buffer is not None:
                setattr(module, name, torch.zeros_like(buffer) if name in _EMPTIED else buffer.clone())
        self._index, self._real, self._versions = index, real, self._versions_now()
        try:
            yield
        finally:
            for module, name, buffer in kept:
                setattr(module, name, buffer)

    def forward_done(self) -> None:
        """Record the statistics of this micro-batch after its forward pass; recomputation comes later."""
        self._iterated = [getattr(module, name) for module, name in self._vectors]
        if self._counting and self._real:
            counts = torch.cat([module.get_buffer(_COUNTS) for module in self._counting])
            self._counts = counts if self._counts is None else self._counts + counts
        if not self._norms and not self._others:
            return
        if self._real and self._index % self.row == 0 and (active := self._active()):
            self._records[self._index] = _flat(active)
        now = self._versions_now()
        self._changed |= {name for name, seen in self._versions.items() if now[name] != seen}

    @torch.no_grad()
    def finish_step(self, micro_batches_per_step: int) -> None:
        """Bring the buffers to what the step makes of them; every rank calls it after its last backward pass."""
        if (active := self._active()) and (self.ranks > 1 or self._records):
            _replay(active, self._gathered(micro_batches_per_step, active))
            self._records.clear()
        for (module, name), iterated in zip(self._vectors, self._iterated, strict=True) if self._iterated else ():
            getattr(module, name).copy_(iterated)
        if self._counting:
            none = [torch.zeros_like(module.get_buffer(_COUNTS)) for module in self._counting]
            counts = torch.cat(none) if self._counts is None else self._counts  # None: this rank ran a dummy alone
            self._counts = None
            if self.ranks > 1:
                dist.all_reduce(counts, group=self.group)
            for module, part in zip(self._counting, torch.split(counts, [each.numel() for each in none]), strict=True):
                module.end_step(part)  # type: ignore[operator]
        if self._others:
            self._synchronize_others()

    def _active(self) -> list[BatchNorm]:
        """Return those that update their averages; frozen ones, in evaluation mode, do not."""
        return [module for module in self._norms.values() if module.training]

    def _gathered(self, micro_batches_per_step: int, active: list[BatchNorm]) -> Tensor:
        """Return [micro-batches, statistics] over all ranks, in order, after rows of zeros, which change nothing."""
        if self.ranks == 1:
            return torch.stack([self._records[index] for index in sorted(self._records)])
        rows = -(-micro_batches_per_step // self.ranks)
        width, device = sum(2 * module.num_features + 1 for module in active), _averages(active[0])[0].device
        mine = torch.zeros(rows, width + 1, dtype=torch.float64, device=device)  # the last column: micro-batch + 1
        for row, (index, record) in enumerate(self._records.items()):
            mine[row, :-1], mine[row, -1] = record, index + 1
        theirs = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(theirs, mine, group=self.group)
        table = torch.cat(theirs)
        return table[table[:, -1].argsort(stable=True), :-1]  # sorted on the device: nothing waits for it

    def _synchronize_others(self) -> None:
        """Find the other buffers that change, after the first step; broadcast rank 0's after each step."""
        if self._changing is None:
            names = list(self._others)
            if self.ranks > 1:
                flags = torch.tensor([name in self._changed for name in names], dtype=torch.int32)
                flags = flags.to(self._other(names[0]).device)
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
                self._changing = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
            else:
                self._changing = [name for name in names if name in self._changed]
            if self._changing:
                self._report(self._changing)
        if self._changing and self.ranks > 1:
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            for name in self._changing:
                dist.broadcast(self._other(name), src=source, group=self.group)

    def _other(self, name: str) -> Tensor:
        """Return the buffer that is registered now: a forward pass may replace it."""
        module, own = self._others[name]
        return getattr(module, own)  # type: ignore[no-any-return]

    def _versions_now(self) -> dict[str, tuple[int, int]]:
        buffers = {name: self._other(name) for name in self._others}
        return {name: (id(buffer), version_of(buffer)) for name, buffer in buffers.items()}

    def _report(self, names: list[str]) -> None:
        why = "how it changes is the model's own, so it depends on which micro-batches a rank runs"
        if self.reproducible:
            what = f"the forward pass changes the buffer {listed(names)}"
            fix = "compute it outside of the forward pass, or set distributed.reproducible: false"
            raise UsageError(what, where="distributed.reproducible", why=why, fix=fix)
        _log.warning(
            "the forward pass changes the buffer %s: %s; ranks take rank 0's after each step", listed(names), why
        )


# A micro-batch's statistics, flat: of each module its means and variances, then of each module the number of its calls.


def _averages(module: BatchNorm) -> tuple[Tensor, Tensor]:
    mean, variance = module.running_mean, module.running_var
    assert mean is not None
    assert variance is not None
    return mean, variance


def _flat(modules: list[BatchNorm]) -> Tensor:
    averages = [average.double() for module in modules for average in _averages(module)]
    one = torch.ones((), dtype=torch.float64, device=averages[0].device)
    calls = [one if m.num_batches_tracked is None else m.num_batches_tracked.double() for m in modules]
    return torch.cat([*averages, torch.stack(calls)])


def _replay(modules: list[BatchNorm], records: Tensor) -> None:
    """Take the running statistics through `records`, [micro-batches, statistics], one row after the other."""
    state = _flat(modules)
    averages, calls = state[: -len(modules)], state[-len(modules) :]
    device = state.device
    widths = torch.tensor([2 * m.num_features for m in modules], device=device)
    momentum = torch.tensor([math.nan if m.momentum is None else m.momentum for m in modules], device=device).double()
    cumulative = momentum.isnan()
    for row in records:
        now = row[-len(modules) :]
        share = torch.where(calls + now > 0, now / (calls + now).clamp(min=1), 0.0)
        kept = torch.where(cumulative, 1.0 - share, (1.0 - momentum) ** now)
        added = torch.where(cumulative, share, 1.0)
        spread = partial(torch.repeat_interleave, repeats=widths, output_size=averages.numel())
        averages = averages * spread(kept) + row[: -len(modules)] * spread(added)
        calls = calls + now
    begin = 0
    for module, counted in zip(modules, calls, strict=True):
        for average in _averages(module):
            average.copy_(averages[begin : begin + module.num_features])
            begin += module.num_features
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.copy_(counted)


@dataclass
class BatchNormRows(AroundMicroBatch):
    """The modules whose statistics are those of a row: the micro-batches that neighbouring ranks run at the same time.

    Mean and variance are those of `torch.nn.SyncBatchNorm`, which refuses CPUs, from the ranks' own means and squared
    deviations (Chan, Golub, LeVeque 1979). Outside of a step's micro-batches a module is torch's own.
    """

    ranks: int  # of a row
    group: dist.ProcessGroup  # of this rank's row
    _inside: bool = field(default=False, init=False)
    _real: bool = field(default=False, init=False)

    def before(self, run: MicroBatchPass) -> None:
        self._inside, self._real = True, run.micro_batch.real

    def after(self, run: MicroBatchPass) -> None:
        self._inside = False

    def failed(self, error: BaseException) -> None:
        self._inside = False

    def forward(self, module: BatchNorm, inputs: Tensor) -> Tensor:
        """Return a module's outputs for [samples, channels, …], and update its running statistics as torch does."""
        if not (self._inside and module.training):
            return type(module).forward(module, inputs)
        x = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
        dims, channels = [0, *range(2, x.dim())], x.shape[1]
        count = x.new_full((1,), float(x.numel() // channels * self._real))
        mean = x.mean(dims)
        deviations = (x - _spread(mean, x)).square().sum(dims) * float(self._real)
        table = with_backward(self._gather, self._pull_back, torch.cat([mean, deviations, count]))
        means, deviations, counts = table[:, :channels], table[:, channels:-1].sum(0), table[:, -1:].detach()
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
        """Add up what the ranks say of this one's."""
        whole = pull.contiguous().clone()
        dist.all_reduce(whole, group=self.group)
        return whole[dist.get_rank(self.group)]


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


def apply_batch_norm_rows(model: nn.Module, samples: int | None, batch_size: int, ranks: int) -> BatchNormRows | None:
    """Have batch normalisation cover rows of ranks, of so many samples; None where a row is one micro-batch."""
    in_row = 1 if samples is None else samples // batch_size
    if in_row == 1:
        return None
    found = {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}
    other = next((name for name, module in found.items() if type(module).forward is not BatchNorm.forward), None)
    if other is not None or not found:
        what = f"{other} ({type(found[other]).__name__}) has a forward of its own" if other else "the model has none"
        what = f"batch normalisation can't cover {samples} samples: {what}"
        fix = f"leave it out, or write training.batch_size: {samples}"
        fix += ", or use nn.BatchNorm1d, 2d or 3d" if other else ""
        raise UsageError(what, where="training.batch_norm_samples", fix=fix)
    group = create_group("batch_norm", [range(first, first + in_row) for first in range(0, ranks, in_row)])
    assert group is not None
    rows = BatchNormRows(in_row, group)

    def forward(self: BatchNorm, input: Tensor) -> Tensor:
        return rows.forward(self, input)

    for module in found.values():
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return rows
