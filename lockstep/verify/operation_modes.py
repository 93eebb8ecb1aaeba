"""Modes in which operations draw other random numbers, or convert nothing to 16 bits.

Tests: tests/verify/test_experiments.py, tests/verify/test_experiments_leave_no_trace.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.torch_compat.dispatch_mode import TorchDispatchMode


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws all random numbers from one seed.

    Each draw depends on its operation and that operation's arguments alone.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = [
            torch.default_generator,
            *([generator] if generator is not torch.default_generator else []),
        ]

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
    """Replaces each random number by the mean of its distribution.

    Training mode and all else stay. While it is `paused`, numbers are drawn.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the block draw."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or torch.Tag.nondeterministic_seeded not in func.tags:
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


def _argument(position: int, key: str, default: float) -> Callable[[Any, Any], Any]:
    return lambda args, kwargs: args[position] if len(args) > position else kwargs.get(key, default)


_MEANS: dict[str, Callable[[Any, Any], Any]] = {
    "rand": lambda *_: 0.5,
    "rand_like": lambda *_: 0.5,
    "randn": lambda *_: 0.0,
    "randn_like": lambda *_: 0.0,
    "randint": lambda args, _: ((args[0] + args[1]) if isinstance(args[1], int) else args[0]) // 2,
    "normal": lambda args, _: args[0],
    "normal_": _argument(1, "mean", 0.0),
    "uniform_": (
        lambda args, kw: (
            (_argument(1, "from", 0.0)(args, kw) + _argument(2, "to", 1.0)(args, kw)) / 2
        )
    ),
    "exponential_": lambda args, kw: 1 / _argument(1, "lambd", 1.0)(args, kw),
    "bernoulli": _argument(1, "p", 0.5),
    "bernoulli_": _argument(1, "p", 0.5),
}


class FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves values in float32 where they would be converted to 16 bits.

    Autocast and `.half()` convert them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in (torch.bfloat16, torch.float16):
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)
