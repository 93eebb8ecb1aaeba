"""Makes random numbers depend on what is computed, and never on where.

A number drawn inside the model is a function of (seed, phase, step, micro-batch, segment, call
index): before each segment of a forward pass (the code between blocks is one too), the device's
generator is seeded from that key. For the first call of a block for micro-batch 5 of step 3, on
whichever rank and in whichever stage of a pipeline it runs:

    >>> derive_key(0, "train", 3, 5, "layers.2", 0)
    1373446096332978183

The device's generator alone, because `torch.manual_seed` seeds every backend, in 250 µs. A segment
that never draws (`lockstep.drawless`) is left out where another one is seeded before anything can
draw. `HostRandom` does the same for models that draw from Python's or NumPy's global generator; a
run continues with it after its first step only if a rank has seen a draw.

A segment that runs again inside a backward pass (`torch.utils.checkpoint` in the model, a
reversible network) is seeded with the key of the call that it repeats. A generator's state holds
the key that it was last seeded with. Whatever repeats a forward pass restores that state first, so
the key there says after which call the repetition begins.

What reads samples seeds the generators of Python, NumPy and torch before each of them (`seed_from`,
`preserve_states`).

Tests: tests/test_randomness.py, tests/parallel/test_worked_examples.py
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.drawless import DrawlessModules, never_draws
from lockstep.host_draws import HostRandom, HostState
from lockstep.machine.accelerator import default_generator
from lockstep.torch_compat.backward_pass import graph_task, running_node


def derive_key(*parts: object) -> int:
    """Return a 63-bit number from the `repr` of `parts`.

    It is the same on every machine and Python version.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(key: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed random functions in the block with `key`; restore the generator's state afterwards."""
    generator = default_generator(device or torch.device("cpu"))
    outer = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(outer)


def seed_from(*parts: object) -> None:
    """Seed Python, NumPy and torch (its CPU generator) from `parts`."""
    key = derive_key(*parts)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def seed_torch_from(*parts: object) -> None:
    """Seed torch's CPU generator as `seed_from` does, and no other."""
    torch.default_generator.manual_seed(derive_key(*parts))


def states() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of the three generators, for `set_states`."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def set_states(saved: tuple[Any, Any, torch.Tensor]) -> None:
    """Restore what `states` returned."""
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])


@contextmanager
def preserve_states() -> Iterator[None]:
    """Restore the states of the three generators after the block."""
    saved = states()
    try:
        yield
    finally:
        set_states(saved)


_running = 0  # blocks of `RandomState.running` that are open, of any state


def is_running() -> bool:
    """Return whether a forward or backward pass of Lockstep's runs.

    It is one of a step, an evaluation or a sample, not a caller's own.
    """
    return _running > 0


class _RestoredStates:
    """Restores the states of random generators after a block.

    A class, since generators are slower.
    """

    def __init__(self, generator: torch.Generator, host: HostRandom | None) -> None:
        self._generator = generator
        self._host = host

    def __enter__(self) -> None:
        global _running
        _running += 1
        self._state = self._generator.get_state()
        if self._host is not None:
            self._outer = self._host.capture()

    def __exit__(self, *_error: Any) -> None:
        global _running
        _running -= 1
        if self._host is not None:
            self._host.end(self._outer)
        self._generator.set_state(self._state)


class _Calls:
    """The calls of segments in a step's forward passes.

    They are found again when a backward pass repeats them.
    """

    def __init__(self) -> None:
        # Forward passes write to these two themselves: in each call of a segment, a call of a
        # function counts. (key before, segment) → key of the call that followed
        self.following: dict[tuple[int, str], int] = {}
        # (micro-batch, segment, which of its calls) → key
        self.keys: dict[tuple[int, str, int], int] = {}
        # (micro-batch, segment) → the call that was repeated last
        self._repeated: dict[tuple[int, str], int] = {}
        self._latest = (0, 0)  # node of the backward pass, and key, of the latest repetition

    def clear(self) -> None:
        """Forget the calls; their backward passes are over."""
        if self.keys:
            self.following.clear()
            self.keys.clear()
        if self._repeated:
            self._repeated.clear()

    def repeated(self, before: int, micro_batch: int, segment: str, node: int) -> int | None:
        """Return the key of the call that node `node` of a backward pass repeats.

        None if there was none.

        Without a restored generator (`preserve_rng_state=False`) the latest call that was not
        repeated yet is taken, as a backward pass goes from the last call to the first. A generator
        that still has the key of another node's repetition was not restored.
        """
        keys = [
            key for (at, name, _), key in self.keys.items() if (at, name) == (micro_batch, segment)
        ]
        latest_node, latest_key = self._latest
        restored = before != latest_key or node == latest_node
        key = self.following.get((before, segment)) if restored else None
        if key is None:
            if not keys:
                return None
            # the call before the one that was repeated last; at first the last one
            later = self._repeated.get((micro_batch, segment)) or len(keys)
            key = keys[later - 1]
        if key in keys:
            self._repeated[micro_batch, segment] = keys.index(key)
        self._latest = (node, key)
        return key


@dataclass
class RandomState:
    """Holds what random numbers depend on now: the seed, and where in the training a pass is.

    The loop sets it (`running`, `at`), the segments' hooks make keys of it (`enter`).
    """

    seed: int
    device: torch.device
    phase: str = "train"
    step: int = 0
    micro_batch: int = 0
    # segment → number of its calls in this forward pass
    calls: dict[str, int] = field(default_factory=dict)
    # None: the model draws from the device's generator alone
    host: HostRandom | None = field(init=False)
    # in the forward passes whose backward passes are to come
    _made: _Calls = field(default_factory=_Calls)

    def __post_init__(self) -> None:
        self._generator = default_generator(self.device)
        self.host = HostRandom(self.device)
        self._key = 0  # that forward passes have set last
        # segments that get no key
        self._unkeyed: DrawlessModules | None = None

    def running(self, phase: str, step: int) -> AbstractContextManager[None]:
        """Return a context for one step's forward and backward passes.

        It restores the generators' outer states.
        """
        self.phase = phase
        self.step = step
        self._key = self._generator.initial_seed()
        self._made.clear()
        if self._unkeyed is not None:
            self._unkeyed.check()
        return _RestoredStates(self._generator, self.host)

    def leave_unkeyed(self, module: nn.Module, key: Callable[[], None]) -> None:
        """Set no key before a module that never draws; call `key` as soon as it may draw."""
        if self._unkeyed is None:
            self._unkeyed = DrawlessModules()
        self._unkeyed.add(module, key)

    def at(self, micro_batch: int, earlier: Mapping[str, int] | None = None) -> None:
        """Begin the forward pass of `micro_batch` (its index in the step's global list).

        `earlier`: segment → number of its calls in earlier stages of a pipeline, after which those
        of this stage are counted.
        """
        self.micro_batch = micro_batch
        self.calls.clear()
        if earlier:
            self.calls.update(earlier)

    def restore_calls(self, calls: Mapping[str, int]) -> None:
        """Go back to the numbers of calls that a copy of `calls` has, to draw the same again."""
        self.calls = dict(calls)

    def decide_host(self, *, is_drawn_from: bool) -> None:
        """Keep the host's generators keyed, or leave them alone; all ranks decide the same."""
        if not is_drawn_from:
            self.host = None
        elif self.host is not None:
            self.host.settle()

    def backward_done(self) -> None:
        """Forget which calls a backward pass may repeat: those of all forward passes are over."""
        self._made.clear()

    def enter(self, segment: str) -> None:
        """Seed the generator for the next call of `segment`.

        In a backward pass it is the call that is repeated.
        """
        key = None if graph_task() == -1 else self._repeated(segment)
        if key is None:
            call = self.calls.get(segment, 0)
            self.calls[segment] = call + 1
            key = derive_key(self.seed, self.phase, self.step, self.micro_batch, segment, call)
            if self.phase == "train":
                self._made.following[self._key, segment] = key
                self._made.keys[self.micro_batch, segment, call] = key
            self._key = key
        self._generator.manual_seed(key)
        if self.host is not None:
            self.host.seed(key, trains=self.phase == "train")

    def _repeated(self, segment: str) -> int | None:
        """Return the key of the call of `segment` that a backward pass repeats.

        None if it makes a new one.
        """
        node = running_node()
        if node is None:
            return None
        before = self._generator.initial_seed()
        return self._made.repeated(before, self.micro_batch, segment, node)

    def capture(self) -> HostState | None:
        """Return the states of the generators on the host, for `recomputing`.

        None if the model uses none.
        """
        return None if self.host is None else self.host.capture()

    @contextmanager
    def recomputing(self, captured: HostState | None) -> Iterator[None]:
        """Let the host's generators draw in the block what they drew after `captured` was taken."""
        host = self.host
        before = None
        if host is not None and captured is not None:
            before = host.capture()
            host.restore(captured)
        try:
            yield
        finally:
            if host is not None and before is not None:
                host.restore(before)


def key_segments(
    random_state: RandomState,
    segments: Sequence[tuple[str, nn.Module]],
    *,
    chain: bool,
    is_sequential: bool = False,
) -> None:
    """Seed every call of a segment, given by its canonical name, from its own key.

    Hooks go on the modules, outside of a replaced `forward`, so that compiled and recomputed code
    is inside of them. The whole model gets them, before it is cut: a segment carries its hook, and
    the name that it has in the model, into the stage of a pipeline that runs it. So its dropout has
    one key in any stage, and on any rank.

    In a `chain` the segments are the whole forward pass; otherwise the code after each of them is a
    segment, too. Segments made from a model that is keyed in that way bring their keys along, as
    `random_key`.

    A segment that never draws gets no key if one is set before anything else can draw: the key of
    the code after it, or, where torch's own `nn.Sequential` runs the chain (`is_sequential`), that
    of a later segment. After the last segment the loss and the backward pass may draw.
    """
    last = segments[-1][1] if segments else None
    for segment, module in segments:
        name = str(getattr(module, "random_key", segment))
        key_follows = not chain or (is_sequential and module is not last)
        needs_key = not (key_follows and never_draws(module))
        if not chain:
            module.register_forward_hook(
                lambda _module, _args, _output, name=name: random_state.enter(f"{name}/after")
            )
        if needs_key:
            _key_before(random_state, name, module)
        else:
            random_state.leave_unkeyed(module, partial(_key_before, random_state, name, module))


def _key_before(random_state: RandomState, name: str, module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _module, _args: random_state.enter(name), prepend=True)
