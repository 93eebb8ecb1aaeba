"""Dispatch modes and a context in which a step is taken without one thing: its own random numbers, 16 bits, ranks."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.torch_compat.dispatch_mode import TorchDispatchMode


@contextmanager
def alone() -> Iterator[None]:
    """Let code in the block believe that there are no other ranks; its collectives do nothing."""

    def gathered(outputs: Any, tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
        for output in outputs if isinstance(outputs, list) else outputs.view(-1, *tensor.shape):
            output.copy_(tensor)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    replaced: dict[str, Any] = {
        "is_initialized": lambda: False, "get_world_size": lambda *_: 1, "get_rank": lambda *_: 0,
        "all_gather": gathered, "all_gather_into_tensor": gathered, "all_reduce": nothing, "broadcast": nothing,
        "barrier": nothing,
    }  # fmt: skip
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch.object(dist, name, function))
        for name, value in variables.items():
            if name in os.environ:
                stack.enter_context(patch.dict(os.environ, {name: value}))
        yield


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws all random numbers from one seed: each depends on its operation and that operation's arguments alone.

    A draw of another rate, shape or distribution stays another one; only where numbers come from is undone.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = [torch.default_generator, *([generator] if generator is not torch.default_generator else [])]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        own = kwargs.get("generator")
        if isinstance(own, torch.Generator):
            kwargs["generator"] = torch.Generator(own.device).manual_seed(0)
        before = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(0)
        try:
            return func(*args, **kwargs)
        finally:
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)


class MeanDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces each random number by the mean of its distribution; training mode and all else stay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "bernoulli" and len(args) == 1:
            return args[0].clone()
        if name == "multinomial":
            return args[0].topk(args[1], dim=-1).indices
        drawn = func(*args, **kwargs)
        if name in _MEANS and isinstance(drawn, Tensor):
            mean = _MEANS[name](args, kwargs)
            drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)
        elif name == "randperm":
            drawn.copy_(torch.arange(drawn.numel()))
        return drawn


def _argument(place: int, key: str, default: float) -> Callable[[Any, Any], Any]:
    return lambda args, kwargs: args[place] if len(args) > place else kwargs.get(key, default)


def _middle(args: Any, _kwargs: Any) -> int:
    low, high = (args[0], args[1]) if isinstance(args[1], int) else (0, args[0])
    return int(low + high) // 2


_MEANS: dict[str, Callable[[Any, Any], Any]] = {
    "rand": lambda *_: 0.5,
    "rand_like": lambda *_: 0.5,
    "randn": lambda *_: 0.0,
    "randn_like": lambda *_: 0.0,
    "randint": _middle,
    "normal": lambda args, _: args[0],
    "normal_": _argument(1, "mean", 0.0),
    "uniform_": lambda args, kw: (_argument(1, "from", 0.0)(args, kw) + _argument(2, "to", 1.0)(args, kw)) / 2,
    "exponential_": lambda args, kw: 1 / _argument(1, "lambd", 1.0)(args, kw),
    "bernoulli": _argument(1, "p", 0.5),
    "bernoulli_": _argument(1, "p", 0.5),
}


class FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves values in float32 where they would be converted to 16 bits: under autocast, and by `.half()`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.bfloat16, torch.float16):
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)
