"""Looks at the order in which a training loop reads its samples.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

from typing import Any

from torch.utils.data import DistributedSampler

from lockstep.verify.loop.findings import LoopLog
from lockstep.verify.own_lines import own_line


class SamplerChecks:
    """Looks at the passes of samplers over the data: whether an epoch has an order of its own."""

    def __init__(self, log: LoopLog) -> None:
        self._log = log
        # of each sampler: the epoch of its last pass, and the number of steps when that began
        self._epochs: dict[int, tuple[int, int]] = {}
        self._trained: set[tuple[int, int]] = set()  # samplers and epochs of which a step was taken
        self._repeated: dict[int, bool] = {}  # sampler → whether its pass repeats an epoch's order
        self._repeated_at = ""  # where a pass was begun that repeats the order of another

    def begun(self, sampler: DistributedSampler[Any]) -> None:
        """Look at a pass over the data that begins."""
        epoch, steps = self._epochs.get(id(sampler), (-1, self._log.steps))
        if self._log.steps > steps:  # else it was a look at a batch, and not an epoch
            self._trained.add((id(sampler), epoch))
        self._epochs[id(sampler)] = (sampler.epoch, self._log.steps)
        again = (id(sampler), sampler.epoch) in self._trained
        self._repeated[id(sampler)] = again and sampler.shuffle
        if self._repeated[id(sampler)]:
            self._repeated_at = own_line()

    def check_order(self) -> None:
        """Find an epoch that repeats the order of another, when a step is taken of it."""
        if any(self._repeated.values()):
            text = (
                "each epoch reads the samples in the same order: DistributedSampler.set_epoch is"
                " not called"
            )
            fix = "sampler.set_epoch(epoch) before each epoch"
            self._log.find("order of samples", text, fix, self._repeated_at)
