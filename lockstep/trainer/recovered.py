"""Describes a live recovery: the layout before and after, how long it took, the steps it cost.

Tests: tests/faults/test_live_recovery.py
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lockstep.run_directory.records import RunDirectory


@dataclass(frozen=True)
class Recovered:
    """A live recovery that has come to its first step."""

    step: int  # the first one after it
    before: str  # the layout before
    layout: str  # the one that was chosen
    again: int  # number of steps that are trained again
    seconds: float  # from the death to the end of the first step
    parts: Mapping[str, float]  # of these, each part's (`recovery_clock`)

    @classmethod
    def read(cls, run: RunDirectory, step: int, parts: Mapping[str, float]) -> "Recovered":
        """Return it, with the layouts and the lost steps that the run's events tell of."""
        layouts: list[str] = [""]
        again = 0
        for event in run.read_events():
            if event["kind"] == "start":
                layouts.append(str(event["layout"]))
            elif event["kind"] == "recovery":
                again = 0
            elif event["kind"] == "lost_steps":
                again = int(event["come_to"]) - int(event["step"])
        before, layout = layouts[-2:]
        return cls(step, before, layout, again, sum(parts.values()), parts)

    @property
    def sentence(self) -> str:
        """The recovery in words."""
        parts = ", ".join(f"{name.replace('_', ' ')} {s:.2f}" for name, s in self.parts.items())
        steps = f"{self.again} step{'s' * (self.again != 1)} trained again"
        return f"{self.before} → {self.layout} in {self.seconds:.2f} s ({parts}); {steps}"

    def as_event(self) -> dict[str, object]:
        """Return the fields of the event `recovered`."""
        return {**asdict(self), "text": self.sentence}
