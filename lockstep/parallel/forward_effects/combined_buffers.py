"""Combines buffers that forward passes write, by `distributed.buffers`, whichever rank runs what.

Each micro-batch of a step starts from the buffers that the step began with, and what it makes of
them is kept apart. After the step's last micro-batch the results of all of them, from all ranks,
are combined in the order of the samples:

    mean     the mean of all results, each micro-batch weighted alike rank0    the result of the
    step's first micro-batch, which rank 0 runs gather   what each has written, one after the other
    (`gathered_rows.py`)

A buffer that is 0 when a step begins, and three micro-batches that make 1, 2 and 6 of it, on ranks
0, 1 and 0: `mean` leaves 3 on both ranks, `rank0` leaves 1.

So a step's buffers depend on its micro-batches alone. A recomputation in the backward pass starts
from them, too.
"""

import fnmatch
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError, did_you_mean, listed
from lockstep.machine.accelerator import widest_float
from lockstep.models.loss_modules import PREFIX
from lockstep.parallel.forward_effects.buffer_kinds import explained_buffers
from lockstep.parallel.forward_effects.gathered_rows import (
    KEY,
    BufferPlace,
    GatheredRows,
    differs,
    in_sample_order,
)
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.reproducible.tree import Partials, nodes_of_owners, tree_all_reduce

_log = logging.getLogger("lockstep")


@dataclass
class BufferWays:
    """The ways to combine the buffers of a model and its loss function (`distributed.buffers`)."""

    patterns: dict[str, str]  # pattern → way
    # (module's id, attribute) → name, way
    ways: dict[tuple[int, str], tuple[str, str]] = field(default_factory=dict)
    # name → the patterns that name it
    patterns_of: dict[str, set[str]] = field(default_factory=dict)
    # patterns of which no buffer was written yet, on this rank
    unwritten: set[str] = field(default_factory=set)

    def places(self, model: nn.Module, way: str) -> list[BufferPlace]:
        """Return the buffers of a model, or of a stage of it, that are combined in a way."""
        combined: dict[str, BufferPlace] = {}
        for module in model.modules():
            for attribute, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                name, own = self.ways.get((id(module), attribute), ("", ""))
                if own == way:
                    combined.setdefault(name, BufferPlace(name, module, attribute))
        return list(combined.values())

    def mark_written(self, name: str) -> None:
        """Note that a forward pass has written a buffer."""
        self.unwritten -= self.patterns_of[name]


def ways_of(
    patterns: Mapping[str, str],
    model: nn.Module,
    loss: nn.Module | None,
    of_loss: Collection[str],
    kept: Collection[int],
) -> BufferWays:
    """Return how buffers are combined.

    A UsageError if a pattern names none, or two name one in two ways.

    Args:
        patterns: pattern of canonical names → way.
        model: before it is cut into stages.
        loss: a loss function that is a module.
        of_loss: canonical names of the buffers that it brings.
        kept: ids of the buffers that checkpoints have.
    """
    ways = BufferWays(dict(patterns), unwritten=set(patterns))
    named = list(_registered(model, ""))
    if loss is not None:
        named += [buffer for buffer in _registered(loss, PREFIX) if buffer.name in of_loss]
    by: dict[str, str] = {}  # name → the pattern that named it
    for pattern, way in patterns.items():
        matching = [
            buffer for buffer in named if any(_fits(name, pattern) for name in buffer.names)
        ]
        if not matching:
            _refuse_nameless(pattern, [buffer.name for buffer in named], model)
        persistent = [buffer for buffer in matching if id(buffer.places[0].tensor) in kept]
        if not persistent:
            what = (
                f"{KEY}: {pattern} names {listed([buffer.name for buffer in matching])}, which no"
                " checkpoint has"
            )
            fix = "register it to be kept: register_buffer(name, tensor), without persistent=False"
            raise UsageError(
                what, where=KEY, why="a run that resumes would go on from another state", fix=fix
            )
        for buffer in persistent:
            other = by.setdefault(buffer.name, pattern)
            if patterns[other] != way:
                what = (
                    f"{KEY}: {buffer.name} is named twice, by {other}: {patterns[other]} and by"
                    f" {pattern}: {way}"
                )
                raise UsageError(what, where=KEY, fix="write patterns that do not overlap")
            for place in buffer.places:
                ways.ways[id(place.module), place.attribute] = (buffer.name, way)
            ways.patterns_of.setdefault(buffer.name, set()).add(pattern)
    return ways


@dataclass
class _Registered:
    """A buffer with all its names and the places where it is registered."""

    names: list[str] = field(default_factory=list)  # the canonical one first
    places: list[BufferPlace] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


def _registered(model: nn.Module, prefix: str) -> Collection[_Registered]:
    """Return the buffers of a model, without those that the step itself keeps."""
    explained = explained_buffers(model).registrations
    registered: dict[int, _Registered] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if (id(module), attribute) not in explained:
                buffer = registered.setdefault(id(tensor), _Registered())
                buffer.names.append(
                    f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}"
                )
                buffer.places.append(BufferPlace(buffer.name, module, attribute))
    return registered.values()


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def _refuse_nameless(pattern: str, known: Sequence[str], model: nn.Module) -> None:
    """Refuse a pattern that names no buffer, or only such as the step keeps equal itself."""
    everything = [name for name, _ in model.named_buffers()]
    if own := [name for name in everything if _fits(name, pattern)]:
        what = (
            f"{KEY}: {pattern} names {listed(own)} alone, which the step itself keeps equal on all"
            " ranks"
        )
        raise UsageError(what, where=KEY, fix=f"leave {pattern} out")
    what = f"{KEY}: {pattern} names no buffer of the model{did_you_mean(pattern, known)}"
    fix = (
        f"write names, or patterns with *, of {listed(known)}"
        if known
        else "leave it out: the model has no buffers"
    )
    raise UsageError(what, where=KEY, fix=fix)


def warn_of_unwritten(placed: ParallelModel, ways: BufferWays) -> None:
    """Warn, early in the second step, of patterns whose buffers no rank wrote in the first one."""
    calls = 0

    def check(_step: int) -> None:
        """Warn, after the second step, of patterns whose buffers no rank has written."""
        nonlocal calls
        calls += 1
        if calls != 2:  # the first call comes before the first step, or after it
            return
        flags = torch.tensor(
            [pattern in ways.unwritten for pattern in ways.patterns], dtype=torch.int32
        )
        flags = flags.to(placed.random_state.device)
        if placed.layout.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        unwritten = [
            pattern for pattern, flag in zip(ways.patterns, flags.tolist(), strict=True) if flag
        ]
        if unwritten:
            _log.warning(
                "warning: %s: %s: no forward pass of the first step has written such a buffer",
                KEY,
                listed(unwritten),
            )

    placed.checks.append(check)


class CombinedBuffers:
    """The buffers of one model, or of a stage of it, that are combined once a step."""

    def __init__(
        self, ways: BufferWays, model: nn.Module, group: dist.ProcessGroup | None, ranks: int
    ) -> None:
        self._ways = ways
        self._group = group
        self._ranks = ranks
        self._mean, self._first, gathered = (
            ways.places(model, way) for way in ("mean", "rank0", "gather")
        )
        self._rows = GatheredRows(gathered, group, ranks)
        self._places = [*self._mean, *self._first, *gathered]
        names = {place.name for place in self._places}
        self._registrations = [  # of all of them, tied ones several times
            BufferPlace(name, module, attribute)
            for module in model.modules()
            for attribute, _ in module.named_buffers(recurse=False, remove_duplicate=False)
            if (name := ways.ways.get((id(module), attribute), ("", ""))[0]) in names
        ]
        self._began: dict[str, Tensor] = {}  # name → the buffer that the step began with
        # micro-batch → what it made of the means, and of the first ones
        self._results: dict[int, list[Tensor]] = {}
        self._looked = False  # whether a step has shown which of them are written

    @property
    def any(self) -> bool:
        """Return whether there is such a buffer."""
        return bool(self._places)

    def begin(self) -> None:
        """Register copies of the buffers, for a forward or a backward pass."""
        self._began = {place.name: place.tensor for place in self._places}
        self.begin_again()

    def begin_again(self) -> None:
        """Register new copies of the buffers that the step began with."""
        copies = {name: tensor.clone() for name, tensor in self._began.items()}
        for place in self._registrations:
            place.put(copies[place.name])

    def end(self) -> None:
        """Register the buffers that the step began with."""
        for place in self._registrations:
            place.put(self._began[place.name])

    @torch.no_grad()
    def take(self, index: int) -> None:
        """Take what the forward pass of a micro-batch has made of the copies."""
        for place in self._places:
            before = self._began[place.name]
            after = place.tensor
            if after.shape != before.shape:
                what = (
                    f"{KEY}: the forward pass changes the shape of {place.name},"
                    f" {list(before.shape)} → {list(after.shape)}, and results are combined element"
                    " by element"
                )
                fix = (
                    "register it with its last shape; one that is shaped by the first forward pass"
                    " has it once the model was called before it is handed over: model(*inputs of"
                    " one batch)"
                )
                raise UsageError(what, where=KEY, fix=fix)
            if not self._looked and bool(differs(before, after).any()):
                self._ways.mark_written(place.name)
        wanted = self._mean if index else [*self._mean, *self._first]
        self._results[index] = [place.tensor.detach() for place in wanted]
        self._rows.take(index, self._began)

    def forget(self) -> None:
        """Forget the micro-batches of a step that failed."""
        self._results.clear()
        self._rows.forget()

    @torch.no_grad()
    def finish(self, micro_batches: int) -> None:
        """Write the step's results to the buffers that it began with; all ranks call it."""
        self._looked = True
        began = {place.name: place.tensor for place in self._places}
        if self._mean:
            self._write_mean(micro_batches, [began[place.name] for place in self._mean])
        for position, each in enumerate(self._first):
            buffer = began[each.name]
            own = (
                {0: self._results[0][len(self._mean) + position][None]}
                if 0 in self._results
                else {}
            )
            result = in_sample_order(own, buffer[None], micro_batches, self._group, self._ranks)[0]
            buffer.copy_(result[0])
        if self._rows.any:
            self._rows.finish(micro_batches, began)
        self._results.clear()

    def _write_mean(self, micro_batches: int, buffers: list[Tensor]) -> None:
        """Write means over micro-batches, which are the same on any number of ranks.

        Sums are taken in the widest type, up the tree.

        A buffer that no micro-batch has written keeps its bits.
        """
        like = _flat(buffers, buffers)
        partials = Partials(micro_batches)
        for index in sorted(self._results):
            partials.add(index, [_flat(buffers, self._results[index][: len(buffers)])])
        total = self._summed(partials, like, micro_batches)
        written = total[: len(buffers)]
        sums = total[len(buffers) :]
        pieces = torch.split(sums / micro_batches, [_numbers(buffer).numel() for buffer in buffers])
        for buffer, piece, times in zip(buffers, pieces, written, strict=True):
            if buffer.is_complex():
                mean = torch.view_as_complex(piece.view(*buffer.shape, 2))
            else:
                mean = (piece if buffer.is_floating_point() else piece.round()).view_as(buffer)
            buffer.copy_(torch.where(times > 0, mean.to(buffer.dtype), buffer))

    def _summed(self, partials: Partials, like: Tensor, micro_batches: int) -> Tensor:
        """Return the sum over a step's micro-batches, up the tree over all ranks."""
        if self._ranks == 1:
            return partials.single()
        whose = torch.zeros(micro_batches, dtype=torch.int64, device=like.device)
        for index in self._results:
            whose[index] = dist.get_rank(self._group) + 1
        dist.all_reduce(whose, group=self._group)
        # host waits for the device
        nodes = nodes_of_owners([owner - 1 for owner in whose.tolist()], self._ranks)
        sums = [
            values[0]
            for node in nodes[dist.get_rank(self._group)]
            if (values := partials.take(node))
        ]
        total = torch.empty_like(like)
        group = self._group or dist.group.WORLD
        assert group is not None
        tree_all_reduce(sums, total, micro_batches, group, nodes)
        return total


def _flat(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """Return whether each buffer has changed, then all buffers' numbers, in the widest type."""
    wide = widest_float(before[0].device)
    changed = [differs(old, new).any() for old, new in zip(before, after, strict=True)]
    return torch.cat([torch.stack(changed).to(wide), *(_numbers(each).to(wide) for each in after)])


def _numbers(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
