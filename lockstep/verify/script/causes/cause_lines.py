"""Names the script's own line for each cause: where it shows, or where what is missing belongs.

    cause                        line
    samples                      the loader, or the script's own sampler or stream
    random numbers, first values the seed that is alike, or not; where the model is made
    computation of a rank        the first operation that differs
    loss normalisation           where the loss is computed, or its backward pass begins
    gradient synchronisation     the script's own collective; the call of a model without a wrapper

A cause for which nothing of this was seen has no line: none is better than a wrong one.

Tests: tests/verify/test_own_lines.py, tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.verify.comparison_result import UNKNOWN, Cause, Outcome
from lockstep.verify.script.causes.fixes import NORMALISATION
from lockstep.verify.script.causes.gradients import COMPUTATION, NOT_SYNCHRONISED, SUM
from lockstep.verify.script.causes.operations import OperationDifference
from lockstep.verify.script.observed.draws import drawn_apart
from lockstep.verify.script.observed.traced_operations import BACKWARD, UPDATE
from lockstep.verify.script.record import CLIP, RecordedStep, ScriptRecord
from lockstep.verify.script.recorded_lines import seed_that_agrees, seed_that_differs


@dataclass
class LineEvidence:
    """Holds what was seen of a script's lines."""

    records: Sequence[ScriptRecord]  # of the ranks
    step: int = 0  # the first that differs
    differs: OperationDifference | None = None  # the first operation that differs
    traced: Sequence[ScriptRecord] = field(default_factory=list)  # ranks whose operations were

    @property
    def steps(self) -> list[RecordedStep]:
        """The step that differs, or the last before it, of each rank that took one."""
        taken = [record.steps for record in self.records if record.steps]
        return [steps[min(self.step, len(steps) - 1)] for steps in taken]

    @property
    def last_step(self) -> RecordedStep:
        """The same of rank 0."""
        return next(iter(self.steps), RecordedStep()) if self.records[0].steps else RecordedStep()

    @property
    def own_update(self) -> str:
        """The last line that changed a tensor between a backward pass and the update; or empty."""
        steps = [record.steps[self.step :] for record in self.traced]
        operations = [operation for step in steps if step for operation in step[0].operations]
        lines = [
            operation.own
            for operation in operations
            if operation.phase == UPDATE and operation.name.endswith("_")
        ]
        return next(filter(None, reversed(lines)), "")

    @property
    def loss(self) -> str:
        """Return the line of the loss; where that was not traced, that of its backward pass."""
        lines = self.records[-1].lines
        steps = [record.steps[self.step :] for record in self.traced]
        traced = [step[0].loss_line for step in steps if step]
        found = next(filter(None, traced), "") or lines.loss
        return found or self.last_step.line_of(BACKWARD)


def name_lines(outcome: Outcome, evidence: LineEvidence) -> None:
    """Set the line of each cause that has none, where one is known."""
    for cause in outcome.causes:
        if not cause.line and evidence.records:
            cause.place_at(_line(cause, evidence))


def _line(cause: Cause, evidence: LineEvidence) -> str:
    """Return the script's own line for a cause; empty if none was seen."""
    record = evidence.records[0]
    recorded = record.lines
    step = evidence.last_step
    if cause.kind == "samples":
        return _line_of_samples(evidence)
    if cause.kind == "random numbers":
        return seed_that_agrees([each.lines for each in evidence.records])
    if cause.kind == "first values":
        seed = seed_that_differs([each.lines for each in evidence.records])
        return seed or _of_parameters(cause, recorded.made, record)
    if cause.kind in (COMPUTATION, UNKNOWN):
        return "" if evidence.differs is None else evidence.differs.line
    if cause.kind == SUM:
        return _line_of_sum(cause, evidence)
    if cause.kind in (NORMALISATION, "coupled samples", "gradient accumulation"):
        return evidence.loss
    if cause.kind == NOT_SYNCHRONISED:
        return _line_of_synchronisation(cause, evidence)
    if cause.kind == "precision":
        return _of_parameters(cause, recorded.models, record)
    # Rank 0 may be one that does not clip, say, where others do.
    lines = {
        "clipping": _first([each.line_of(CLIP) for each in evidence.steps]) or evidence.own_update,
        "communication hook": _first([each.lines.hook for each in evidence.records]),
        "learning rate schedule": _first([each.lines.schedule for each in evidence.records]),
        "uneven steps": recorded.reads.get(record.training_loader or 0, ""),
        "replicas": _line_of_replicas(cause, evidence),
    }
    if cause.column == "settings" and cause.kind not in lines:
        first = record.steps[0].settings if record.steps else []
        scheduled = recorded.schedule and first == step.settings and evidence.step
        return recorded.schedule if scheduled else next(iter(recorded.optimizers), "")
    return lines.get(cause.kind, "")


def _first(lines: Sequence[str]) -> str:
    return next(filter(None, lines), "")


def _of_parameters(cause: Cause, lines: dict[str, str], record: ScriptRecord) -> str:
    """Return the line of the model whose parameters a cause is about; else of the first model."""
    name = next(iter(cause.parameters), next(iter(record.first), ""))
    return record.lines.of_parameter(lines, name)


def _line_of_samples(evidence: LineEvidence) -> str:
    """Return where the loader is made; without one, what orders the samples of each rank.

    These are orders that differ, or what makes ranks draw the same; or else what reads them.
    """
    record = evidence.records[0]
    loader = next(iter(record.training_loaders), None)
    if loader is not None:
        return record.lines.loaders.get(loader, "")
    apart = drawn_apart([each.draws for each in evidence.records])
    orders = [draw.line for draw in record.draws if draw.is_permutation and draw.place in apart]
    if orders:
        return orders[0]
    seed = seed_that_agrees([each.lines for each in evidence.records])
    drawn = [draw.line for draw in record.draws if draw.outside]
    read = [each.line for each in record.reads]
    return seed or next(iter(reversed(drawn or read)), "")


def _line_of_sum(cause: Cause, evidence: LineEvidence) -> str:
    """Return where gradients are added up: the script's own collective, or else its loss.

    Where only some parameters are concerned, ranks exchange tensors before the loss. A collective
    that is given tensors with gradients there lets none come back.
    """
    step = evidence.last_step
    reduced = step.lines_of_collectives() or step.cutting
    if reduced:
        return reduced[-1]
    is_partial = bool(cause.parameters) and set(cause.parameters) < set(step.gradients)
    if is_partial and evidence.differs is not None:
        return evidence.differs.line
    return evidence.loss


def _line_of_replicas(cause: Cause, evidence: LineEvidence) -> str:
    """Return where replicas part: in an update; else where weights are written that differ then.

    The cause names these weights, of which the first operation that differs is given some.
    """
    differs = evidence.differs
    if cause.parameters and differs is not None and not differs.is_update:
        return differs.line
    return evidence.last_step.line_of(UPDATE)


def _line_of_synchronisation(cause: Cause, evidence: LineEvidence) -> str:
    """Return where the gradients that are not synchronised leave those of other ranks."""
    record = evidence.records[0]
    step = evidence.last_step
    if evidence.differs is not None and evidence.differs.is_update:
        return evidence.differs.line
    reduced = step.lines_of_collectives()
    if reduced:
        names = [name for name, _ in step.calls]
        last = max(at for at, (_, line) in enumerate(step.calls) if line == reduced[-1])
        added_later = BACKWARD in names[last + 1 :]
        return step.line_of(BACKWARD) if added_later else reduced[-1]
    name = next(iter(cause.parameters), next(iter(step.gradients), ""))
    if record.lines.sharded and name in step.gradients and not step.gradients[name].cuts:
        return record.lines.sharded  # which has left the parameter out
    if record.lines.is_wrapped(name):
        return step.line_of(BACKWARD)
    return record.lines.of_parameter(record.lines.models, name)
