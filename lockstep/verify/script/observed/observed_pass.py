"""What stands around the passes of a micro-batch: the random generators, and a run's conditions.

    states of the generators          before
    conditions begin                  generators are seeded, rounding changed, if the run says so
    the outermost module is called    again and again, as in a pipeline or a GAN
    backward pass                     what moved is noted
    conditions end                    the generators are as the script would have left them

Tests: tests/verify/test_script.py
"""

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from lockstep.verify.operation_modes import FullPrecision, MeanDraws
from lockstep.verify.script.observed.values import fingerprint, generator_states
from lockstep.verify.script.record import RandomDraw
from lockstep.verify.script.task import Conditions


class GeneratorStates:
    """The states of the random generators in the passes of a micro-batch, by generator."""

    def __init__(self) -> None:
        self.before: dict[str, Any] | None = None  # when the micro-batch began; None: between two
        self._called_with: dict[str, Any] = {}  # when the outermost module was called
        self._moved: dict[str, Any] = {}  # generator that a forward pass has moved → its state then

    @property
    def in_pass(self) -> bool:
        """Return whether a micro-batch has begun, whose backward pass is not done."""
        return self.before is not None

    def begin(self) -> None:
        """Note the states in which a micro-batch begins."""
        self.before = generator_states()

    def note_call(self) -> None:
        """Note the states in which the outermost module is called."""
        self._called_with = generator_states() if self.in_pass else {}

    def note_moved(self) -> None:
        """Note the generators that have moved since the outermost module was called."""
        now = generator_states()
        for name, state in self._called_with.items():
            if fingerprint(state) != fingerprint(now[name]):
                self._moved[name] = now[name]

    def draw(self) -> RandomDraw | None:
        """Return what the forward pass has drawn; None if none was seen."""
        if self.before is None:
            return None
        before = {name: fingerprint(state) for name, state in self.before.items()}
        moved = {name: fingerprint(state) for name, state in self._moved.items()}
        return RandomDraw(before, {**before, **moved})

    def end(self) -> None:
        """Forget a micro-batch whose backward pass is done."""
        self.before = None
        self._moved = {}


class AppliedConditions:
    """Changes how passes draw and round, as the conditions of a run say."""

    def __init__(self, conditions: Conditions, rank: int) -> None:
        self._conditions = conditions
        self._rank = rank
        self._modes = ExitStack()  # from the forward pass to the end of the backward pass
        self._mean_draws = MeanDraws()
        self.seeding = False  # whether it seeds generators now, and not the script

    def begin(self, number: int) -> None:
        """Begin the pass of a number, once the states of the generators are noted."""
        self.seeding = True
        if self._conditions.mean_draws:
            random.seed(0)
            np.random.seed(0)
            self._modes.enter_context(self._mean_draws)
        if self._conditions.full_precision:
            self._modes.enter_context(FullPrecision())  # type: ignore[no-untyped-call]
        if self._conditions.keyed_passes:
            torch.manual_seed(self._rank * 1_000_003 + number)
        self.seeding = False

    def end(self, before: dict[str, Any] | None) -> None:
        """End the pass, and leave the generators as they were before where it was seeded."""
        self._modes.close()
        if before is None:
            return
        if self._conditions.mean_draws:
            random.setstate(before["python"])
            np.random.set_state(before["numpy"])
        if self._conditions.keyed_passes:
            torch.set_rng_state(before["torch"])

    def draw_outside_of_modules(self, call: Callable[[], Any]) -> Any:
        """Draw the numbers themselves, which one process is given, too."""
        with self._mean_draws.paused():
            return call()
