"""What a process of a script writes down of its steps, and how pieces of ranks become whole tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
TORCH, ACCELERATE, FABRIC, LIGHTNING, TRANSFORMERS, DEEPSPEED, LOCKSTEP = (
    "PyTorch", "Accelerate", "Fabric", "Lightning", "transformers", "DeepSpeed", "Lockstep",
)  # fmt: skip


@dataclass
class TensorPiece:
    """One rank's part of a tensor.

    Attributes:
        local: a copy on the CPU.
        shape: of the whole tensor.
        cuts: for each cut, in order: dim, number of parts, this rank's part. Empty: the rank holds all of it.
        flat: the rank holds a piece of a flattened tensor (FSDP1).
    """

    local: Tensor
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()
    flat: bool = False


Pieces = dict[str, TensorPiece]


@dataclass(frozen=True)
class RandomDraw:
    """State of the generators before a forward pass and at its backward pass, as fingerprints by generator."""

    before: dict[str, str]
    after: dict[str, str]

    def states_of(self, generator: str) -> tuple[str | None, str | None]:
        """Return a generator's state before and after."""
        return self.before.get(generator), self.after.get(generator)

    @property
    def moved(self) -> list[str]:
        """Generators from which the pass drew."""
        return [name for name, state in self.before.items() if self.after.get(name) != state]


@dataclass
class RecordedStep:
    """One call of `optimizer.step()`.

    Attributes:
        losses: what each backward pass started from.
        inputs: of each forward pass of a whole model, fingerprints of its rows.
        draws: of each micro-batch.
        dtypes: of the parameters, and those of autocast.
        before: fingerprints of the parameters before the update.
        unclipped: gradients when clipping began; empty without clipping.
        gradients: as the optimizer used them.
        settings: of each parameter group: learning rate, weight decay …
        schedules: how often each learning rate schedule was stepped.
        values: parameters after the step.
    """

    losses: list[float] = field(default_factory=list)
    inputs: list[list[str]] = field(default_factory=list)
    draws: list[RandomDraw] = field(default_factory=list)
    dtypes: set[str] = field(default_factory=set)
    before: dict[str, str] = field(default_factory=dict)
    unclipped: Pieces = field(default_factory=dict)
    gradients: Pieces = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[int] = field(default_factory=list)
    values: Pieces = field(default_factory=dict)


@dataclass
class ScriptRecord:
    """Steps of one process of a script.

    Attributes:
        steps: in order.
        first: parameters before the first step, or before they were given other first values.
        batches: of each loader, by the order of their making: fingerprints of each batch's samples.
        asked: batch size of each loader as the script wrote it.
        framework: whose loop it is: PyTorch, Accelerate, Fabric, Lightning, transformers, DeepSpeed, Lockstep.
        wrappers: class names of the modules that were called from outside, and of those inside that wrap others.
        normalises: whether a module normalises by the statistics of its batch.
        notices: what could not be recorded.
    """

    steps: list[RecordedStep] = field(default_factory=list)
    first: Pieces = field(default_factory=dict)
    batches: dict[int, list[list[str]]] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    framework: str = TORCH
    wrappers: set[str] = field(default_factory=set)
    normalises: bool = False
    notices: list[str] = field(default_factory=list)

    @property
    def passes(self) -> list[int]:
        """Number of backward passes of each step."""
        return [len(step.losses) for step in self.steps]

    @property
    def training_loader(self) -> int | None:
        """The loader that gave each backward pass its batch; the one that was read least beyond that."""
        enough = {loader: len(read) for loader, read in self.batches.items() if len(read) >= sum(self.passes) > 0}
        return min(enough, key=lambda loader: enough[loader]) if enough else None


def record_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's record."""
    return folder / f"record-{rank}.pt"


def batch_file(folder: Path, rank: int, loader: int, index: int) -> Path:
    """Return the file with the samples of one batch of a loader."""
    return folder / f"samples-{rank}-{loader}-{index}.pickle"


def load_records(folder: Path, ranks: int) -> list[ScriptRecord]:
    """Load the records of all ranks."""
    return [torch.load(record_file(folder, rank), weights_only=False) for rank in range(ranks)]


def is_cut(pieces: Sequence[TensorPiece]) -> bool:
    """Return whether ranks hold different parts of a tensor."""
    return any(piece.cuts or piece.flat for piece in pieces)


def whole(pieces: Sequence[TensorPiece]) -> Tensor:
    """Return the whole tensor; of equal copies, that of the first rank."""
    if pieces[0].flat:
        return torch.cat([piece.local.flatten() for piece in pieces])
    if not pieces[0].cuts:
        return pieces[0].local
    result = torch.zeros(pieces[0].shape, dtype=pieces[0].local.dtype)
    for piece in pieces:
        part = result
        for dim, parts, index in piece.cuts:
            size = -(-part.shape[dim] // parts)
            start = min(index * size, part.shape[dim])
            part = part.narrow(dim, start, min(size, part.shape[dim] - start))
        part.copy_(piece.local)
    return result


def by_rank(ranks: Sequence[Pieces]) -> list[Tensors]:
    """Return tensors as each rank has them, or once if ranks hold parts of them."""
    if any(is_cut(list(rank.values())) for rank in ranks):
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return [{name: whole([rank[name] for rank in ranks if name in rank]) for name in names}]
    return [{name: piece.local for name, piece in rank.items()} for rank in ranks]
