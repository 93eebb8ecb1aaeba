"""Buffers that a forward pass changes: running statistics of batch normalisation, and others.

A running average depends on the order in which micro-batches update it. So during a forward pass
empty statistics collect what this micro-batch adds, and after the last backward pass the records of
all ranks are replayed in order. With n earlier calls, momentum m and a module called k times in a
forward pass, one micro-batch changes the average r to (1 - m)^k r + c, where c is the result for an
average of zero; without momentum (cumulative) to (n r + k c) / (n + k).

Spectral normalisation makes one power iteration a step, as a plain loop over the whole batch does.
`step_counts` are added up and handed to `end_step` (`lockstep.models.protocol`). Of other buffers
the user says how they combine (`lockstep.parallel.forward_effects.combined_buffers`), or ranks take
rank 0's (`lockstep.parallel.forward_effects.unexplained_buffers`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.division import ceil_div
from lockstep.errors import UsageError
from lockstep.parallel.execution.passes import AroundMicroBatch, Evaluate, MicroBatchPass
from lockstep.parallel.forward_effects.buffer_kinds import COUNTS, STATISTICS, explained_buffers
from lockstep.parallel.forward_effects.combined_buffers import BufferWays, CombinedBuffers
from lockstep.parallel.forward_effects.gathered_rows import BufferPlace
from lockstep.parallel.forward_effects.unexplained_buffers import UnexplainedBuffers
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.randomness import RandomState
from lockstep.torch_compat.normalizations import BatchNorm
from lockstep.torch_compat.tensor_versions import version_of

_EMPTIED = (*STATISTICS, COUNTS)  # at the begin of a micro-batch

_Buffer = tuple[nn.Module, str, Tensor]  # module, name there, buffer


def refuse_synchronised(model: nn.Module) -> None:
    """Refuse a `SyncBatchNorm`, whose statistics mix the samples of all ranks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            why = (
                "it normalises over the micro-batches of all ranks, so a step would depend on their"
                " number"
            )
            fix = (
                "use BatchNorm, and training.batch_norm_samples to say over how many samples it"
                " normalises; unset, these are the batch_size samples of a micro-batch, on any"
                " number of ranks"
            )
            raise UsageError(f"{name or type(model).__name__} is a SyncBatchNorm", why=why, fix=fix)


@contextmanager
def restored(roots: Iterable[nn.Module], further: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore the buffers of modules, and `further` tensors, after the forward passes in the block.

    Buffers that these have replaced are registered again, and those that were None are None.
    """
    modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
    before = [
        dict(module.named_buffers(recurse=False, remove_duplicate=False)) for module in modules
    ]
    names = [set(dir(module)) for module in modules]  # also of buffers that are None
    tensors = [*(buffer for own in before for buffer in own.values()), *further]
    copies = {id(tensor): (tensor, tensor.clone()) for tensor in tensors}
    try:
        yield
    finally:
        for module, own, known in zip(modules, before, names, strict=True):
            now = dict(module.named_buffers(recurse=False, remove_duplicate=False))
            for name in now.keys() - own.keys():
                if name in known:
                    setattr(module, name, None)
                else:
                    delattr(module, name)
            for name, buffer in own.items():
                if now.get(name) is not buffer:
                    setattr(module, name, buffer)
        with torch.no_grad():
            for tensor, copy in copies.values():
                tensor.copy_(copy)


_PLAIN = (bool, int, float, str, Tensor, type(None))


@contextmanager
def restored_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore attributes of modules after the forward passes in the block, but not their mode.

    Numbers, texts, flags and tensors are restored.

    A tensor is the one that it was; what was written to it in place stays.
    """
    attributes = [
        {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN) and k != "training"}
        for m in modules
    ]
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            now = vars(module)
            for name, value in before.items():
                if name in now and now[name] is not value:
                    setattr(module, name, value)


@dataclass
class RunningBuffers(AroundMicroBatch):
    """Records what forward passes do to buffers, and replays it once a step."""

    model: nn.Module  # all of its forward pass runs on this rank
    ranks: int = 1  # how many ranks hold the same model
    group: dist.ProcessGroup | None = None  # of these ranks; None for the default group
    reproducible: bool = False  # refuse buffers whose changes can't be replayed
    row: int = 1  # ranks that have the same statistics, of which the first records them
    ways: BufferWays = field(default_factory=lambda: BufferWays({}))  # how others combine
    random_state: RandomState | None = None  # knows the number of the step
    looks_every: int = 100  # steps between two looks at the bits of unexplained buffers, at most
    has_values: bool = True  # False in a plan
    _norms: dict[str, BatchNorm] = field(init=False)
    # of spectral normalisation: module, and name there
    _vectors: list[tuple[nn.Module, str]] = field(init=False)
    # the vectors after a micro-batch of this step
    _iterated: list[Tensor] = field(default_factory=list)
    _counting: list[nn.Module] = field(init=False)
    _counts: Tensor | None = None  # of the step so far, of all of them
    _records: dict[int, Tensor] = field(default_factory=dict)  # micro-batch → flat statistics
    # the model's, while those of a micro-batch are in their place
    _own: list[_Buffer] = field(default_factory=list)
    _inside: bool = False  # whether they are
    # Position of a micro-batch, between its forward and its backward pass → its buffers, and the
    # calls of active norms.
    _left: dict[int, list[_Buffer]] = field(default_factory=dict)
    _calls: dict[int, list[int]] = field(default_factory=dict)
    # micro-batches whose recomputation is recorded
    _repeated: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        explained = explained_buffers(self.model)
        self._norms = explained.norms
        self._vectors = explained.vectors
        self._counting = explained.counting
        # without values nothing can be compared
        combined = self.ways if self.has_values else BufferWays({})
        self._combined = CombinedBuffers(combined, self.model, self.group, self.ranks)
        known = explained.registrations | set(self.ways.ways)
        others = {}
        for path, module in self.model.named_modules():
            for attribute, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                if (id(module), attribute) not in known:
                    name = f"{path}.{attribute}" if path else attribute
                    others[name] = BufferPlace(name, module, attribute)
        self._others = UnexplainedBuffers(
            others, self.ranks, self.group, self.reproducible, self.looks_every, self.has_values
        )

    @property
    def any(self) -> bool:
        explained = self._norms or self._vectors or self._counting
        return bool(explained or self._others.places or self._combined.any)

    def before(self, passing: MicroBatchPass) -> None:
        """Let the forward pass of a micro-batch write to buffers of its own."""
        recorded: list[tuple[nn.Module, str]] = [
            (norm, key) for norm in self._active() for key in STATISTICS
        ]
        recorded += [(module, COUNTS) for module in self._counting]
        fresh: list[_Buffer] = []
        for module, name in (*recorded, *self._vectors):
            buffer = getattr(module, name)
            if buffer is not None:
                fresh.append(
                    (module, name, torch.zeros_like(buffer) if name in _EMPTIED else buffer.clone())
                )
        self._put(fresh)
        if self._others.places:
            self._others.before_forward()

    def after_forward(self, passing: MicroBatchPass) -> None:
        """Record what the forward pass has done.

        Keep its buffers, which the backward pass may write to.
        """
        index = passing.micro_batch.index
        real = passing.micro_batch.real
        self._iterated = [getattr(module, name) for module, name in self._vectors]
        if self._counting and real:
            counts = torch.cat([module.get_buffer(COUNTS) for module in self._counting])
            self._counts = counts if self._counts is None else self._counts + counts
        if self._combined.any and real:
            self._combined.take(index)
        if self._others.places:
            self._others.after_forward(self._step)
        active = self._active()
        if active and real and index % self.row == 0:
            self._records[index] = _flat(active)
        self._left[passing.position] = [
            (module, name, getattr(module, name)) for module, name, _ in self._own
        ]
        self._calls[passing.position] = _calls_of(active)
        self._put_back()

    def before_backward(self, passing: MicroBatchPass) -> None:
        """Let what the backward pass repeats of the forward pass go on where that has stopped.

        Buffers that are combined begin anew, as nobody reads what a repetition makes of them.
        """
        self._put(self._left[passing.position])

    def after_backward(self, passing: MicroBatchPass) -> None:
        """Record what the model's own `torch.utils.checkpoint` has recomputed, as PyTorch does.

        Recomputation by `training.gradient_checkpointing` leaves statistics alone. Under a schedule
        with two halves a backward pass may recompute twice, of which the first counts.
        """
        active = self._active()
        index = passing.micro_batch.index
        recorded = (
            passing.micro_batch.real and index in self._records and index not in self._repeated
        )
        if active and recorded and _calls_of(active) != self._calls[passing.position]:
            self._repeated.add(index)
            self._records[index] = _flat(active)
        self._put_back()

    def after(self, passing: MicroBatchPass) -> None:
        """Forget the buffers of a micro-batch."""
        del self._left[passing.position], self._calls[passing.position]

    def failed(self, error: BaseException) -> None:
        """Put the model's own buffers back, and forget the step."""
        self._put_back()
        self._left.clear()
        self._calls.clear()
        self._combined.forget()

    def _put(self, buffers: Sequence[_Buffer]) -> None:
        """Put `buffers` in place of the model's own, and copies in place of combined buffers."""
        self._own = [(module, name, getattr(module, name)) for module, name, _ in buffers]
        self._inside = True
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        if self._combined.any:
            self._combined.begin()

    def _put_back(self) -> None:
        if not self._inside:
            return
        for module, name, buffer in self._own:
            setattr(module, name, buffer)
        self._own = []
        self._inside = False
        if self._combined.any:
            self._combined.end()

    @property
    def _step(self) -> int:
        """Number of the step that runs, from 1."""
        return 1 if self.random_state is None else self.random_state.step + 1

    def begin_evaluation(self) -> None:
        """Prepare for forward passes that do not belong to a step.

        Buffers that are combined are left alone by them.
        """
        if self._combined.any:
            self._combined.begin()
        if self._others.places:
            self._others.before_forward()

    def end_evaluation(self) -> None:
        """Restore what these forward passes have written, where the step combines it."""
        if self._combined.any:
            self._combined.end()
        # checks restore all buffers
        evaluates = self.random_state is not None and self.random_state.phase == "eval"
        if self._others.places and evaluates:
            self._others.after_evaluation()

    @torch.no_grad()
    def after_step(self, micro_batches_per_step: int) -> None:
        """Bring the buffers to what the step makes of them.

        All ranks come here after their last backward pass.
        """
        active = self._active()
        if active and (self.ranks > 1 or self._records):
            _replay(active, self._gathered(micro_batches_per_step, active))
            self._records.clear()
            self._repeated.clear()
        for (module, name), iterated in (
            zip(self._vectors, self._iterated, strict=True) if self._iterated else ()
        ):
            getattr(module, name).copy_(iterated)
        if self._counting:
            none = [torch.zeros_like(module.get_buffer(COUNTS)) for module in self._counting]
            # None: this rank ran a dummy alone
            counts = torch.cat(none) if self._counts is None else self._counts
            self._counts = None
            if self.ranks > 1:
                dist.all_reduce(counts, group=self.group)
            parts = torch.split(counts, [each.numel() for each in none])
            with self._others.written_by_the_step(self._counting):
                for module, part in zip(self._counting, parts, strict=True):
                    module.end_step(part)  # type: ignore[operator]
        if self._combined.any:
            self._combined.finish(micro_batches_per_step)
        if self._others.places:
            self._others.finish_step(self._step)

    def _active(self) -> list[BatchNorm]:
        """Return those that update their averages; frozen ones, in evaluation mode, do not."""
        return [module for module in self._norms.values() if module.training]

    def _gathered(self, micro_batches_per_step: int, active: list[BatchNorm]) -> Tensor:
        """Return [micro-batches, statistics] over all ranks, in order, after rows of zeros.

        Rows of zeros change nothing.
        """
        if self.ranks == 1:
            return torch.stack([self._records[index] for index in sorted(self._records)])
        rows = ceil_div(micro_batches_per_step, self.ranks)
        width = sum(2 * module.num_features + 1 for module in active)
        device = _averages(active[0])[0].device
        # the last column: micro-batch + 1
        mine = torch.zeros(rows, width + 1, dtype=torch.float64, device=device)
        for row, (index, record) in enumerate(self._records.items()):
            mine[row, :-1] = record
            mine[row, -1] = index + 1
        theirs = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(theirs, mine, group=self.group)
        table = torch.cat(theirs)
        # sorted on the device: nothing waits for it
        return table[table[:, -1].argsort(stable=True), :-1]


def keeping(buffers: Sequence[RunningBuffers], evaluate: Evaluate, *, apart: bool) -> Evaluate:
    """Return an evaluation that restores buffers which steps combine, and reports other writes.

    With `apart` each micro-batch starts from the same buffers, whichever rank runs it.
    """

    def evaluate_and_restore(
        micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator
    ) -> None:
        for window in [[each] for each in micro_batches] if apart else [micro_batches]:
            for kept in buffers:
                kept.begin_evaluation()
            try:
                evaluate(window, accumulator)
            finally:
                for kept in buffers:
                    kept.end_evaluation()

    return evaluate_and_restore


# A micro-batch's statistics, flat: of each module its means and variances, then of each module the
# number of its calls.


def _averages(module: BatchNorm) -> tuple[Tensor, Tensor]:
    mean = module.running_mean
    variance = module.running_var
    assert mean is not None
    assert variance is not None
    return mean, variance


def _flat(modules: list[BatchNorm]) -> Tensor:
    averages = [average.double() for module in modules for average in _averages(module)]
    one = torch.ones((), dtype=torch.float64, device=averages[0].device)
    calls = [
        one if m.num_batches_tracked is None else m.num_batches_tracked.double() for m in modules
    ]
    return torch.cat([*averages, torch.stack(calls)])


def _calls_of(modules: list[BatchNorm]) -> list[int]:
    """Return for each module a number that grows with its calls."""
    return [
        0 if m.num_batches_tracked is None else version_of(m.num_batches_tracked) for m in modules
    ]


def _appending(
    modules: list[BatchNorm], device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (flat statistics, row) → the statistics after the calls that `row` records.

    `row` is what these calls make of empty statistics.
    """
    width = sum(2 * m.num_features for m in modules)
    widths = torch.tensor([2 * m.num_features for m in modules], device=device)
    momentum = torch.tensor(
        [math.nan if m.momentum is None else m.momentum for m in modules], device=device
    ).double()
    cumulative = momentum.isnan()
    spread = partial(torch.repeat_interleave, repeats=widths, output_size=width)

    def append(state: Tensor, row: Tensor) -> Tensor:
        calls = state[width:]
        now = row[width:]
        share = torch.where(calls + now > 0, now / (calls + now).clamp(min=1), 0.0)
        kept = torch.where(cumulative, 1.0 - share, (1.0 - momentum) ** now)
        added = torch.where(cumulative, share, 1.0)
        return torch.cat([state[:width] * spread(kept) + row[:width] * spread(added), calls + now])

    return append


def _replay(modules: list[BatchNorm], records: Tensor) -> None:
    """Update the running statistics by `records`, [micro-batches, statistics], row by row."""
    state = _flat(modules)
    append = _appending(modules, state.device)
    for row in records:
        state = append(state, row)
    averages = state[: -len(modules)]
    calls = state[-len(modules) :]
    begin = 0
    for module, counted in zip(modules, calls, strict=True):
        for average in _averages(module):
            average.copy_(averages[begin : begin + module.num_features])
            begin += module.num_features
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.copy_(counted)
