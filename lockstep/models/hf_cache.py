"""Keeps the cache of keys and values of Hugging Face decoders off in steps and evaluations.

The library fills a cache in training, too, unless it is told not to. Before transformers 5 a block
that is computed again would add its keys and values to it a second time, and attend to both. And a
cache lays keys and values otherwise in memory than the layers put them out, from which, on some
CPUs, the bits of a batched product follow: a decoder would have other bits than the segments of its
chain, which have none.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch import nn

from lockstep.randomness import is_running
from lockstep.torch_compat.module_hooks import forward_pre_hooks


def switch_cache_off(model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Let the modules around `blocks` run without a cache in steps and evaluations.

    A cache that the caller asks for stays on.

    A forward pass that the caller makes by hand, between steps, has its cache.
    """
    inside = {module for _, block in blocks for module in block.modules()}
    for module in model.modules():
        if module in inside or without_cache in forward_pre_hooks(module):
            continue
        if {"use_cache", "past_key_values"} <= set(_arguments(type(module).forward)):
            module.register_forward_pre_hook(without_cache, with_kwargs=True)


def without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Add `use_cache=False` to a module's arguments in a step or an evaluation.

    A hook before its forward pass.
    """
    asked = kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    if asked or not is_running() or "use_cache" in _arguments(type(module).forward)[: len(args)]:
        return None
    return args, {**kwargs, "use_cache": False}


@cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward pass, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]
