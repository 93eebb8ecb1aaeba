"""Describes one run of a script: what it is given, how it computes, and where its records go.

Runs are compared, so a run may have values of another in place of its own (`GivenValues`), and be
computed otherwise than it is written (`Conditions`). One process that is compared with two ranks,
without dropout:

    given         their samples in one batch, their first values, their settings
    conditions    mean_draws

Tests: tests/verify/test_script.py
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.verify.launchers import PlainScript
from lockstep.verify.script.observed.draws import BatchKey, Draws
from lockstep.verify.script.observed.reads import Reads
from lockstep.verify.script.record import RecordedStep, ScriptRecord

_TASK = "task.pt"  # file in the folder of a task


@dataclass(frozen=True)
class GivenValues:
    """Values of other runs that a run gets in place of its own samples, draws and values."""

    # (loader, batch) → the recorded batches (rank, index) whose samples it gets together
    feed: Mapping[BatchKey, list[BatchKey]] = field(default_factory=dict)
    samples: Path | None = None  # the folder of the records that `feed` names
    # loader → batch size with which it is made
    sizes: Mapping[int, int] = field(default_factory=dict)
    # loader → number of batches that `len` says it has, as a schedule asks for it
    lengths: Mapping[int, int] = field(default_factory=dict)
    # what ranks drew for these batches, and gets one process that takes them
    draws: Draws = field(default_factory=dict)
    # what is read in place of what the script reads by itself, without a loader
    reads: Reads = field(default_factory=dict)
    # ranks whose passes a process takes in turn, where samples come from no loader; else together
    in_turn: bool = False
    # name of a parameter in this process → in the ranks
    names: Mapping[str, str] = field(default_factory=dict)
    # the ranks' names of the parameters of the optimizer that steps first, in its order
    order: Sequence[str] = ()
    # values to start from; several: of each rank
    first: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    # of each step, what the optimizer gets in place of those that were computed, as `first`
    gradients: Sequence[Mapping[str, Sequence[Tensor]]] = ()
    settings: tuple[list[dict[str, Any]], ...] = ()  # of each step, of each parameter group
    # a rank is given what the same rank of another run had; else what one process is given
    by_rank: bool = False

    def for_rank(self, ranks: Sequence[Any], rank: int) -> Sequence[Any]:
        """Return what a rank is given of values of all ranks: its own, or all of them."""
        if not self.by_rank:
            return ranks
        return [value for value in ranks[rank : rank + 1] if value is not None]

    @property
    def prefix(self) -> str:
        """Return the beginning of the ranks' names of parameters, before this process's own."""
        begins = {mine: name.removesuffix(mine) for mine, name in self.names.items()}
        are_the_same = list(begins) == list(self.names.values())
        different_begins = set(begins.values())
        if are_the_same or len(different_begins) != 1:
            return ""
        return different_begins.pop()


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a run computes: as the script is written, but for these."""

    # random numbers in forward and backward passes are the mean of their distribution
    mean_draws: bool = False
    fixed_statistics: bool = False  # batch normalisation uses its running statistics
    full_precision: bool = False  # nothing is converted to 16 bits
    plain_reduction: bool = False  # no communication hook is registered
    nudged: bool = False  # the last bits of the first parameters are changed
    traced: bool = False  # each operation of a step is recorded
    traced_whole: bool = False  # and those before the first step
    keyed_passes: bool = False  # a forward pass draws by its rank and number, in any run alike


AS_IT_IS = GivenValues()
AS_WRITTEN = Conditions()


@dataclass(frozen=True)
class ScriptTask:
    """A run of a script in one world."""

    script: str
    arguments: tuple[str, ...]
    steps: int
    folder: Path  # receives the records, and the samples
    given: GivenValues = AS_IT_IS
    conditions: Conditions = AS_WRITTEN
    module: str = ""  # the script's name where it is run as `python -m` runs it
    # options of `accelerate launch`, whose variables the script gets; None: it is not started so
    accelerate: tuple[str, ...] | None = None

    @staticmethod
    def of(plain: PlainScript, steps: int, folder: Path) -> "ScriptTask":
        """Return the run of a script that is started without its launcher."""
        return ScriptTask(
            plain.file,
            plain.arguments,
            steps,
            folder,
            module=plain.module,
            accelerate=plain.accelerate,
        )

    def record_file(self, rank: int) -> Path:
        """Return the file of a rank's record."""
        return self.folder / f"record-{rank}.pt"

    @property
    def runs(self) -> Path:
        """The folder that takes the run directories which the script names."""
        return self.folder / "runs"

    @property
    def saved(self) -> Path:
        """The folder that notes which files the script has saved."""
        return self.folder / "saved"

    def hang_file(self, rank: int) -> Path:
        """Return the file that says where a rank hangs."""
        return self.folder / f"hang-{rank}.json"

    def idle_file(self, rank: int) -> Path:
        """Return the file that is there while a rank has computed nothing for a while."""
        return self.folder / f"idle-{rank}"

    def write(self) -> Path:
        """Write the task into its folder, and return the folder, from which `read` takes it.

        A task may hold every tensor of a model on each rank: handed over in memory, each tensor
        takes a file descriptor of the process that hands it over.
        """
        torch.save(self, self.folder / _TASK)
        return self.folder

    @staticmethod
    def read(folder: Path) -> "ScriptTask":
        """Return the task that was written into a folder."""
        task: ScriptTask = _mapped(folder / _TASK)
        return task

    def keep_step(self, rank: int, number: int, step: RecordedStep) -> RecordedStep:
        """Write a step of a rank, and return it with tensors that stay in the file until read."""
        path = self._step_file(rank, number)
        torch.save(step, path)
        kept: RecordedStep = _mapped(path)
        return kept

    def write_record(self, rank: int, record: ScriptRecord) -> None:
        """Write the record of a rank, whose steps are kept, so that it appears as a whole."""
        path = self.record_file(rank)
        part = path.with_suffix(".part")
        torch.save((replace(record, steps=[]), len(record.steps)), part)
        part.rename(path)

    def load_record(self, rank: int) -> ScriptRecord:
        """Load the record of a rank; its tensors stay in files until they are read."""
        record: ScriptRecord
        record, steps = _mapped(self.record_file(rank))
        record.steps.extend(_mapped(self._step_file(rank, number)) for number in range(steps))
        return record

    def _step_file(self, rank: int, number: int) -> Path:
        return self.folder / f"step-{rank}-{number}.pt"


def _mapped(path: Path) -> Any:
    return torch.load(path, weights_only=False, mmap=True)


def for_ranks(argument: str, ranks: int) -> str:
    """Replace `{n}` by the number of ranks, and `{16/n}` by a rank's share of 16."""
    return re.sub(
        r"\{(?:(\d+)/)?n\}",
        lambda match: str(int(match[1]) // ranks if match[1] else ranks),
        argument,
    )
