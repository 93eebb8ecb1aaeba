"""Observes a step's update on one rank: what the optimizer is given, what its hooks do, and what changes values later.

A rank and the reference may differ in more than gradients: in an option of the optimizer, in its state, in a hook that
changes gradients before the update or values after it, in what is frozen or not set to zero.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.errors import listed
from lockstep.parallel.divergence import fingerprint
from lockstep.parallel.parallel_model import local
from lockstep.torch_compat.optimizer_step import run_first

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

# Of a group: what chooses a kernel, and what schedules start from; the learning rate itself is compared.
_NOT_COMPARED = {"params", "fused", "foreach", "capturable", "differentiable", "initial_lr"}


@dataclass
class UpdateFacts:
    """Holds what one rank saw of an update; names are those of parameters."""

    # parameter → option of its group at the update → its value as text; {} if the optimizer lacks it
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)  # further name of a parameter → the name by which it is listed
    frozen: list[str] = field(default_factory=list)  # that want no gradient
    stale: list[str] = field(default_factory=list)  # that had a gradient other than zero before the first forward pass
    # whose state in the optimizer changed between the start of the step and the update
    state_changed: list[str] = field(default_factory=list)
    by_hooks: list[str] = field(default_factory=list)  # whose gradients hooks of the optimizer changed
    unmoved: list[str] = field(default_factory=list)  # whose values are those of before the step
    # before, after: whose values changed before the optimizer's update, or after it
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    called: bool = False  # whether the optimizer was called


class UpdateObserver:
    """Records each update of a trainer without changing it.

    Attributes:
        facts: of the last step.
        gradients: of the last step, as the optimizer gets them.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer, self._placed = trainer, trainer.placed
        self.facts, self.gradients = UpdateFacts(), dict[str, Tensor]()
        self._values: dict[str, int] = {}
        self._updated: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._state: dict[str, Any] = {}
        self._opened = ExitStack()
        optimizer = trainer.optimizer
        for handle in (
            run_first(optimizer, optimizer.register_step_pre_hook(lambda *_: self._before_hooks())),
            optimizer.register_step_pre_hook(lambda *_: self._before_update()),
            run_first(optimizer, optimizer.register_step_post_hook(lambda *_: self._after_update())),
        ):
            self._opened.callback(handle.remove)
        self._finish = self._placed.finish_update
        self._placed.finish_update = self._finished
        self._opened.callback(setattr, self._placed, "finish_update", self._finish)

    def close(self) -> None:
        """Stop recording."""
        self._opened.close()

    def begin(self) -> None:
        """Note what there is before the step's first forward pass."""
        parameters = self._placed.parameters
        self.gradients = {}
        self._given = {}
        self.facts = UpdateFacts(
            tied={alias: name for name, aliases in self._placed.aliases.items() for alias in aliases},
            frozen=[name for name, p in parameters.items() if not p.requires_grad],
            stale=[name for name, p in parameters.items() if p.grad is not None and bool(local(p.grad).any())],
        )
        self._values, self._state = _prints(parameters), self._states()

    def _before_hooks(self) -> None:
        self._given = _prints(self._found())

    def _before_update(self) -> None:
        found, facts = self._found(), self.facts
        facts.called = True
        facts.before = _changed(self._values, _prints(self._placed.parameters))
        facts.by_hooks = [name for name, value in _prints(found).items() if value != self._given.get(name)]
        states = self._states()
        facts.state_changed = [n for n in self._placed.parameters if states.get(n) != self._state.get(n)]
        groups = {id(p): group for group in self._trainer.optimizer.param_groups for p in group["params"]}
        facts.options = {
            name: {key: _text(value) for key, value in groups.get(id(p), {}).items() if key not in _NOT_COMPARED}
            for name, p in self._placed.parameters.items()
        }
        self._keep(found)

    def _after_update(self) -> None:
        self._updated = _prints(self._placed.parameters)

    def _finished(self, skipped: bool) -> None:
        if not self.facts.called and not skipped:  # somebody has replaced `step`
            self._keep(self._found())
        self._finish(skipped)

    def end(self) -> UpdateFacts:
        """Return what was seen of the step that has ended."""
        values, facts = _prints(self._placed.parameters), self.facts
        facts.after = _changed(self._updated, values) if facts.called else []
        facts.unmoved = [name for name, value in values.items() if value == self._values.get(name)]
        return facts

    def _found(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._placed.parameters.items() if p.grad is not None}

    def _keep(self, gradients: Mapping[str, Tensor]) -> None:
        self.gradients = {name: gradient.detach().clone() for name, gradient in gradients.items()}

    def _states(self) -> dict[str, Any]:
        states = self._trainer.optimizer.state
        return {
            name: {key: int(fingerprint(local(v))) if isinstance(v, Tensor) else repr(v) for key, v in held.items()}
            for name, p in self._placed.parameters.items()
            if (held := states.get(p)) is not None
        }


def _changed(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    return [name for name, value in now.items() if value != before.get(name)]


def _prints(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: int(fingerprint(local(tensor.detach()))) for name, tensor in tensors.items()}


def _text(value: Any) -> str:
    """Return a value in one form: a checkpoint gives numbers for tensors, and lists for tuples."""
    if isinstance(value, list | tuple):
        return repr(tuple(value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value)) if number or (isinstance(value, Tensor) and value.numel() == 1) else repr(value)


def differing_options(updates: Sequence[UpdateFacts], right: UpdateFacts) -> list[tuple[str, list[int]]]:
    """Return (text, ranks) of each option of the optimizer that is another one than the reference's."""
    found: dict[tuple[str, str, str], tuple[dict[str, None], list[int]]] = {}
    for rank, update in enumerate(updates):
        for name, mine in update.options.items() if update.called and right.called else ():
            theirs = right.options.get(name, {})
            for key in dict.fromkeys((*theirs, *mine)) if theirs and mine else ():
                if mine.get(key) != theirs.get(key):
                    names, ranks = found.setdefault((key, str(mine.get(key)), str(theirs.get(key))), ({}, []))
                    names[name] = None
                    ranks += [] if rank in ranks else [rank]
    texts = []
    for (key, mine_text, right_text), (names, ranks) in found.items():
        whole = len(names) == len(right.options)
        option = "the learning rate (lr)" if key == "lr" else key
        what = "" if whole else f" for {listed(list(names))}"
        texts.append((f"{option} {mine_text} instead of {right_text}{what}", ranks))
    return texts


def not_alike(
    updates: Sequence[UpdateFacts], right: UpdateFacts, what: Callable[[UpdateFacts], list[str]]
) -> list[str]:
    """Return the names that are in a list of a rank and not in the reference's, or the other way round.

    Of those that the rank does not hold, nothing is known.
    """
    names: dict[str, None] = {}
    for update in updates:
        held = update.options if update.options else right.options
        names |= dict.fromkeys(name for name in set(what(update)) ^ set(what(right)) if name in held)
    return sorted(names)


def ranks_where(updates: Sequence[UpdateFacts], holds: Callable[[UpdateFacts], object]) -> list[int]:
    """Return the ranks about whose update something holds."""
    return [rank for rank, update in enumerate(updates) if holds(update)]
