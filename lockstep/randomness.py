"""Random numbers that depend on what is computed, never on where.

A number drawn inside the model is a function of (seed, phase, step, micro-batch, segment, call index): before each
segment of a forward pass runs, the device's generator is seeded from that key. So dropout, Bernoulli draws and VAE
noise are the same in one process, on any number of ranks and in the middle of a pipeline. What lies between blocks is
a segment too. Keys are captured at forward and travel into recomputation (`RandomState.recomputing`): by the time
activation checkpointing recomputes a block under a pipeline, another micro-batch is current.

Only the device's own generator is seeded (2 µs; `torch.manual_seed` walks every backend, 250 µs), and the state that it
had outside is put back.

Models that draw from Python's `random` or NumPy's global generator are keyed in the same way, by `HostRandom`. Seeding
these takes longer, so a run goes on with it after its first step only where a rank has seen a draw.
"""

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


def derive_key(*parts: object) -> int:
    """A 63-bit number from the `repr` of `parts`: equal parts give equal keys, on every machine and Python."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator from which random functions on `device` draw."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def seeded(key: int, device: torch.device | None = None) -> Iterator[None]:
    """Random functions inside draw from `key`; the generator's outer state is put back after."""
    generator = generator_of(device or torch.device("cpu"))
    outer = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(outer)


HostState = tuple[Any, Any, Any]  # of Python's, NumPy's and torch's generator


@dataclass(frozen=True)
class Captured:
    """Where a random_state stood when a segment's forward pass began."""

    phase: str
    step: int
    micro_batch: int
    calls: dict[str, int]
    host: HostState | None


class HostRandom:
    """Keys the global generators of Python and NumPy, and torch's on the CPU where a model runs on another device.

    Args:
        device: of the model.

    Attributes:
        drawn: something has drawn from one of them since a key was set.
        trained: a key was set in a training step.
        settled: all ranks have agreed that a rank draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.default_generator if device.type != "cpu" else None
        self._keyed: list[Any] | None = None  # the states right after a key was set
        self.drawn = self.trained = self.settled = False

    def seed(self, key: int) -> None:
        """Set a key; a draw since the last one is noticed."""
        self.look()
        random.seed(key)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed([key & 0xFFFFFFFF, key >> 32])
        if self._cpu is not None:
            self._cpu.manual_seed(key)
        self._keyed = None if self.drawn else self._states()

    def look(self) -> None:
        """Notice whether something has drawn since the last key."""
        self.drawn = self.drawn or (self._keyed is not None and self._states() != self._keyed)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Put the outer states back after."""
        outer = self.capture()
        try:
            yield
        finally:
            self.look()
            self._keyed = None
            self._put_back(outer)

    def capture(self) -> HostState:
        """Return the states as they are."""
        numpy = sys.modules.get("numpy")
        return random.getstate(), numpy and numpy.random.get_state(), self._cpu and self._cpu.get_state()

    @contextmanager
    def again(self, captured: HostState) -> Iterator[None]:
        """What runs inside draws what was drawn after `captured` was taken; then the states are as they were."""
        now = self.capture()
        self._put_back(captured)
        try:
            yield
        finally:
            self._put_back(now)

    def _put_back(self, states: HostState) -> None:
        python, numpy, cpu = states
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        if self._cpu is not None:
            self._cpu.set_state(cpu)

    def _states(self) -> list[Any]:
        states: list[Any] = [random.getstate()]
        if (numpy := sys.modules.get("numpy")) is not None:
            states.append([part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.random.get_state()])
        if self._cpu is not None:
            states.append(self._cpu.get_state().numpy().tobytes())
        return states


class _Kept:
    """Puts the states of random generators back when the block ends. A class, for a step enters one: few calls."""

    def __init__(self, generator: torch.Generator, host: HostRandom | None) -> None:
        self._generator = generator
        self._host = host.outside() if host is not None else None

    def __enter__(self) -> None:
        self._state = self._generator.get_state()
        if self._host is not None:
            self._host.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._host is not None:
                self._host.__exit__(*error)
        finally:
            self._generator.set_state(self._state)


@dataclass
class RandomState:
    """Which micro-batch of which step a forward pass works on; the loop sets it, the segments' hooks read it."""

    seed: int
    device: torch.device
    phase: str = "train"
    step: int = 0
    micro_batch: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # segment → how often it ran in this forward pass
    host: HostRandom | None = field(init=False)  # None: the model is known to draw from the device's generator alone

    def __post_init__(self) -> None:
        self._generator = generator_of(self.device)
        self.host = HostRandom(self.device)

    def running(self, phase: str, step: int) -> AbstractContextManager[None]:
        """Forward and backward passes of one step run inside; the generators' outer states are put back after."""
        self.phase, self.step = phase, step
        return _Kept(self._generator, self.host)

    def at(self, micro_batch: int) -> None:
        """The forward pass of `micro_batch` (its place in the step's global list) begins."""
        self.micro_batch = micro_batch
        self.calls.clear()

    def enter(self, segment: str) -> None:
        """Seed the generator for the next call of `segment`."""
        call = self.calls.get(segment, 0)
        self.calls[segment] = call + 1
        key = derive_key(self.seed, self.phase, self.step, self.micro_batch, segment, call)
        self._generator.manual_seed(key)
        if self.host is not None:
            self.host.seed(key)
            self.host.trained = self.host.trained or self.phase == "train"

    def capture(self) -> Captured:
        """Where the random_state stands, to be taken up again by `recomputing`."""
        host = self.host.capture() if self.host is not None else None
        return Captured(self.phase, self.step, self.micro_batch, dict(self.calls), host)

    @contextmanager
    def recomputing(self, captured: Captured) -> Iterator[None]:
        """Segments that run inside draw what they drew when `captured` was taken."""
        outer = self.phase, self.step, self.micro_batch, dict(self.calls)
        self.phase, self.step, self.micro_batch = captured.phase, captured.step, captured.micro_batch
        self.calls = dict(captured.calls)
        host = self.host
        again = host.again(captured.host) if host is not None and captured.host is not None else nullcontext()
        try:
            with again:
                yield
        finally:
            self.phase, self.step, self.micro_batch, self.calls = outer


def key_segments(random_state: RandomState, segments: Sequence[tuple[str, nn.Module]], *, chain: bool) -> None:
    """Let every call of a segment draw from its own key.

    Args:
        segments: (canonical name, module). Hooks go on the modules, outside of a replaced `forward`, so that compiled
            and recomputed code lies inside of them.
        chain: the segments are the whole forward pass. Else what follows each of them is keyed as a segment of its own.
            Segments that were made of a model which is keyed in that way bring its keys along, as `random_key`.
    """
    for segment, module in segments:
        name = str(getattr(module, "random_key", segment))

        def before(_module: nn.Module, _args: object, *, name: str = name) -> None:
            random_state.enter(name)

        def after(_module: nn.Module, _args: object, _output: object, *, name: str = name) -> None:
            random_state.enter(f"{name}/after")

        module.register_forward_pre_hook(before, prepend=True)
        if not chain:
            module.register_forward_hook(after)
