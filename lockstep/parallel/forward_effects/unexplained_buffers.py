"""Buffers that forward passes write, without a rule that combines results of several ranks.

They are noticed in the step in which a forward pass first writes them, by their versions. What
hides from these (`.data`, NumPy) is noticed in the same step where buffers are small and in host
memory, by comparing them with copies: half a microsecond a buffer. Elsewhere a comparison would
take long, or make the host wait: there it is noticed by the sum of the bits, after steps that
become rarer: 1, 2, 4, 8 …, and wherever replicas are compared. Under `reproducible` such a buffer
is refused; else it is a warning, and ranks take rank 0's after each step. An evaluation that writes
them is told, too.

Tests: tests/parallel/forward_effects/test_combined_buffers.py,
tests/parallel/forward_effects/test_state_between_calls.py
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.parallel.forward_effects.gathered_rows import KEY, BufferPlace
from lockstep.tensors import fingerprint
from lockstep.torch_compat.tensor_versions import version_of

_log = logging.getLogger("lockstep")

_FEW_ELEMENTS = 1 << 14  # a copy of them is compared in microseconds

_Marks = dict[str, tuple[int, int]]  # name → the tensor's id, and its version


@dataclass
class UnexplainedBuffers:
    """The other buffers of one model, or of a stage of it."""

    places: Mapping[str, BufferPlace]  # by name
    ranks: int = 1  # how many ranks hold the same model
    group: dist.ProcessGroup | None = None  # of these ranks; None for the default group
    reproducible: bool = False
    looks_every: int = 100  # steps between two looks at the bits, at most
    has_values: bool = True  # False in a plan
    # names of those that a forward pass of any rank has written, the same list on all ranks
    _written: list[str] = field(default_factory=list)
    # name → the step in which this rank first saw it written, in words
    _when: dict[str, str] = field(default_factory=dict)
    _marks: _Marks = field(default_factory=dict)  # before the forward pass
    _registered: dict[str, Tensor] = field(default_factory=dict)  # as checkpoints have them
    # names for which a warning was given: written in an evaluation, or replaced by a tensor of
    # another shape or type
    _evaluated: set[str] = field(default_factory=set)
    _replaced: set[str] = field(default_factory=set)
    # names of those that the step itself writes, after its passes
    _by_step: set[str] = field(default_factory=set)
    _bits: Tensor | None = None  # sums of the buffers' bits at the last look
    _looked: int = 0  # the step of the last look
    _steps: int = 0  # steps of this process so far
    # name → copy of a small buffer, as the step found it
    _copies: dict[str, Tensor] = field(default_factory=dict)
    _in_step: bool = False  # from a step's first forward pass to its end

    def before_forward(self) -> None:
        """Note what a forward pass begins with."""
        self._marks = self._marks_now()
        if not self._registered:
            self._registered = {name: place.tensor for name, place in self.places.items()}
            self._bits = self._bits_now()
            if self.has_values:
                self._copies = {
                    name: buffer.detach().clone()
                    for name, buffer in self._registered.items()
                    if buffer.device.type == "cpu" and buffer.numel() <= _FEW_ELEMENTS
                }
        if not self._in_step:
            self._in_step = True
            for name in self._unlike_copies():  # written between the steps, by the caller
                self._copies[name] = self.places[name].tensor.detach().clone()

    def after_forward(self, step: int) -> None:
        """Note which of them the forward pass has written."""
        now = self._marks_now()
        for name, mark in self._marks.items():
            if now[name] != mark and name not in self._when:
                self._when[name] = f" in step {step}"

    @contextmanager
    def written_by_the_step(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Count writes in the block as the step's own work, which is alike on all ranks.

        It is the `end_step` of `modules`, whose buffers count as its work in any case: a write
        through `.data` leaves no version.
        """
        own = {id(module) for module in modules}
        self._by_step.update(name for name, place in self.places.items() if id(place.module) in own)
        before = self._marks_now()
        yield
        now = self._marks_now()
        self._by_step.update(name for name, mark in before.items() if now[name] != mark)

    @torch.no_grad()
    def finish_step(self, step: int) -> None:
        """Notice what the step has written; every rank calls it after its last backward pass."""
        self._steps += 1
        self._in_step = False
        for name in self._unlike_copies():
            if name not in self._by_step:
                self._when.setdefault(name, f" in step {step}")
        new = [name for name in self._when if name not in self._written]
        if new and self.reproducible and self._steps > 1:  # seen by this rank alone, perhaps
            raise self._error(new)
        if self._steps & (self._steps - 1) == 0 or step % self.looks_every == 0:
            self._look(step)
        for name in self._written:
            self._put_back(name)
        if self._written and self.ranks > 1:
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            for name in self._written:
                dist.broadcast(self.places[name].tensor, src=source, group=self.group)

    def after_evaluation(self) -> None:
        """Report what the forward passes of an evaluation have written since `before_forward`."""
        now = self._marks_now()
        written = {name for name, mark in self._marks.items() if now[name] != mark}
        written.update(self._unlike_copies())
        self._in_step = False
        new = [name for name in self.places if name in written - self._evaluated]
        if not new:
            return
        what = f"the forward pass changes the buffer {listed(new)} in evaluation, too"
        why = "each rank evaluates other samples, so buffers differ after it"
        fix = "write it only `if self.training:`"
        if self.reproducible:
            raise UsageError(what, where="distributed.reproducible", why=why, fix=fix)
        self._evaluated.update(new)
        if self.ranks > 1:
            _log.warning("warning: %s: %s; %s", what, why, fix)

    def _look(self, step: int) -> None:
        """Compare bits, and tell all ranks what this one has seen."""
        names = list(self.places)
        now = self._bits_now()
        if now is not None and self._bits is not None:
            hidden = (
                f" in step {step}"
                if step <= self._looked + 1
                else f" in steps {self._looked + 1} to {step}"
            )
            # host waits for the device
            for name, differs in zip(names, (now != self._bits).tolist(), strict=True):
                if differs and name not in self._by_step and name not in self._copies:
                    self._when.setdefault(name, hidden)
        self._bits = now
        self._looked = step
        seen = [name for name in names if name in self._when]
        if self.ranks > 1:
            flags = torch.tensor([name in self._when for name in names], dtype=torch.int32)
            flags = flags.to(next(iter(self.places.values())).tensor.device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            seen = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        if new := [name for name in seen if name not in self._written]:
            if self.reproducible:
                raise self._error(new)
            self._written = seen
            _log.warning(
                "warning: %s: %s; ranks take rank 0's after each step", self._description(new), _WHY
            )

    def _put_back(self, name: str) -> None:
        """Copy a tensor that a forward pass has put in a buffer's place into that buffer.

        Checkpoints save the buffer, and would miss the tensor.
        """
        place = self.places[name]
        own = self._registered[name]
        now = place.tensor
        if now is own:
            return
        if now.shape == own.shape and now.dtype == own.dtype:
            own.copy_(now)
            place.put(own)
        elif name not in self._replaced:
            self._replaced.add(name)
            _log.warning(
                "warning: the forward pass replaces the buffer %s, %s %s, by one of %s %s, which"
                " checkpoints do not have",
                name,
                own.dtype,
                list(own.shape),
                now.dtype,
                list(now.shape),
            )

    def _marks_now(self) -> _Marks:
        buffers = {name: place.tensor for name, place in self.places.items()}
        return {name: (id(buffer), version_of(buffer)) for name, buffer in buffers.items()}

    def _unlike_copies(self) -> list[str]:
        """Return the small buffers that differ from their copies, but those seen written before."""
        for name in self._when:
            self._copies.pop(name, None)
        now = [self.places[name].tensor for name in self._copies]
        if all(map(torch.equal, now, self._copies.values())):
            return []
        return [
            name
            for name, copy in self._copies.items()
            if not _same_bits(self.places[name].tensor, copy)
        ]

    def _bits_now(self) -> Tensor | None:
        if not self.has_values:
            return None
        return torch.stack([fingerprint(place.tensor.detach()) for place in self.places.values()])

    def _description(self, names: list[str]) -> str:
        """Return the sentence with which the warning and the error begin."""
        since = ""
        if self._steps != 1:
            first = self._when.get(names[0], "")
            since = f", first{first}" if first else ", first seen on another rank"
        return f"the forward pass changes the buffer {listed(names)}{since}"

    def _error(self, names: list[str]) -> UsageError:
        fix = (
            f"say how the results of micro-batches combine, {KEY}: {{{names[0]}: mean}} (or gather,"
            " rank0); or compute it outside of the forward pass, or set distributed.reproducible:"
            " false"
        )
        return UsageError(
            self._description(names), where="distributed.reproducible", why=_WHY, fix=fix
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # a nan is unequal to itself, its bits are not
    return torch.equal(one, other) or bool(fingerprint(one) == fingerprint(other))


_WHY = "how it changes is the model's own, so it depends on which micro-batches a rank runs"
