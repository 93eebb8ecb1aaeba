"""Holds what is known about a difference, and says in words where a step deviates first."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import listed
from lockstep.verify.differences import ASPECTS, SCALAR_TOLERANCE, StepResult, name_ranks
from lockstep.verify.experiments import FORCED
from lockstep.verify.recorded_flow import BACKWARD, FORWARD, LOSS, NOT_REDUCED, REDUCTION, STAGES, Deviation, RankFlow
from lockstep.verify.trace import StepFacts, Trace

UNKNOWN = "cause not known"
GONE = 1e-2  # an experiment that leaves less than this fraction of a difference has removed it


@dataclass
class Cause:
    """Cause of a difference.

    Attributes:
        kind: one word or two: data order, random numbers, loss normalisation …
        text: one sentence.
        found_by: the experiments that show it.
        is_error: False for rounding.
        is_judged: False if neither an error nor rounding could be shown.
    """

    kind: str
    text: str
    found_by: list[str] = field(default_factory=list)
    is_error: bool = True
    is_judged: bool = True


@dataclass
class Evidence:
    """All that is known about one topology's difference."""

    found: StepResult  # the first step that differs, in the main run
    tried: dict[str, StepResult]  # experiment → the topology's result
    left_out: dict[str, str]  # experiment that could not be made → reason
    folder: Path  # of the reference's traces
    config: Config  # of the run

    def agrees(self, name: str, left_out: Collection[str] = ()) -> bool:
        """Return whether the experiment was made and removed the difference: of all that differs, nothing is left.

        Args:
            left_out: buffers that the experiment itself writes.

        Rounding counts: a difference that is not larger than the experiment's rounding is not explained by it. The norm
        does if it differs alone: else it follows from the gradients, and an experiment may be without clipping.
        """
        result = self.tried.get(name)
        if result is None or result.has("start"):
            return False
        if self.found.has("gradient") and result.rounding > GONE * min(1.0, self.found.distance("gradient")):
            return False
        aspects = ("loss", "gradient", "value", "buffer")
        was = {a: self.found.distance(a) for a in (aspects if self.found.has(*aspects) else ("norm",))}
        written = [d for d in result.differences if d.aspect == "buffer" and d.name in left_out]
        result = replace(result, differences=[d for d in result.differences if d not in written])
        left = {aspect: result.distance(aspect) for aspect in was}
        least = {"loss": 4 * SCALAR_TOLERANCE}
        return any(was.values()) and all(left[a] <= max(GONE * min(1.0, was[a]), least.get(a, 0.0)) for a in was)

    def facts(self, name: str) -> StepFacts | None:
        """Return the reference's facts of an experiment; None if it was not made."""
        trace = Trace(self.folder / name)
        step = self.tried[name].step if name in self.tried else self.found.step
        try:
            return trace.facts(step)
        except FileNotFoundError:
            return None

    @property
    def flows(self) -> list[RankFlow]:
        """The findings of each rank, part by part; empty if that was not possible."""
        return self.tried[FORCED].flows if FORCED in self.tried else []

    @property
    def all_deviations(self) -> list[Deviation]:
        """The parts that deviate by themselves on any rank, in the order of a step."""
        every = [deviation for flow in self.flows for deviation in flow.deviations]
        return sorted(every, key=lambda deviation: (STAGES.index(deviation.stage), deviation.micro_batch))

    @property
    def deviations(self) -> list[Deviation]:
        """Those that can be the cause: what deviates in a forward pass, or in a loss, makes another loss."""
        if self.found.has("loss"):
            return self.all_deviations
        return [d for d in self.all_deviations if d.stage not in (FORWARD, LOSS)]

    @property
    def not_reduced(self) -> set[str]:
        """The parameters for which a rank's own sum is seen to stand where the reduced gradient should."""
        return {d.module for d in self.deviations if d.stage == REDUCTION and NOT_REDUCED in d.relation}


def first_seen(e: Evidence) -> str:
    """Return a clause on what differs first in the step, and on which ranks."""
    first = e.found.first
    assert first is not None
    others = [a for a in ASPECTS if a != first.aspect and e.found.has(a)]
    how = f" {first.relation}" if first.relation else f" on {name_ranks(first.ranks)}"
    text = f"the first that differs is the {first.aspect} ({first.name}){how}"
    return text + (f", and so do {listed(others)}" if others else "")


def located(e: Evidence) -> str:
    """Return a clause on the first part that deviates; "" if none does."""
    found = e.deviations
    if not found:
        return ""
    first = found[0]
    alike = [d for d in found if (d.stage, d.module, d.what) == (first.stage, first.module, first.what)]
    # The rank on which it is wrong, if only some are: the relation of the first.
    name = first.module or "the model"
    module = f"{name} ({first.kind})" if first.kind else name
    what = {
        FORWARD: f"the {first.what} of {module}",
        LOSS: f"the {first.what} of a micro-batch, from the same outputs",
        BACKWARD: f"the {first.what} of {module}, from the same gradients",
        REDUCTION: f"the reduced gradient of {name}, of the same gradients on each rank,",
    }[first.stage]
    place = f"; {first.stage}: {what} {first.relation} on {name_ranks(ranks_of(alike))}"
    batches = sorted({d.micro_batch for d in alike if d.micro_batch >= 0})
    if batches:
        place += f", micro-batch{'es' if len(batches) > 1 else ''} {', '.join(map(str, batches[:8]))}"
    place += f" ({first.note})" if first.note else ""
    others = list(dict.fromkeys((d.module or "the model") for d in found if d.module != first.module))
    return place + (f"; also {listed(others)}" if others else "")


def ranks_of(found: Sequence[Deviation]) -> list[int]:
    """Return the ranks on which parts deviate."""
    return sorted({deviation.rank for deviation in found})
