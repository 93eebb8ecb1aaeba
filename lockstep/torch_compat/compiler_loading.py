"""Puts off importing torch's compiler until something asks it to compile.

Torch's optimizers, process groups, DDP and FSDP import `torch._dynamo` on their first use, only to
tell it which of their functions it must not compile: some 800 modules, as much time as importing
torch. As long as nobody else has imported it, nothing is compiled, and there is nobody to tell.

A `FakeTensorMode`, in which a plan is rehearsed, reads the compiler's settings, and names where
each tensor comes from, which nothing but a compiler asks.

`put_off` therefore puts a stand-in into `sys.modules`. It answers what these ask, and imports the
compiler for any other question:

    torch._dynamo.graph_break()      nothing
    torch._dynamo.disable(f)         f, and once the compiler is there, what it makes of f
    torch._dynamo.config             its settings, a module that is imported alone
    torch._dynamo.source             the name of a tensor whose source is not known
    torch._dynamo.optimize           imports the compiler

Public torch: there is no way to use an optimizer without importing the compiler.
Seen to work: torch 2.11.0, 2.13.0 and 2.14.1.
When gone: `put_off` does nothing where torch has no such module; a question that the stand-in does
not know imports the compiler, as before.

Loads torch inside functions only: whoever observes a process may import this file while torch is
being imported.

Tests: tests/torch_compat/test_compiler_loading.py
"""

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_SOURCE = f"{_NAME}.source"
_loading = threading.RLock()


def put_off() -> None:
    """Let the compiler be imported when something asks for it, unless it is there already."""
    import torch

    spec = None if _NAME in sys.modules else find_spec(_NAME)
    if spec is None:
        return
    stand_in = _StandIn(_NAME)
    vars(stand_in).update(
        __spec__=spec,
        __file__=spec.origin,
        graph_break=_do_nothing,
        disable=_disable,
        config=_settings_alone(spec.origin),
        utils=_StandIn("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        trace_rules=_StandIn("trace_rules", clear_lru_cache=_do_nothing),
        source=_StandIn(
            "source", ConstantSource=_UnknownSource, RandomValueSource=_RandomValueSource
        ),
    )
    # `from torch._dynamo.source import` looks here
    sys.modules[_SOURCE] = vars(stand_in)["source"]
    sys.modules[_NAME] = stand_in
    vars(torch)["_dynamo"] = stand_in


def _settings_alone(origin: str | None) -> ModuleType:
    """Import the compiler's settings, `config.py` beside its `__init__.py`, and nothing else."""
    assert origin is not None
    name = f"{_NAME}.config"
    spec = spec_from_file_location(name, Path(origin).with_name("config.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = settings = module_from_spec(spec)
    spec.loader.exec_module(settings)
    return settings


def is_put_off() -> bool:
    """Return whether nothing has asked for the compiler yet."""
    return isinstance(sys.modules.get(_NAME), _StandIn)


def run_eagerly() -> AbstractContextManager[Any]:
    """Run what is compiled as it is written, for the length of the block."""
    if is_put_off():
        return nullcontext()
    import torch

    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class _StandIn(ModuleType):
    """Stands for the compiler, or a module in it; imports it for what it does not have itself."""

    def __init__(self, name: str, **answers: object) -> None:
        super().__init__(name)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        # `inspect` asks each module for some; only the compiler itself has a way to its parts
        is_path = name == "__path__" and vars(self)["__name__"] == _NAME
        if name.startswith("__") and not is_path:
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._real(), name, value)

    def _real(self) -> Any:
        compiler = _load()
        own_name = vars(self)["__name__"]
        return compiler if own_name == _NAME else getattr(compiler, own_name)


def _load() -> ModuleType:
    """Import the compiler in place of its stand-in, and tell it what it must not compile."""
    import torch

    with _loading:
        if is_put_off():
            stand_in = sys.modules.pop(_NAME)
            del vars(torch)["_dynamo"]
            del sys.modules[_SOURCE]
            compiler = importlib.import_module(_NAME)  # which finds its settings in `sys.modules`
            # whoever has a name for the stand-in finds in it what the compiler has
            for name in ("graph_break", "disable", "utils", "trace_rules", "source"):
                vars(stand_in)[name] = getattr(compiler, name)
            for function in list(_disabled):
                function.tell(compiler)
    return sys.modules[_NAME]


def _do_nothing(*_given: object) -> None:
    """Do what the compiler does outside of what it compiles."""


class _UnknownSource:
    """Stands for `ConstantSource`: where a tensor comes from, if nobody says it."""

    def __init__(self, name: str) -> None:
        self.name = name


class _RandomValueSource:
    """Stands for the class of sources that only a compiler makes."""


class _Disabled:
    """A function that the compiler must not compile, once it is there."""

    def __init__(self, function: Callable[..., Any], *how: Any, **more: Any) -> None:
        self.call = function
        self._how = how
        self._more = more
        _disabled.add(self)

    def tell(self, compiler: Any) -> None:
        self.call = compiler.disable(self.call, *self._how, **self._more)


_disabled: "weakref.WeakSet[_Disabled]" = weakref.WeakSet()


def _disable(function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Any:
    if not callable(function) or isinstance(function, type) or not is_put_off():
        return _load().disable(function, *how, **more)
    disabled = _Disabled(function, *how, **more)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return disabled.call(*args, **named)

    return call
