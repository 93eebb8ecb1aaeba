"""Describes what each process of a script writes down of its steps.

A run's `ScriptTask` (task.py) names the files; the pieces that ranks hold of a tensor are put
together by their `World` (world.py).

Tests: tests/verify/test_script.py
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.torch_compat.parallel_patches import COLLECTIVES
from lockstep.verify.script.observed.draws import BatchKey, LoopDraw
from lockstep.verify.script.observed.orders import LoaderPass
from lockstep.verify.script.observed.reads import LoopRead
from lockstep.verify.script.observed.traced_operations import (
    BACKWARD,
    TracedOperation,
    line_of_loss,
)
from lockstep.verify.script.recorded_lines import ScriptLines

TORCH = "PyTorch"
ACCELERATE = "Accelerate"
FABRIC = "Fabric"
LIGHTNING = "Lightning"
TRANSFORMERS = "transformers"
DEEPSPEED = "DeepSpeed"
LOCKSTEP = "Lockstep"
CLIP = "clip"  # a call of a step

# What lets layers compute in 16 bits though their parameters have 32.
AUTOCAST = "autocast"
FSDP_CASTS = "FSDP's mixed precision"

# Whose code calls the optimizer, by the names of modules; the first that calls it, if several do.
_FRAMEWORKS = {
    "transformers.trainer": TRANSFORMERS,
    "lightning.pytorch": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "lightning.fabric": FABRIC,
    "lightning_fabric": FABRIC,
    "deepspeed": DEEPSPEED,
    "accelerate.optimizer": ACCELERATE,
    "lockstep.trainer": LOCKSTEP,
}


@dataclass
class TensorPiece:
    """One rank's part of a tensor."""

    local: Tensor  # a copy on the CPU
    shape: tuple[int, ...]  # of the whole tensor
    # for each cut, in order: dim, number of parts, this rank's part. Empty: the rank holds all of
    # it.
    cuts: tuple[tuple[int, int, int], ...] = ()
    flat: bool = False  # the rank holds a piece of a flattened tensor (FSDP1)

    def add(self, other: "TensorPiece") -> None:
        """Add another piece of the same place."""
        self.local += other.local


Pieces = dict[str, TensorPiece]


@dataclass(frozen=True)
class RandomDraw:
    """The states of the random generators around a forward pass.

    They are fingerprints by generator, before the forward pass and at its backward pass.
    """

    before: dict[str, str]
    after: dict[str, str]

    @property
    def moved(self) -> list[str]:
        """Generators from which the pass drew."""
        return [name for name, state in self.before.items() if self.after.get(name) != state]


@dataclass
class RecordedStep:
    """One call of `optimizer.step()`."""

    # name and output, as two numbers, of each call
    flow: list[tuple[str, float, float]] = field(default_factory=list)
    # gradients of its samples alone, before ranks are reduced; or empty
    own: Pieces = field(default_factory=dict)
    operations: list[TracedOperation] = field(default_factory=list)  # where they are traced
    losses: list[float] = field(default_factory=list)  # what each backward pass started from
    # of each backward pass, the batches that were read to train on since the one before
    read: list[list[BatchKey]] = field(default_factory=list)
    # line at which the last of these was computed, where operations are traced
    loss_line: str = ""
    # what the script itself calls, and its line: backward, collectives, clip, update
    calls: list[tuple[str, str]] = field(default_factory=list)
    # whether ranks exchange tensors before a backward pass, as for a norm over all of them
    exchanges: bool = False
    # lines of collectives that are given tensors with gradients, of which none come back
    cutting: list[str] = field(default_factory=list)
    # of each pass of a whole model, prints of its rows
    inputs: list[list[str]] = field(default_factory=list)
    # what tells the elements of these inputs from others, in whatever order: it adds up over ranks
    elements: int = 0
    draws: list[RandomDraw] = field(default_factory=list)  # of each micro-batch
    dtypes: set[str] = field(default_factory=set)  # of the parameters, and those of autocast
    # names of the optimizer's parameters, in its order
    order: list[str] = field(default_factory=list)
    optimizer: str = ""  # name of its class
    # fingerprints of the parameters before the update
    before: dict[str, str] = field(default_factory=dict)
    # gradients when clipping began; empty without clipping
    unclipped: Pieces = field(default_factory=dict)
    gradients: Pieces = field(default_factory=dict)  # as the optimizer used them
    # of each parameter group: learning rate and others
    settings: list[dict[str, Any]] = field(default_factory=list)
    # networks that it calls and no optimizer trains: their prints, and where values were loaded
    untrained: dict[str, str] = field(default_factory=dict)
    loaded_at: dict[str, str] = field(default_factory=dict)
    # how often each learning rate schedule was stepped
    schedules: list[int] = field(default_factory=list)
    values: Pieces = field(default_factory=dict)  # parameters after the step

    def add_inputs(self, rows: list[str], elements: int) -> None:
        """Note the inputs of a pass of an entire model."""
        self.inputs.append(rows)
        self.elements = (self.elements + elements) % 2**64

    def has_inputs_of(self, other: "RecordedStep") -> bool:
        """Return whether models got the same inputs."""
        return self.elements == other.elements and self.inputs == other.inputs

    def note_cut(self, line: str) -> None:
        """Note a collective that is given tensors with gradients, of which none come back."""
        self.cutting.append(line)

    def note_exchange(self) -> None:
        """Note that ranks exchange tensors before a backward pass."""
        self.exchanges = True

    def note_backward(self, line: str, loss: Tensor) -> None:
        """Note a backward pass that begins, and where its loss was computed."""
        self.calls.append((BACKWARD, line))
        self.loss_line = line_of_loss(self.operations, loss) or self.loss_line

    def line_of(self, call: str) -> str:
        """Return the last line of the script that makes such a call in the step; or empty."""
        return next((line for name, line in reversed(self.calls) if name == call), "")

    def lines_of_collectives(self) -> list[str]:
        """Return the script's own collectives that come after a backward pass of the step."""
        lines: list[str] = []
        begun = False
        for name, line in self.calls:
            begun |= name == BACKWARD
            if begun and name in COLLECTIVES:
                lines.append(line)
        return lines

    def begin_update(
        self,
        gradients: Pieces,
        before: dict[str, str],
        settings: list[dict[str, Any]],
        schedules: list[int],
        optimizer: str,
    ) -> None:
        """Note what the optimizer finds when it begins to update."""
        self.optimizer = optimizer
        self.gradients = gradients
        self.order = list(before)
        self.before = before
        self.settings = settings
        self.schedules = schedules

    def end_update(
        self, values: Pieces, untrained: dict[str, str], loaded_at: dict[str, str]
    ) -> None:
        """Note the updated parameters, and the untrained networks that the step has called."""
        self.values = values
        self.untrained = untrained
        self.loaded_at = loaded_at


@dataclass
class ScriptRecord:
    """Steps of one process of a script."""

    steps: list[RecordedStep] = field(default_factory=list)  # in order
    # parameters before the first step, or before they are given
    first: Pieces = field(default_factory=dict)
    # loader → prints of each batch's samples
    batches: dict[int, list[list[str]]] = field(default_factory=dict)
    # batch size of each loader as the script wrote it
    asked: dict[int, int] = field(default_factory=dict)
    # loader → samples in an epoch, in its data
    lengths: dict[int, tuple[int, int]] = field(default_factory=dict)
    # loader → what tells its data from others; a rank may hold its own part of them
    data: dict[int, str] = field(default_factory=dict)
    # loader → the positions that its samplers give in each pass that is trained on
    orders: dict[int, list[LoaderPass]] = field(default_factory=dict)
    replacing: set[int] = field(default_factory=set)  # loaders that draw with replacement
    framework: str = TORCH  # the library whose loop it is
    normalises: bool = False  # whether a module normalises by the statistics of its batch
    together: set[int] = field(default_factory=set)  # ranks that compute the same samples with it
    # name of a parameter in this process → in the ranks, if it was found by their order
    names: dict[str, str] = field(default_factory=dict)
    # name → dim along which ranks' parameters are joined
    joined: dict[str, int] = field(default_factory=dict)
    # name, size, line of the script's own
    collectives: list[tuple[str, int, str]] = field(default_factory=list)
    # mistakes of the loop: kind, text, fix
    findings: list[dict[str, str]] = field(default_factory=list)
    draws: list[LoopDraw] = field(default_factory=list)  # what the loop drew, in order
    early: list[LoopDraw] = field(default_factory=list)  # what was drawn before there was a loop
    reads: list[LoopRead] = field(default_factory=list)  # what the loop read without a loader
    # places of draws for which the ranks' numbers could not be given to this process
    unkeyed: list[str] = field(default_factory=list)
    lines: ScriptLines = field(default_factory=ScriptLines)  # where the script did what
    # numbers that schedules were given which look for a plateau
    metrics: list[float] = field(default_factory=list)
    # communication hooks of DistributedDataParallel: name, and whether torch offers it
    hooks: list[tuple[str, bool]] = field(default_factory=list)

    broadcasts: dict[str, str] = field(default_factory=dict)  # line of a loss → what it broadcasts

    def note_orders(self, orders: Mapping[int, list[LoaderPass]]) -> None:
        """Note the passes of each loader, which tell how long one is if its length does not."""
        self.orders.update(orders)
        for loader, passes in orders.items():
            in_epoch, in_data = self.lengths.get(loader, (0, 0))
            complete = [each for each in passes if each.is_complete]
            if complete and not in_epoch:
                self.lengths[loader] = (len(complete[0].positions), in_data)

    def note_statistics(self) -> None:
        """Note that a module normalises by the statistics of its batch."""
        self.normalises = True

    def note_framework(self) -> None:
        """Note whose code calls this, at the optimizer's step."""
        frame = sys._getframe()
        modules = set()
        while frame.f_back is not None:
            frame = frame.f_back
            module = frame.f_globals.get("__name__", "")
            modules |= {
                name
                for start, name in _FRAMEWORKS.items()
                if module == start or module.startswith(start + ".")
            }
        self.framework = next((name for name in _FRAMEWORKS.values() if name in modules), TORCH)

    @property
    def passes(self) -> list[int]:
        """Number of backward passes of each step."""
        return [len(step.losses) for step in self.steps]

    @property
    def training_loader(self) -> int | None:
        """The loader that gave each backward pass its batch.

        The one that was read least beyond that.
        """
        enough = {
            loader: len(read)
            for loader, read in self.batches.items()
            if len(read) >= sum(self.passes) > 0
        }
        return min(enough, key=lambda loader: enough[loader]) if enough else None

    @property
    def training_loaders(self) -> list[int]:
        """The loaders whose samples are trained on.

        They are read before each backward pass before which any is, or alone before one. A batch
        may serve several backward passes (a GAN's), or a pass take a batch of several loaders.
        """
        keys = [batches for step in self.steps for batches in step.read if batches]
        windows = [{loader for loader, _ in batches} for batches in keys]
        always = set.intersection(*windows) if windows else set()
        alone = {loader for window in windows if len(window) == 1 for loader in window}
        loader = self.training_loader
        return sorted(always | alone | ({loader} if loader is not None else set()))

    def batches_trained_on(self, loader: int) -> list[list[str]]:
        """Return the samples of each batch of a training loader that the steps have used."""
        if loader == self.training_loader:
            return self.batches[loader][: sum(self.passes)]
        read = [key for step in self.steps for batches in step.read for key in batches]
        return [self.batches[loader][index] for number, index in read if number == loader]


def casts_of(records: Sequence[ScriptRecord]) -> list[str]:
    """Return what lets layers compute in 16 bits in any step: `AUTOCAST`, `FSDP_CASTS`."""
    dtypes = {dtype for record in records for step in record.steps for dtype in step.dtypes}
    return [cast for cast in (AUTOCAST, FSDP_CASTS) if any(cast in dtype for dtype in dtypes)]


def names_by_order(reference: ScriptRecord, record: ScriptRecord) -> dict[str, str]:
    """Return the ranks' names of one process's parameters, by the order in the optimizers.

    A framework may wrap the model on several ranks only, so that another module is called first.
    Empty if the names are the same, or the orders do not tell.
    """
    if set(reference.first) == set(record.first):
        return {}
    names: dict[str, str] = {}
    for mine, theirs in zip(reference.steps, record.steps, strict=False):
        if len(mine.order) != len(theirs.order):
            return {}
        for name, other in zip(mine.order, theirs.order, strict=True):
            if names.setdefault(name, other) != other:
                return {}
    return {} if all(mine == other for mine, other in names.items()) else names


def batch_file(folder: Path, rank: int, loader: int, index: int) -> Path:
    """Return the file with the samples of one batch of a loader."""
    return folder / f"samples-{rank}-{loader}-{index}.pickle"
