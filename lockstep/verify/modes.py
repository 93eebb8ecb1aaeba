"""Takes a step without one of its properties.

The property is the other ranks, its own random numbers, 16 bits, or the cut of sequences.

Tests: tests/verify/test_experiments.py, tests/verify/test_experiments_leave_no_trace.py,
tests/verify/test_updates.py
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.environment import RANK_0_OF_1
from lockstep.models.attention import Attend
from lockstep.monitor.figures import gather_objects
from lockstep.parallel.context_attention import SequenceCut
from lockstep.parallel.tensor_blocks import SEQUENCE
from lockstep.torch_compat.dispatch_mode import TorchDispatchMode
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

_FAR = 2e-2  # relative difference of an output that is more than rounding, also in bfloat16


@contextmanager
def alone() -> Iterator[None]:
    """Let code in the block believe that there are no other ranks; its collectives do nothing."""

    def gathered(outputs: Any, tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
        for output in outputs if isinstance(outputs, list) else outputs.view(-1, *tensor.shape):
            output.copy_(tensor)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    replaced: dict[str, Any] = {
        "is_initialized": lambda: False,
        "get_world_size": lambda *_: 1,
        "get_rank": lambda *_: 0,
        "all_gather": gathered,
        "all_gather_into_tensor": gathered,
        "all_reduce": nothing,
        "broadcast": nothing,
        "barrier": nothing,
    }
    variables = {name: value for name, value in RANK_0_OF_1.items() if name in os.environ}
    with patch.multiple(dist, **replaced), patch.dict(os.environ, variables):
        yield


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


class CompleteSequences:
    """Lets a model that runs on parts of sequences run on whole ones.

    Finds where positions meet outside of attention.

    Under context parallel a convolution, say, or a mean over the sequence sees a part of each
    sequence only: no error, another gradient. On whole sequences, of which each rank keeps its
    part, it computes what it does in one process.
    """

    def __init__(self, trainer: "Trainer", names: Mapping[int, str]) -> None:
        context = trainer.placed.context
        assert context is not None
        (model,) = trainer.placed.parts
        # name of the first whose outputs are others than on whole sequences, if one is found
        self.module = ""
        # whether it is an `Attend` that numbers the positions of a part otherwise
        self.numbers = False
        self._names = names
        self._context = context
        self._model = model
        self._plain = model.forward
        self._compared = False
        self._random = trainer.placed.random_state
        model.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on entire sequences, and return this rank's part of the outputs."""
        leaves, structure = tree_flatten((args, kwargs))
        lengths = [
            leaf.shape[SEQUENCE]
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim() > SEQUENCE
        ]
        length = min(lengths)
        context = self._context
        gathered = [context.gathered(leaf) if _has(leaf, length) else leaf for leaf in leaves]
        complete_args, complete_kwargs = tree_unflatten(gathered, structure)
        if not self._compared:
            self._compared = True
            self._compare_positions(
                length, next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
            )
            if not self.module:
                self._compare((args, kwargs), (complete_args, complete_kwargs))
        context.stay_outside()  # for what the backward pass computes again, too
        outputs, structure = tree_flatten(self._plain(*complete_args, **complete_kwargs))
        return tree_unflatten(
            [_part(each, length * context.ranks, context) for each in outputs], structure
        )

    def _compare_positions(self, length: int, device: torch.device) -> None:
        for attend in (module for module in self._model.modules() if isinstance(module, Attend)):
            with self._context.outside():
                every = attend.positions(length * self._context.ranks, device)
            right = self._context.part(every, 0)
            wrong = not torch.equal(attend.positions(length, device), right)
            if any(gather_objects(wrong)):  # the first rank's part may begin at 0 in any case
                self.module = self._names.get(id(attend), "")
                self.numbers = True
                return

    @torch.no_grad()
    def _compare(self, part: tuple[Any, Any], complete: tuple[Any, Any]) -> None:
        """Find the first module whose outputs are others on a part of the sequences."""
        found = []
        calls = dict(self._random.calls)
        for is_part, (args, kwargs) in ((True, part), (False, complete)):
            seen: list[tuple[str, Tensor]] = []
            inside = [module for module in self._model.modules() if module is not self._model]
            hooks = [partial(_note, self._names.get(id(module), ""), seen) for module in inside]
            handles = [
                module.register_forward_hook(hook)
                for module, hook in zip(inside, hooks, strict=True)
            ]
            with torch.random.fork_rng(), nullcontext() if is_part else self._context.outside():
                self._plain(*args, **kwargs)
            self._random.restore_calls(calls)  # each pass draws the same numbers
            for handle in handles:
                handle.remove()
            found.append(seen)
        for (name, mine), (_, theirs) in zip(*found, strict=False):
            for dim in range(1, mine.dim()):
                if theirs.shape[dim] == mine.shape[dim] * self._context.ranks:
                    right = self._context.part(theirs, dim).double()
                    if (mine.double() - right).norm() > _FAR * right.norm():
                        self.module = name
                        return


def _has(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > SEQUENCE and value.shape[SEQUENCE] == length


def _part(value: Any, length: int, context: SequenceCut) -> Any:
    if not isinstance(value, Tensor):
        return value
    if _has(value, length):
        return context.part(value)
    # all ranks compute it: its gradient counts once
    return value if context.rank == 0 else value.detach() + 0 * value


def _note(
    name: str, seen: list[tuple[str, Tensor]], _module: nn.Module, _args: Any, outputs: Any
) -> None:
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    if isinstance(first, Tensor) and first.dim() > SEQUENCE:
        seen.append((name, first))
