"""Defines what is verified: a config, or a user's model and data, built anew in every process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import Config, config_from
from lockstep.strategy import parse_topology

if TYPE_CHECKING:
    from torch import nn

    from lockstep.trainer import Trainer

MAIN = "main"  # the case that compares all steps; the others are experiments


@dataclass
class Subject:
    """A training run before placement.

    Attributes:
        model: not wrapped, not yet trained.
        data: the argument of `Trainer.steps`.
        loss_fn: None: the one that the config names, else the model's own.
        optimizer: `parameters -> optimizer`; None: the config's.
        prepare: called with each trainer on every rank before its first step.
        close: called when the subject is no longer needed.
    """

    model: "nn.Module"
    data: Any
    loss_fn: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    prepare: Callable[["Trainer"], None] = lambda _trainer: None
    close: Callable[[], None] = lambda: None


Make = Callable[[], "Subject | tuple[nn.Module, Any]"]
"""Builds what is verified; a function at the top of a module, because other processes import it by name."""


@dataclass(frozen=True)
class Spec:
    """The knowledge that every process needs."""

    config: Config  # of the run
    make: Make | None  # None: model and data are the config's
    steps: int  # number of steps to compare
    threads: int = 1  # of each process on the CPU

    @property
    def exact(self) -> bool:
        """Return whether every bit must be equal."""
        return self.config.distributed.reproducible

    def build(self, settings: dict[str, Any]) -> tuple[Config, Subject]:
        """Return the config with some settings changed, and what it trains."""
        config = config_from(settings, self.config) if settings else self.config
        if self.make is not None:
            made = self.make()
            return config, made if isinstance(made, Subject) else Subject(*made)
        from lockstep.data import build_data
        from lockstep.trainer import build

        data = build_data(config.data, seed=config.training.seed)
        return config, Subject(build(config, data), data.train)


@dataclass(frozen=True)
class Case:
    """Consecutive steps that the reference and a topology both take."""

    name: str = MAIN  # name of the folder with the reference's trace
    settings: dict[str, Any] = field(default_factory=dict)  # dotted keys that differ from the spec's config
    start: int = 0  # first step, counted from 0; the state before it is the reference's in the case `main`
    steps: int = 1  # number of steps
    switches: frozenset[str] = frozenset()  # changes to the running trainer (see `lockstep.verify.experiments`)


@dataclass(frozen=True)
class VerifyJob:
    """Cases that one topology has to take."""

    spec: Spec
    topology: str
    folder: Path  # holds the reference's traces of these cases
    cases: tuple[Case, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks of the topology."""
        return parse_topology(self.topology)[1]

    def results_of(self, case: Case) -> Path:
        """Return the file to which rank 0 pickles a case's results, step by step, or why there are none."""
        return self.folder / f"{self._name}-{case.name}.pickle"

    def end_of(self, case: Case) -> Path:
        """Return the folder that tells how a case ended."""
        return self.folder / "ends" / f"{self._name}-{case.name}"

    @property
    def _name(self) -> str:
        return "".join(c if c.isalnum() else "_" for c in self.topology)
