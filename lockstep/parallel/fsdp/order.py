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
from difflib import SequenceMatcher
from enum import IntEnum
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.execution.passes import MicroBatchPass
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
        self._end = len(units)
        self._groups = groups
        self._everyone = everyone
        self._joins = joins
        # the same on all ranks, which place their models in one order
        self._number = next(self._made)
        self._group: dist.ProcessGroup | None = None  # of this pass
        # with gradients? → positions of units, in the order of a pass
        self._orders: dict[bool, list[int]] = {}
        self._learning = {True: True, False: True}
        # of the backward pass, beside the loss, with their gradients
        self._roots: list[tuple[Tensor, Tensor]] = []
        self._mode = True
        self._last = False
        self._inside = False
        self._passes: Counter[tuple[int, ...]] = Counter()  # by ranks that exchange messages
        self._called: list[int] = []  # units of this pass, called or joined
        self._inputs: dict[bool, dict[int, _Inputs]] = {
            True: {},
            False: {},
        }  # of units, by position
        # units that no rank has called yet with gradients: their inputs are a guess
        self._assumed: set[int] = set()
        self._agrees = False  # unit by unit, in this pass
        self._token: Tensor | None = None  # has gone through the units that were joined
        # units whose inputs were attached to it, in this micro-batch
        self._given_token: set[int] = set()
        self._again = GatheredAgain(len(units), device)
        # else what is recomputed sends no message, or nothing is joined
        self._gathers = joins and False in groups
        # (ranks, position): they gather the unit again together
        self._met: set[tuple[tuple[int, ...], int]] = set()
        self._trained = [
            any(p.requires_grad for p in unit.module.parameters()) for unit in self._units
        ]
        names = [unit.name for unit in self._units[1:]]
        self._nested = {name for a in names for b in names if _in(a, b) for name in (a, b)}

    def begin_pass(self, passing: MicroBatchPass) -> None:
        """Begin a micro-batch."""
        self._roots = passing.further_roots
        self._last = passing.last
        self._given_token.clear()

    def end_pass(self, passing: MicroBatchPass) -> None:
        """Complete the order after the first step."""
        if passing.last and self._learning[True] and True in self._orders:
            self._learn(with_gradients=True)

    def before_call(self, position: int, args: Any, kwargs: Any) -> Any:
        """Join what other ranks gather before the unit at `position`, which is about to be called.

        Return other (args, kwargs) for it, or None.
        """
        is_repeated = graph_task() != -1  # by a backward pass
        if position == _ROOT:
            return None if is_repeated else self._begin()
        return (self._repeat if is_repeated else self._before)(position, args, kwargs)

    def _begin(self) -> None:
        """Begin a forward pass: find which ranks exchange messages in it, and if they agree."""
        self._mode = torch.is_grad_enabled()
        with_everyone = self._mode and self._last
        self._inside = with_everyone or self._mode in self._groups
        if not self._inside:
            return
        self._group = self._everyone if with_everyone else self._groups[self._mode]
        self._passes[self._ranks()] += 1
        self._called = []
        self._token = None
        self._agrees = self._learning[self._mode]
        self._again.begin()

    def _before(self, position: int, args: Any, kwargs: Any) -> Any:
        """Note a unit's call; let its backward pass run also where its inputs need no gradient."""
        if not self._inside:
            return None
        inputs = self._inputs_of(position, (args, kwargs))
        self._arrive(position, inputs)
        if (
            inputs is _Inputs.NEED_NONE
            and self._inputs[self._mode][position] is _Inputs.NEED_GRADIENTS
        ):
            self._given_token.add(position)
            return self._attached((args, kwargs), self._own_token())
        return None

    def _repeat(self, position: int, args: Any, kwargs: Any) -> Any:
        """Make a unit's recomputation save what its forward pass saved, and gather on all ranks."""
        if self._mode and self._gathers and repeats_apart(self._units[position].module):
            key = (self._ranks(), position)
            if key not in self._met:
                self._meet(position, self._not_recomputed(position))
                self._met.add(key)
                self._again.known.add(position)
        if (
            position in self._given_token
            and self._inputs_of(position, (args, kwargs)) is _Inputs.NEED_NONE
        ):
            return self._attached((args, kwargs), self._new_token())
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

    def _attached(self, tensors: Any, token: Tensor) -> Any:
        """Return floating-point tensors, in any structure, as if the token had made them too."""
        apply: Any = _Attached.apply
        return tree_map_only(
            Tensor, lambda leaf: apply(leaf, token) if leaf.is_floating_point() else leaf, tensors
        )

    def _own_token(self) -> Tensor:
        if self._token is None:
            self._token = self._new_token()
        return self._token

    def _new_token(self) -> Tensor:
        return torch.zeros(1, device=self._device, requires_grad=self._mode)

    def end_forward(self, outputs: Any) -> Any:
        """Join the rest of the pass, before FSDP2 ends the root's forward pass.

        The root's backward pass comes first. Return other outputs of the model, or None.
        """
        if not self._inside or graph_task() != -1:
            return None
        self._arrive(self._end, _Inputs.NO_BACKWARD)
        self._inside = False
        if self._agrees:
            if self._mode and self._gathers:
                position = self._again.agree(self._group)
                if position is not None:
                    raise self._not_recomputed(position)
            self._orders[self._mode] = _merged(self._orders.get(self._mode, []), self._called)
            if not self._joins:
                self._learning[self._mode] = False
            elif not self._mode and self._learning[False]:
                self._learn(with_gradients=False)
        if self._token is None or not self._token.requires_grad:
            return None
        # the loss may use none of the outputs that are found here
        self._roots.append((self._token, torch.zeros_like(self._token)))
        return self._attached(outputs, self._token)

    def _arrive(self, position: int, inputs: _Inputs) -> None:
        """Join what other ranks gather before the unit at `position`."""
        order = [] if self._agrees else self._orders[self._mode]
        if position != self._end:
            again = self._mode and self._gathers and self._again.call(position)
            unknown = (
                position not in order[len(self._called) :]
                or again
                or self._is_news(position, inputs)
            )
            if unknown and not self._agrees:
                self._meet(
                    position,
                    self._not_recomputed(position) if again else self._unexpected(position),
                )
                self._agrees = True
        if self._agrees:
            self._agree(position, inputs)
            return
        while len(self._called) < len(order):
            due = order[len(self._called)]
            if due == position:
                self._called.append(position)
                return
            # right if all ranks leave it out
            if not self._joins or (self._mode and due in self._again.known):
                self._meet(
                    position, self._not_recomputed(due) if self._joins else self._not_joined(due)
                )
                self._agrees = True
                self._agree(position, inputs)
                return
            self._join(due, alone=order.count(due) == 1)

    def _is_news(self, position: int, inputs: _Inputs) -> bool:
        """Return whether other ranks must know of these inputs, as they reduce at other times."""
        known = self._inputs[self._mode].get(position, inputs)
        guessed = self._mode and position in self._assumed
        if not self._joins:
            return False
        return inputs < known or (guessed and inputs > known and inputs is not _Inputs.NEED_NONE)

    def _agree(self, position: int, inputs: _Inputs) -> None:
        """Find out, unit by unit, where the ranks are; those ahead join the others' units."""
        # One number for a unit and its inputs, so that the least is that of the first unit, and
        # among its ranks of the least inputs. The second one tells where the last rank is.
        kinds = len(_Inputs)
        while True:
            mine = [position * kinds + inputs, -position]
            # host waits for the copy, in the first passes
            both = torch.tensor(mine, device=self._device)
            dist.all_reduce(both, op=dist.ReduceOp.MIN, group=self._group)
            least, last = both.tolist()  # host waits for the device
            first, theirs = divmod(least, kinds)
            if first == self._end:
                return
            known = self._inputs[self._mode]
            if self._mode and first in self._assumed:
                self._assumed.remove(first)
                del known[first]
            known[first] = min(_Inputs(theirs), known.get(first, _Inputs.NO_BACKWARD))
            # Ranks are at different units: some have to join, and if they can't, all say so. Was
            # `first` called already, an order would have to have it twice, and whose second call
            # it is no one can tell.
            if first != -last:
                refusal = self._why_not_joined(first, alone=first not in self._called)
                if refusal is not None:
                    raise refusal
            if first == position:
                self._called.append(position)
                return
            self._join(first, alone=True)

    def _why_not_joined(self, position: int, *, alone: bool) -> UsageError | None:
        """Return why a rank that leaves this unit out can't join its messages; None if it can.

        `alone`: the unit is called once in a pass. The answer is the same on all ranks.
        """
        if not self._joins:
            return self._not_joined(position)
        if self._mode and position in self._again.known:
            return self._not_recomputed(position)
        backward = self._has_backward(position)
        # Trained, and called under `no_grad`: a reentrant checkpoint may call it again in the
        # backward pass.
        unclear = self._mode and not backward and self._trained[position]
        if not alone or unclear or self._units[position].name in self._nested:
            return self._not_joined(position)
        if not self._can_join(position, backward=backward):
            return self._too_old(position)
        return None

    def _has_backward(self, position: int) -> bool:
        return self._mode and self._inputs[self._mode][position] is not _Inputs.NO_BACKWARD

    def _join(self, position: int, *, alone: bool) -> None:
        """Take part in the messages of a unit; `alone`: it is called once in a pass."""
        refusal = self._why_not_joined(position, alone=alone)
        if refusal is not None:
            raise refusal
        unit = self._units[position].module
        self._called.append(position)
        token = self._own_token()
        if not self._has_backward(position):
            pass_through(unit, token.detach(), token.detach())
        elif self._inputs[self._mode][position] is _Inputs.NEED_GRADIENTS:
            self._token = pass_through(unit, token, None)
        else:
            self._token = pass_through(unit, token.detach(), token)

    def _can_join(self, position: int, *, backward: bool) -> bool:
        """Return whether a rank can join this unit's messages without calling it.

        Messages must come one unit after another, which those of nested units do not.
        """
        return self._units[position].name not in self._nested and (not backward or TAKES_ZEROS)

    def _meet(self, position: int, error: UsageError) -> None:
        """Wait until all ranks call this unit here, where the order does not have it.

        An error if some do not.
        """
        ranks = self._ranks()
        where = f"{ranks}/{self._mode}/{self._passes[ranks]}/{len(self._called)}/{position}"
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
            except (
                dist.DistError
            ):  # the rank that hosts the store has failed: the next message says so
                return

    def _ranks(self) -> tuple[int, ...]:
        return tuple(
            range(dist.get_world_size())
            if self._group is None
            else dist.get_process_group_ranks(self._group)
        )

    def _learn(self, *, with_gradients: bool) -> None:
        """Complete an order by the units that no rank has called yet.

        The data of a later pass may need them.
        """
        self._learning[with_gradients] = False
        if with_gradients:
            self._merge_replicas()
        order = self._orders[with_gradients]
        known = self._inputs[with_gradients]
        for position in range(1, len(self._units)):
            backward = with_gradients and self._trained[position]
            if position in order or not self._can_join(position, backward=backward):
                continue
            order.insert(
                next((at for at, later in enumerate(order) if later > position), len(order)),
                position,
            )
            known[position] = _Inputs.NEED_GRADIENTS if backward else _Inputs.NO_BACKWARD
            if backward:
                self._assumed.add(position)
                # What it makes may become the input of any other.
                known.update(
                    {
                        p: _Inputs.NEED_GRADIENTS
                        for p, each in known.items()
                        if each is _Inputs.NEED_NONE
                    }
                )

    def _merge_replicas(self) -> None:
        """Give all ranks one order: replicas with other micro-batches have learned others."""
        every: list[Any] = [None] * dist.get_world_size(self._everyone)
        mine = (self._orders[True], self._inputs[True], self._again.known)
        dist.all_gather_object(every, mine, group=self._everyone)
        self._orders[True] = []
        self._inputs[True] = {}
        for order, known, again in every:
            self._again.known.update(again)
            self._orders[True] = _merged(self._orders[True], order)
            for position, inputs in known.items():
                self._inputs[True][position] = min(inputs, self._inputs[True].get(position, inputs))

    def _not_joined(self, position: int) -> UsageError:
        """Return the error of ranks that call a unit, or not, in a way that can't be joined."""
        what = (
            f"the data of some ranks leave out a call of {self._units[position].name}, which others"
            " make, or make it in another order"
        )
        if self._joins:
            why = (
                "FSDP gathers a unit from all ranks at once; a rank can join in for a unit that is"
                " called once in a pass, outside of checkpoints that are reentrant, and has no"
                " units inside"
            )
        else:
            why = (
                "FSDP gathers a unit from all ranks at once; in a stage of a pipeline, whose passes"
                " overlap, a rank can't join in for it"
            )
        return self._error(what, why)

    def _too_old(self, position: int) -> UsageError:
        """Return the error of ranks that could join with a newer torch."""
        what = (
            f"the data of some ranks leave out {self._units[position].name}, which those of others"
            " need"
        )
        why = (
            "FSDP gathers a unit from all ranks at once, and that of torch"
            f" {torch.__version__} takes no zeros for the gradients of a rank that leaves it out"
        )
        fix = f"install torch 2.13 or newer; or {_FIX}"
        return UsageError(what, where="distributed.strategy: fsdp", why=why, fix=fix)

    def _not_recomputed(self, position: int) -> UsageError:
        """Return the error of ranks whose checkpoints recompute other units."""
        name = self._units[position].name
        what = (
            f"a checkpoint of the model's own recomputes {name} in the backward pass, and the data"
            " of some ranks leave out a call of that checkpoint's"
        )
        why = (
            "FSDP gathers all units of a checkpoint over several units once more, from all ranks at"
            " once"
        )
        fix = (
            "recompute one unit at a time, checkpoint(unit, x, use_reentrant=False), or let"
            f" Lockstep do it: write training.gradient_checkpointing: full; or {_FIX}"
        )
        return UsageError(what, where="distributed.strategy: fsdp", why=why, fix=fix)

    def _unexpected(self, position: int) -> UsageError:
        what = (
            f"this rank's forward pass calls {self._units[position].name} where no rank's did"
            " before, and others don't now"
        )
        why = (
            "FSDP gathers a unit from all ranks at once, in one order, which the first step has set"
        )
        return self._error(what, why)

    def _error(self, what: str, why: str) -> UsageError:
        if self._joins:
            return UsageError(what, where="distributed.strategy: fsdp", why=why, fix=_FIX)
        fix = (
            "call it on every rank, in one order, and multiply by 0 what is not wanted; or write"
            " distributed.strategy: fsdp"
        )
        return UsageError(what, where="distributed.strategy: pipeline", why=why, fix=fix)


class _Attached(torch.autograd.Function):
    """Returns `x` as a result of `token`, too, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].new_zeros(1, dtype=torch.float32)


_FIX = (
    "call it on every rank, in one order, and multiply by 0 what is not wanted; or write strategy:"
    " ddp and ddp.find_unused_parameters: true"
)


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
