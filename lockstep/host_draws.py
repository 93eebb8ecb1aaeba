"""Finds out whether a user's code draws from the global generators of Python and NumPy.

Most data and models do not, and seeding these generators, saving and restoring them takes longer
than torch's. So draws are found by comparing states: data are read without their seeds until a
micro-batch has drawn (`have_moved`), and a model that has not drawn in its first step gets no more
keys for them (`HostRandom`).

Tests: tests/data/test_late_draws.py, tests/test_randomness.py
"""

import ctypes
import inspect
import random
import sys
from array import array
from typing import Any

import numpy as np
import torch

# The state of Python's generator, and that of NumPy's.
HostGenerators = tuple[Any, Any]


def host_generators() -> HostGenerators:
    """Return the states of Python's and NumPy's generators, for `have_moved`."""
    return _python_state(), _numpy_state()


def have_moved(before: HostGenerators) -> bool:
    """Return whether Python's or NumPy's generator was used since `host_generators`."""
    return _python_state() is not before[0] or _numpy_state() is not before[1]


def restore_host_generators(before: HostGenerators) -> None:
    """Set the states that `host_generators` returned."""
    random.setstate(before[0])
    np.random.set_state(before[1])


# Both generators are MT19937: 624 words, and the position among them. Making a state of these takes
# some 20 µs, comparing the bytes that lie in memory takes one. So the state that was made last is
# kept, and is returned again as long as nothing has drawn.
_MT19937_BYTES = 4 * 625
# the generator itself, also where an observer has wrapped the functions that are its methods
_PYTHONS: Any = inspect.unwrap(random.seed).__self__
_known_python: tuple[bytes, Any] = b"", None  # as bytes, and as `random.getstate` gives it
_known_numpy: tuple[bytes, Any] = b"", None  # as bytes, and as NumPy gives it


def _python_state() -> Any:
    """Return the state of Python's generator, the same object as long as nothing has drawn."""
    global _known_python
    # CPython has the position and the words behind the head that every object begins with.
    raw = ctypes.string_at(id(_PYTHONS) + object.__basicsize__, _MT19937_BYTES)
    known_raw, known = _known_python
    # A normal variate that was kept for the next call is not among the bytes.
    if raw == known_raw and known[2] == _PYTHONS.gauss_next:
        return known
    state = random.getstate()
    *words, position = state[1]
    if raw == array("I", [position, *words]).tobytes():
        _known_python = raw, state
    return state


def _numpy_state() -> Any:
    """Return the state of NumPy's generator, the same object as long as nothing has drawn."""
    global _known_numpy
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state(legacy=False)
    raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    known_raw, known = _known_numpy
    if raw == known_raw and not known["has_gauss"]:
        return known
    state = np.random.get_state(legacy=False)
    if raw == known_raw and (state["has_gauss"], state["gauss"]) == (1, known["gauss"]):
        return known
    words = state["state"]
    if raw == words["key"].tobytes() + words["pos"].to_bytes(4, sys.byteorder):
        _known_numpy = raw, state
    return state


HostState = tuple[Any, Any, Any]  # of Python's, NumPy's and torch's generator


class HostRandom:
    """Seeds the global generators of Python and NumPy.

    If the model's `device` is not the CPU, it seeds torch's CPU generator, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.default_generator if device.type != "cpu" else None
        self._keyed: list[Any] | None = None  # the states right after a key was set
        self.drawn = False  # a random number has been drawn since a key was set
        self.trained = False  # a key was set in a training step
        self.settled = False  # all ranks have agreed that a rank draws

    def seed(self, key: int, *, trains: bool) -> None:
        """Set a key, in a training step or elsewhere; check for a draw since the last one."""
        self.check_draws()
        self.trained = self.trained or trains
        random.seed(key)
        np.random.seed([key & 0xFFFFFFFF, key >> 32])
        if self._cpu is not None:
            self._cpu.manual_seed(key)
        self._keyed = None if self.drawn else self._states()

    def settle(self) -> None:
        """Note that all ranks have agreed that the model draws from these generators."""
        self.settled = True

    def check_draws(self) -> None:
        """Check whether a random number has been drawn since the last key."""
        self.drawn = self.drawn or (self._keyed is not None and self._states() != self._keyed)

    def end(self, outer: HostState) -> None:
        """Check for a draw since the last key.

        The states that `capture` has returned are restored.
        """
        self.check_draws()
        self._keyed = None
        self.restore(outer)

    def capture(self) -> HostState:
        """Return the current states."""
        return random.getstate(), np.random.get_state(), self._cpu and self._cpu.get_state()

    def restore(self, states: HostState) -> None:
        """Set the states that `capture` has returned."""
        python, numpy, cpu = states
        random.setstate(python)
        np.random.set_state(numpy)
        if self._cpu is not None:
            self._cpu.set_state(cpu)

    def _states(self) -> list[Any]:
        numpy = [
            part.tobytes() if isinstance(part, np.ndarray) else part
            for part in np.random.get_state()
        ]
        states: list[Any] = [random.getstate(), numpy]
        if self._cpu is not None:
            states.append(self._cpu.get_state().numpy().tobytes())
        return states
