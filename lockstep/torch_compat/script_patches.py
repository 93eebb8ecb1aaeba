"""Functions of torch that a training script calls, replaced so that an observer sees the calls.

Public torch: hooks for modules and optimizers; none for the start of a backward pass, for clipping, or for the making
of a loader. A script is observed unchanged, so the functions themselves are replaced, in a process that only observes.
Seen to work: torch 2.13.0.
When gone: importing this file raises ImportError, or `lockstep verify SCRIPT` says that it saw no step.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.nn.utils.clip_grad as clip
from torch.utils.data import DataLoader

Around = Callable[[Callable[[], Any], Any], Any]
"""Is given a call to make and its first argument; returns the call's result."""


def patch_backward(around: Around) -> None:
    """Replace the function with which every backward pass starts; `tensor.backward()` calls it, too."""
    _replace(torch.autograd, "backward", around)


def patch_clipping(around: Around) -> None:
    """Replace the functions that clip gradients, by norm and by value."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _replace(clip, name, around)
        setattr(torch.nn.utils, name, getattr(clip, name))


def _replace(module: Any, name: str, around: Around) -> None:
    original = getattr(module, name)

    parameter = next(iter(inspect.signature(original).parameters))

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.pop(parameter)
        if isinstance(first, Iterator):
            first = list(first)  # it is read twice
        return around(lambda: original(first, *args[1:], **kwargs), first)

    setattr(module, name, observed)


def patch_loaders(arguments: Callable[[dict[str, Any]], None], made: Callable[[Any], None]) -> None:
    """Replace the constructor of loaders, those of subclasses included.

    Args:
        arguments: may change the constructor's arguments, by name.
        made: is given each loader when it is made.
    """
    original = DataLoader.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        arguments(given)
        original(self, **given)
        made(self)

    setattr(DataLoader, "__init__", observed)  # noqa: B010 — mypy forbids to assign a method
