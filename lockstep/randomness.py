"""Random numbers that depend on what is computed, never on where.

A number drawn inside the model is a function of (seed, phase, step, micro-batch, segment, call index): before each
segment of a forward pass runs, the device's generator is seeded from that key. So dropout, Bernoulli draws and VAE
noise are the same in one process, on any number of ranks and in the middle of a pipeline. What lies between blocks is
a segment too. Keys are captured at forward and travel into recomputation (`Cursor.recomputing`): by the time
activation checkpointing recomputes a block under a pipeline, another micro-batch is current.

Only the device's own generator is seeded (2 µs; `torch.manual_seed` walks every backend, 250 µs), and the state that it
had outside is put back.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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


@dataclass
class Cursor:
    """Which micro-batch of which step a forward pass works on; the loop sets it, the segments' hooks read it."""

    seed: int
    device: torch.device
    phase: str = "train"
    step: int = 0
    micro_batch: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # segment → how often it ran in this forward pass

    def __post_init__(self) -> None:
        self._generator = generator_of(self.device)

    @contextmanager
    def running(self, phase: str, step: int) -> Iterator[None]:
        """Forward and backward passes of one step run inside; the generator's outer state is put back after."""
        outer = self._generator.get_state()
        self.phase, self.step = phase, step
        try:
            yield
        finally:
            self._generator.set_state(outer)

    def at(self, micro_batch: int) -> None:
        """The forward pass of `micro_batch` (its place in the step's global list) begins."""
        self.micro_batch = micro_batch
        self.calls.clear()

    def enter(self, segment: str) -> None:
        """Seed the generator for the next call of `segment`."""
        call = self.calls.get(segment, 0)
        self.calls[segment] = call + 1
        self._generator.manual_seed(derive_key(self.seed, self.phase, self.step, self.micro_batch, segment, call))

    def capture(self) -> tuple[str, int, int, dict[str, int]]:
        """Where the cursor stands, to be taken up again by `recomputing`."""
        return self.phase, self.step, self.micro_batch, dict(self.calls)

    @contextmanager
    def recomputing(self, captured: tuple[str, int, int, dict[str, int]]) -> Iterator[None]:
        """Segments that run inside draw what they drew when `captured` was taken."""
        outer = self.capture()
        self.phase, self.step, self.micro_batch, self.calls = (*captured[:3], dict(captured[3]))
        try:
            yield
        finally:
            self.phase, self.step, self.micro_batch, self.calls = outer


def key_segments(cursor: Cursor, segments: Sequence[tuple[str, nn.Module]], *, chain: bool) -> None:
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
            cursor.enter(name)

        def after(_module: nn.Module, _args: object, _output: object, *, name: str = name) -> None:
            cursor.enter(f"{name}/after")

        module.register_forward_pre_hook(before, prepend=True)
        if not chain:
            module.register_forward_hook(after)
