"""Switches off the cache of keys and values, as decoders of transformers have one, where blocks are recomputed.

Before transformers 5 a forward pass fills a cache in training, too, unless it is told not to. A block that is computed
again would add its keys and values to it a second time, and attend to both.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.torch_compat.module_hooks import forward_pre_hooks


def switch_cache_off(model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Let the modules around `blocks` run without a cache in training, unless their caller asks for one."""
    inside = {module for _, block in blocks for module in block.modules()}
    for module in model.modules():
        if module in inside or _say_no in forward_pre_hooks(module):
            continue
        if {"use_cache", "past_key_values"} <= inspect.signature(module.forward).parameters.keys():
            module.register_forward_pre_hook(_say_no, with_kwargs=True)


def _say_no(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    asked = kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    if asked or not (module.training and torch.is_grad_enabled()):
        return None
    names = list(inspect.signature(module.forward).parameters)[: len(args)]
    return None if "use_cache" in names else (args, {**kwargs, "use_cache": False})
