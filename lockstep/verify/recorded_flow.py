"""What is written down of the parts of a step: the reference's recording, and what deviates from it on a rank."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, str, int, str]  # micro-batch, module, number of its call, what: "input 0", "gradient of output 1" …

Operation = tuple[str, int, float, str]  # its name, fingerprint of its result, norm, line
Operations = dict[tuple[int, str], list[Operation]]  # by micro-batch and module

FORWARD, LOSS, BACKWARD, REDUCTION = "forward", "loss", "backward", "reduction"
STAGES = (FORWARD, LOSS, BACKWARD, REDUCTION)
NOT_REDUCED = "not reduced"
ITSELF = "the reference itself"
COUNTS = "counts"  # a micro-batch's loss is the reference's, but another number of targets
SLACK = 4.0  # a part may deviate by this many times what changed last bits do
LEAST = 1e-5  # relative; a smaller deviation of a part is rounding in any case
CEILING = 1e-2  # where changed last bits do more than this, a part can't be judged


@dataclass(frozen=True)
class Deviation:
    """One part of a step that differs on a rank, although it was given what the reference had.

    Attributes:
        stage: one of `STAGES`.
        rank, micro_batch: where.
        module: its name, and its class; of a parameter its name, and "".
        what: input, output or gradient.
        relative: size of the difference.
        relation: a clause: "is 2 × the reference".
        note: what else is different there: autocast, evaluation mode, the line of the first operation that differs.
    """

    stage: str
    rank: int
    micro_batch: int
    module: str
    what: str
    relative: float
    relation: str
    note: str = ""
    kind: str = ""


@dataclass
class RankFlow:
    """The findings of one rank, part by part.

    Attributes:
        deviations: in the order of the step.
        unjudged: parts that differ, and where last bits do too much to judge them.
        draws: modules that draw random numbers.
        collectives: that the forward pass calls.
        moved: attributes, globals and own generators that the forward pass changes.
        settings: of modules that are others than the reference's: "blocks.0.dropout.p 0.4 instead of 0.1".
        parts: number of parts that were compared.
    """

    deviations: list[Deviation] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    parts: int = 0


@dataclass
class RecordedFlow:
    """A recording of the reference.

    Attributes:
        tensors: of each part.
        state: (micro-batch, module, call) → what the module was like: training flag, autocast, dtypes.
        settings: module → its attributes that are numbers, texts or switches.
        operations: of each module's own code.
        losses: micro-batch → (loss, number of targets).
        units: micro-batch → gradient with which its backward pass began.
        bounds: how far each part may deviate.
        flow: draws, and what the model remembers.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    state: dict[tuple[int, str, int], str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    operations: Operations = field(default_factory=dict)
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    units: dict[int, float] = field(default_factory=dict)
    bounds: dict[Key, float] = field(default_factory=dict)
    flow: RankFlow = field(default_factory=RankFlow)

    def terms(self, name: str, micro_batches: Sequence[int], whole: Tensor) -> dict[int, Tensor]:
        """Return what each micro-batch adds to a gradient; empty if that is not known, as of a shard."""
        terms = {m: self.tensors.get((m, name, 0, "gradient")) for m in micro_batches}
        known = {m: term.double() for m, term in terms.items() if term is not None}
        fits = all(term.shape == whole.shape for term in known.values())
        return known if fits and len(known) == len(micro_batches) else {}


def save(stored: RecordedFlow, path: Path) -> None:
    """Write what the reference recorded."""
    torch.save(vars(stored), path)


def save_bounds(stored: RecordedFlow, path: Path) -> None:
    """Write, beside what the reference recorded, how far its parts deviate with other last bits."""
    path.with_suffix(".bounds").write_bytes(pickle.dumps(stored.bounds))


def load(path: Path) -> RecordedFlow:
    """Read what the reference recorded."""
    found = RecordedFlow(**torch.load(path, weights_only=False, mmap=True))
    bounds = path.with_suffix(".bounds")
    if bounds.exists():
        found.bounds = pickle.loads(bounds.read_bytes())
    return found
