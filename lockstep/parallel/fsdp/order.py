"""The order of FSDP2's gathers, where the data decide which units a forward pass calls.

FSDP2 gathers a unit from all ranks at once, forward and backward, and reduces its gradients from
all of them. A rank whose data leave a unit out (a tower for images, a layer that is dropped at
random) would pair the next unit's messages with this one's. So the ranks agree in their first
passes on an order, unit by unit, and follow it from then on without a message: a rank joins the
gathers and reductions of a unit that it leaves out, with gradients of zeros.

A model of units 1 (text), 2 (images) and 3 (head); 0 is the root, 4 stands for the end. In the
first step rank 0 has text alone, rank 1 both. They agree by a minimum of the units that they are
about to call:

    rank 0 is about to call     rank 1     least
    1                           1          1: both call it
    3                           2          2: rank 1 calls it, rank 0 joins
    3                           3          3: both call it
    4                           4          4: the pass is over

From then on the order is [1, 2, 3] on both. In a step without images each of them joins unit 2
before it calls 3, and sends nothing to find out. A rank that calls what the order does not have
there waits until all others do so, too (`_meet`), and then they agree unit by unit again.

FSDP2 reduces a unit's gradients when those of its inputs are there, or, if none of them needs any,
at the end of the backward pass. A rank that left out what made the inputs has to do as the others:
its inputs are attached to the token.

What a checkpoint of the model's own gathers once more in the backward pass can't be joined: that is
an error.

Tests: tests/parallel/fsdp/test_fsdp_order.py, tests/parallel/test_worked_examples.py
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import IntEnum
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.execution.passes import MicroBatchPass
from lockstep.parallel.fsdp.order_refusals import not_joined, not_recomputed, too_old, unexpected
from lockstep.parallel.fsdp.recomputation import GatheredAgain
from lockstep.parallel.fsdp.units import Unit
from lockstep.torch_compat.backward_pass import graph_task
from lockstep.torch_compat.default_store import default_store
from lockstep.torch_compat.fsdp_state import TAKES_ZEROS, pass_through, repeats_apart
from lockstep.torch_compat.pytree import tree_leaves, tree_map_only

_ROOT = 0  # the position of the model itself among the units
# seconds in which the other ranks, too, come to a unit that the order does not have there
_PATIENCE = 20.0


class _Inputs(IntEnum):
    """The part of a unit's inputs in the backward pass; of several ranks the least counts."""

    NEED_GRADIENTS = 0
    NEED_NONE = 1  # they are of floating point, but what made them is not trained
    ARE_INTEGERS = 2
    NO_BACKWARD = 3  # nothing is trained in the unit or before it, or the call is under `no_grad`


@dataclass
class _LearnedOrder:
    """Holds what all ranks know of passes with gradients, or of those without."""

    is_learning: bool = True  # the first passes: ranks agree in each of them, unit by unit
    order: list[int] | None = None  # positions of units; None until a pass has ended
    inputs: dict[int, _Inputs] = field(default_factory=dict)  # of units, by position
    # units that no rank has called yet: their inputs are a guess
    assumed: set[int] = field(default_factory=set)


@dataclass
class _ForwardPass:
    """The forward pass that this rank runs, or ran last."""

    with_gradients: bool
    group: dist.ProcessGroup | None  # the ranks that exchange messages in it; None: all
    learned: _LearnedOrder  # of such passes
    runs: bool = False  # it has begun, with messages, and not ended
    agrees: bool = False  # unit by unit, instead of by the order
    called: list[int] = field(default_factory=list)  # units, called or joined
    token: Tensor | None = None  # has gone through the units that were joined


class UnitOrder:
    """Has all ranks gather units in one order, those that their data leave out as well.

    `lockstep.parallel.fsdp.calls` tells it of passes and calls.

    Args:
        units: the root first.
        groups: makes gradients? → ranks that exchange messages for a unit in each such pass, and
            run the same number of them. Without an entry there are no messages but those of a
            step's last pass.
        everyone: ranks that exchange messages in a step's last pass. None, here and above: all
            ranks.
        joins: whether ranks join units that their data leave out; else that is an error. Stages of
            a pipeline, whose passes overlap, can't.
    """

    _made = count()

    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        groups: dict[bool, dist.ProcessGroup | None],
        everyone: dist.ProcessGroup | None,
        *,
        joins: bool = True,
    ) -> None:
        self._units = list(units)
        self._device = device
        self._groups = groups
        self._everyone = everyone
        self._joins = joins
        self._end = len(units)  # the position that stands for the end of a pass
        # the same on all ranks, which place their models in one order
        self._number = next(self._made)
        # else what is recomputed sends no message, or nothing is joined
        self._gathers_again = joins and False in groups
        self._trained = [
            any(p.requires_grad for p in unit.module.parameters()) for unit in self._units
        ]
        names = [unit.name for unit in self._units[1:]]
        self._nested = {name for a in names for b in names if _in(a, b) for name in (a, b)}

        # what is learned from pass to pass
        self._learned = {True: _LearnedOrder(), False: _LearnedOrder()}  # with gradients?
        self._again = GatheredAgain(len(units), device)
        self._met_again: set[tuple[tuple[int, ...], int]] = set()  # (ranks, position)
        self._passes: Counter[tuple[int, ...]] = Counter()  # by ranks that exchange messages

        # of this micro-batch
        self._is_last = False  # of its step
        # roots of the backward pass, beside the loss, with their gradients
        self._roots: list[tuple[Tensor, Tensor]] = []
        self._given_token: set[int] = set()  # units whose inputs were attached to the token
        self._pass = _ForwardPass(True, None, self._learned[True])

    # ---- what happens, in this order ----

    def begin_pass(self, passing: MicroBatchPass) -> None:
        """Begin a micro-batch."""
        self._roots = passing.further_roots
        self._is_last = passing.last
        self._given_token.clear()

    def before_call(self, position: int, args: Any, kwargs: Any) -> Any:
        """Join what other ranks gather before the unit at `position`, which is about to be called.

        Return other (args, kwargs) for it, or None.
        """
        is_repeated = graph_task() != -1  # by a backward pass
        if position == _ROOT:
            return None if is_repeated else self._begin_forward()
        if is_repeated:
            return self._before_repeated_call(position, args, kwargs)
        return self._before_first_call(position, args, kwargs)

    def end_forward(self, outputs: Any) -> Any:
        """Join the rest of the pass, before FSDP2 ends the root's forward pass.

        The root's backward pass comes first. Return other outputs of the model, or None.
        """
        now = self._pass
        if not now.runs or graph_task() != -1:
            return None
        self._arrive(self._end, _Inputs.NO_BACKWARD)
        now.runs = False
        if now.agrees:
            self._learn_from(now)
        if now.token is None or not now.token.requires_grad:
            return None
        # the loss may use none of the outputs that are found here
        self._roots.append((now.token, torch.zeros_like(now.token)))
        return _attached(outputs, now.token)

    def end_pass(self, passing: MicroBatchPass) -> None:
        """Complete the order after the first step."""
        learned = self._learned[True]
        if passing.last and learned.is_learning and learned.order is not None:
            self._complete(with_gradients=True)

    def _begin_forward(self) -> None:
        """Begin a forward pass: find which ranks exchange messages in it, and if they agree."""
        with_gradients = torch.is_grad_enabled()
        learned = self._learned[with_gradients]
        with_everyone = with_gradients and self._is_last
        if not with_everyone and with_gradients not in self._groups:
            # It sends nothing. Its backward pass may gather units again, among the ranks before.
            self._pass = _ForwardPass(with_gradients, self._pass.group, learned)
            return
        group = self._everyone if with_everyone else self._groups[with_gradients]
        self._pass = _ForwardPass(
            with_gradients, group, learned, runs=True, agrees=learned.is_learning
        )
        self._passes[self._ranks()] += 1
        self._again.begin()

    def _before_first_call(self, position: int, args: Any, kwargs: Any) -> Any:
        """Note a unit's call; let its backward pass run also where its inputs need no gradient."""
        now = self._pass
        if not now.runs:
            return None
        inputs = self._inputs_of(position, (args, kwargs))
        self._arrive(position, inputs)
        needed = now.learned.inputs
        if inputs is _Inputs.NEED_NONE and needed[position] is _Inputs.NEED_GRADIENTS:
            self._given_token.add(position)
            return _attached((args, kwargs), self._token())
        return None

    def _before_repeated_call(self, position: int, args: Any, kwargs: Any) -> Any:
        """Make a unit's recomputation save what its forward pass saved, and gather on all ranks."""
        may_gather = self._pass.with_gradients and self._gathers_again
        if may_gather and repeats_apart(self._units[position].module):
            key = (self._ranks(), position)
            if key not in self._met_again:
                self._meet(position, not_recomputed(self._units[position].name))
                self._met_again.add(key)
                self._again.known.add(position)
        was_given = position in self._given_token
        if was_given and self._inputs_of(position, (args, kwargs)) is _Inputs.NEED_NONE:
            return _attached((args, kwargs), self._new_token())
        return None

    def _inputs_of(self, position: int, inputs: Any) -> _Inputs:
        if not torch.is_grad_enabled():
            return _Inputs.NO_BACKWARD
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad for tensor in tensors):
            return _Inputs.NEED_GRADIENTS
        if not self._trained[position]:
            return _Inputs.NO_BACKWARD
        floating = any(tensor.is_floating_point() for tensor in tensors)
        return _Inputs.NEED_NONE if floating else _Inputs.ARE_INTEGERS

    def _token(self) -> Tensor:
        """Return the token of this pass, as the units that were joined have left it."""
        if self._pass.token is None:
            self._pass.token = self._new_token()
        return self._pass.token

    def _new_token(self) -> Tensor:
        return torch.zeros(1, device=self._device, requires_grad=self._pass.with_gradients)

    # ---- following the order, or agreeing unit by unit ----

    def _arrive(self, position: int, inputs: _Inputs) -> None:
        """Join what other ranks gather before the unit at `position`."""
        now = self._pass
        again = False
        if position != self._end:
            may_gather = now.with_gradients and self._gathers_again
            again = may_gather and self._again.call(position)
        if now.agrees:
            self._agree(position, inputs)
            return
        order = now.learned.order
        assert order is not None, "ranks have agreed on one"
        if position != self._end:
            is_expected = position in order[len(now.called) :]
            if again or not is_expected or self._is_news(position, inputs):
                self._agree_from_here(position, inputs, unless=self._unknown(position, again=again))
                return
        while len(now.called) < len(order):
            due = order[len(now.called)]
            if due == position:
                now.called.append(position)
                return
            # right if all ranks leave it out
            if not self._joins or self._is_gathered_again(due):
                name = self._units[due].name
                refusal = not_recomputed(name) if self._joins else not_joined(name, joins=False)
                self._agree_from_here(position, inputs, unless=refusal)
                return
            self._join(due, alone=order.count(due) == 1)

    def _unknown(self, position: int, *, again: bool) -> UsageError:
        """Return the error of a call that the order does not have there, or that is gathered again.

        It is raised if other ranks do not make it, too.
        """
        name = self._units[position].name
        return not_recomputed(name) if again else unexpected(name, joins=self._joins)

    def _agree_from_here(self, position: int, inputs: _Inputs, *, unless: UsageError) -> None:
        """Leave the order for this pass, together with all ranks; else raise the error."""
        self._meet(position, unless)
        self._pass.agrees = True
        self._agree(position, inputs)

    def _is_news(self, position: int, inputs: _Inputs) -> bool:
        """Return whether other ranks must know of these inputs, as they reduce at other times."""
        if not self._joins:
            return False
        learned = self._pass.learned
        known = learned.inputs.get(position, inputs)
        guessed = position in learned.assumed
        return inputs < known or (guessed and inputs > known and inputs is not _Inputs.NEED_NONE)

    def _is_gathered_again(self, position: int) -> bool:
        return self._pass.with_gradients and position in self._again.known

    def _agree(self, position: int, inputs: _Inputs) -> None:
        """Find out, unit by unit, where the ranks are; those ahead join the others' units."""
        now = self._pass
        known = now.learned.inputs
        # One number for a unit and its inputs, so that the least is that of the first unit, and
        # among its ranks of the least inputs. The second one tells where the last rank is.
        kinds = len(_Inputs)
        while True:
            mine = [position * kinds + inputs, -position]
            # host waits for the copy, in the first passes
            both = torch.tensor(mine, device=self._device)
            dist.all_reduce(both, op=dist.ReduceOp.MIN, group=now.group)
            least, last = both.tolist()  # host waits for the device
            first, theirs = divmod(least, kinds)
            if first == self._end:
                return
            if first in now.learned.assumed:
                now.learned.assumed.remove(first)
                del known[first]
            known[first] = min(_Inputs(theirs), known.get(first, _Inputs.NO_BACKWARD))
            # Ranks are at different units: some have to join, and if they can't, all say so. Was
            # `first` called already, an order would have to have it twice, and whose second call
            # it is no one can tell.
            if first != -last:
                refusal = self._why_not_joined(first, alone=first not in now.called)
                if refusal is not None:
                    raise refusal
            if first == position:
                now.called.append(position)
                return
            self._join(first, alone=True)

    def _meet(self, position: int, error: UsageError) -> None:
        """Wait until all ranks call this unit here, where the order does not have it.

        The error, if some do not.
        """
        ranks = self._ranks()
        now = self._pass
        where = f"{ranks}/{now.with_gradients}/{self._passes[ranks]}/{len(now.called)}/{position}"
        key = f"lockstep/fsdp_order/{self._number}/{where}"
        store = default_store()
        until = time.monotonic() + _PATIENCE
        # By the store, not by a collective: other ranks may be in one of FSDP2's.
        arrived = store.add(key, 1)
        while arrived < len(ranks):
            if time.monotonic() > until:
                raise error
            time.sleep(0.01)
            try:
                arrived = store.add(key, 0)
            except dist.DistError:
                return  # the rank that hosts the store has failed: the next message says so

    def _ranks(self) -> tuple[int, ...]:
        group = self._pass.group
        if group is None:
            return tuple(range(dist.get_world_size()))
        return tuple(dist.get_process_group_ranks(group))

    # ---- joining the messages of a unit ----

    def _join(self, position: int, *, alone: bool) -> None:
        """Take part in the messages of a unit; `alone`: it is called once in a pass."""
        refusal = self._why_not_joined(position, alone=alone)
        if refusal is not None:
            raise refusal
        now = self._pass
        unit = self._units[position].module
        now.called.append(position)
        token = self._token()
        if not self._has_backward(position):
            pass_through(unit, token.detach(), token.detach())
        elif now.learned.inputs[position] is _Inputs.NEED_GRADIENTS:
            now.token = pass_through(unit, token, None)
        else:
            now.token = pass_through(unit, token.detach(), token)

    def _why_not_joined(self, position: int, *, alone: bool) -> UsageError | None:
        """Return why a rank that leaves this unit out can't join its messages; None if it can.

        `alone`: the unit is called once in a pass. The answer is the same on all ranks.
        """
        name = self._units[position].name
        if not self._joins:
            return not_joined(name, joins=False)
        if self._is_gathered_again(position):
            return not_recomputed(name)
        backward = self._has_backward(position)
        # Trained, and called under `no_grad`: a reentrant checkpoint may call it again in the
        # backward pass.
        unclear = self._pass.with_gradients and not backward and self._trained[position]
        if not alone or unclear or name in self._nested:
            return not_joined(name, joins=True)
        if not self._can_join(position, backward=backward):
            return too_old(name)
        return None

    def _has_backward(self, position: int) -> bool:
        now = self._pass
        return now.with_gradients and now.learned.inputs[position] is not _Inputs.NO_BACKWARD

    def _can_join(self, position: int, *, backward: bool) -> bool:
        """Return whether a rank can join this unit's messages without calling it.

        Messages must come one unit after another, which those of nested units do not.
        """
        return self._units[position].name not in self._nested and (not backward or TAKES_ZEROS)

    # ---- learning the order ----

    def _learn_from(self, ended: _ForwardPass) -> None:
        """Add the units of a pass in which ranks have agreed to the order."""
        if ended.with_gradients and self._gathers_again:
            position = self._again.agree(ended.group)
            if position is not None:
                raise not_recomputed(self._units[position].name)
        learned = ended.learned
        learned.order = _merged(learned.order or [], ended.called)
        if not self._joins:
            learned.is_learning = False
        elif not ended.with_gradients and learned.is_learning:
            self._complete(with_gradients=False)

    def _complete(self, *, with_gradients: bool) -> None:
        """Complete an order by the units that no rank has called yet.

        The data of a later pass may need them.
        """
        learned = self._learned[with_gradients]
        learned.is_learning = False
        if with_gradients:
            self._merge_replicas()
        order = learned.order
        assert order is not None, "a pass has ended"
        known = learned.inputs
        for position in range(1, len(self._units)):
            backward = with_gradients and self._trained[position]
            if position in order or not self._can_join(position, backward=backward):
                continue
            later = (at for at, other in enumerate(order) if other > position)
            order.insert(next(later, len(order)), position)
            known[position] = _Inputs.NEED_GRADIENTS if backward else _Inputs.NO_BACKWARD
            if backward:
                learned.assumed.add(position)
                # What it makes may become the input of any other.
                for other, inputs in known.items():
                    if inputs is _Inputs.NEED_NONE:
                        known[other] = _Inputs.NEED_GRADIENTS

    def _merge_replicas(self) -> None:
        """Give all ranks one order: replicas with other micro-batches have learned others."""
        learned = self._learned[True]
        every: list[Any] = [None] * dist.get_world_size(self._everyone)
        mine = (learned.order, learned.inputs, self._again.known)
        dist.all_gather_object(every, mine, group=self._everyone)
        learned.order = []
        learned.inputs = {}
        for order, known, again in every:
            self._again.known.update(again)
            learned.order = _merged(learned.order, order)
            for position, inputs in known.items():
                learned.inputs[position] = min(inputs, learned.inputs.get(position, inputs))


def _attached(tensors: Any, token: Tensor) -> Any:
    """Return floating-point tensors, in any structure, as if the token had made them too."""
    apply: Any = _Attached.apply
    return tree_map_only(
        Tensor, lambda leaf: apply(leaf, token) if leaf.is_floating_point() else leaf, tensors
    )


class _Attached(torch.autograd.Function):
    """Returns `x` as a result of `token`, too, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].new_zeros(1, dtype=torch.float32)


def _in(inner: str, outer: str) -> bool:
    return inner.startswith(f"{outer}.")


def _merged(one: list[int], other: list[int]) -> list[int]:
    """Return an order in which both are contained, with units left out.

    >>> _merged([1, 3, 4], [1, 2, 4])
    [1, 3, 2, 4]
    """
    merged: list[int] = []
    for kind, begin, end, from_other, to_other in SequenceMatcher(
        None, one, other, autojunk=False
    ).get_opcodes():
        merged += one[begin:end]
        merged += [] if kind == "equal" else other[from_other:to_other]
    return merged
