"""Reads what a loss function takes beside outputs and targets, and what it is a mean over.

    def weighted(outputs, targets, weights):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return (losses * weights).sum() / weights.sum()

    weighted.count = lambda batch: batch["weights"].sum()

Further arguments are members of the batch of the same names.

Tests: tests/parity/test_weighted_losses.py
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.errors import UsageError, listed


def count_of(loss_fn: Any) -> Callable[[Any], int | float | Tensor] | None:
    """Return the function `count(batch)` that a loss function has; None if it has none.

    It is an attribute of a function, or a method of an object.
    """
    if isinstance(loss_fn, functools.partial):
        return count_of(loss_fn.func)
    count = getattr(loss_fn, "count", None)
    return count if callable(count) and not isinstance(count, nn.Module) else None


def name_of(loss_fn: Any) -> str | None:
    """Return the name of a loss that is a function; None if it is an object, or a lambda."""
    inner = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    is_named = inspect.isfunction(inner) and inner.__name__.isidentifier()
    return inner.__name__ if is_named else None


class FurtherArguments:
    """The arguments of a loss function beside outputs and targets, by name.

    Those without a default have to be in a batch.

    Args:
        loss_fn: the function, or a metric.
        kind: what it is, for messages.
        where: the key that names it, for messages.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], kind: str = "loss function", where: str = "loss_fn"
    ) -> None:
        self._kind = kind
        self._where = where
        self._name = name_of(loss_fn) or type(loss_fn).__name__
        self._needed: list[str] = []
        self._optional: list[str] = []
        call = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        try:
            parameters = list(inspect.signature(call).parameters.values())
        except (ValueError, TypeError):  # a builtin without a signature
            return
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        positional = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        for parameter in parameters:
            if parameter in positional[:2] or parameter.kind not in by_name:
                continue
            has_default = parameter.default is not inspect.Parameter.empty
            (self._optional if has_default else self._needed).append(parameter.name)

    def filled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable like the loss function that needs nothing beside outputs and targets.

        It serves to look at its arguments.
        """
        return functools.partial(call, **dict.fromkeys(self._needed))

    def of(self, batch: Any) -> dict[str, Any]:
        """Return the arguments that a batch holds; a UsageError if one is missing that is needed.

        A batch that is not a dict holds none.
        """
        if not self._needed and not self._optional:
            return {}
        members = batch if isinstance(batch, dict | Mapping) else {}
        missing = [name for name in self._needed if name not in members]
        if missing:
            what = f"the {self._kind} {self._name} takes {listed(missing)}, and a batch has"
            names_of_batch = listed([*map(str, members)])
            what += f" {names_of_batch}" if members else f" no names: it is {_kind(batch)}"
            needed = ", ".join(f'"{name}": …' for name in self._needed)
            fix = (
                f'let samples be dicts with these members: {{"x": …, "targets": …, {needed}}},'
                " where x is an argument of the model's forward"
            )
            raise UsageError(what, where=self._where, fix=fix)
        return {name: members[name] for name in (*self._needed, *self._optional) if name in members}


def _kind(batch: Any) -> str:
    size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    return f"a {type(batch).__name__}{size}"
