"""Brings back what a block began with, for its recomputation: random numbers and buffers.

A block that is recomputed in the backward pass has to compute what it computed in the forward pass:
it draws the same numbers, and reads running statistics as they were before that pass wrote them.
What it writes in turn is dropped.

Tests: tests/parallel/execution/test_activation.py, tests/parallel/execution/test_recompute.py
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lockstep.host_draws import HostState
from lockstep.machine.accelerator import default_generator
from lockstep.randomness import RandomState
from lockstep.torch_compat.normalizations import BatchNorm
from lockstep.torch_compat.tensor_versions import version_of

Copies = list[tuple[nn.Module, str, Tensor]]  # (module, name of a buffer there, its values)


class ChangingBuffers:
    """The buffers of a block that its forward pass changes."""

    def __init__(self, block: nn.Module) -> None:
        self._all = [
            (m, name) for m in block.modules() for name, _ in m.named_buffers(recurse=False)
        ]
        self._changing: list[tuple[nn.Module, str]] | None = None  # None: no forward pass was seen
        self._before: list[tuple[int, int]] = []

    def copied(self) -> Copies:
        """Return copies of the buffers that change; before the first forward pass, of all."""
        if self._changing is None:
            self._before = self._versions()
        buffers = self._all if self._changing is None else self._changing
        return [
            (m, name, buffer.clone())
            for m, name in buffers
            if (buffer := getattr(m, name)) is not None
        ]

    def notice(self) -> None:
        """Note, after the first forward pass, which of them it has changed."""
        if self._changing is not None:
            return
        pairs = zip(self._all, self._before, self._versions(), strict=True)
        # Batch normalisation writes its averages without a new version.
        self._changing = [
            each for each, old, new in pairs if old != new or isinstance(each[0], BatchNorm)
        ]

    def _versions(self) -> list[tuple[int, int]]:
        buffers = [getattr(module, name) for module, name in self._all]
        return [
            (0, 0) if buffer is None else (id(buffer), version_of(buffer)) for buffer in buffers
        ]


@contextmanager
def recomputing(
    random_state: RandomState,
    captured: HostState | None,
    drawn: Tensor | None,
    buffers: Copies,
    reuse: AbstractContextManager[Any],
) -> Iterator[None]:
    """Repeat a block's random numbers in its recomputation.

    torch does so by itself where the block has tensors among its positional arguments and the
    device's module has `_initialized`, which those of MPS and of registered devices lack. `drawn`:
    the generator's state as the forward pass began; None: torch restores it.
    """
    drawing = nullcontext() if drawn is None else drawing_from(drawn, random_state)
    with random_state.recomputing(captured), drawing, in_place(buffers), reuse:
        yield


@contextmanager
def in_place(buffers: Copies) -> Iterator[None]:
    """Put copies in the place of buffers for the length of the block.

    The buffers themselves are not written: autograd may have saved them.
    """
    live = [getattr(module, name) for module, name, _ in buffers]
    for module, name, before in buffers:
        setattr(module, name, before.clone())  # two halves of a backward pass may each recompute
    try:
        yield
    finally:
        for (module, name, _), buffer in zip(buffers, live, strict=True):
            setattr(module, name, buffer)


@contextmanager
def drawing_from(state: Tensor, random_state: RandomState) -> Iterator[None]:
    """Draw the device's random numbers in the block from `state`, and restore the outer state."""
    generator = default_generator(random_state.device)
    outer = generator_state(random_state)
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(outer)


def generator_state(random_state: RandomState) -> Tensor:
    """Return the state of the device's generator."""
    return default_generator(random_state.device).get_state()
