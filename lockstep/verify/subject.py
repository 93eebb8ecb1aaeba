"""Defines what is verified, and runs each case of it in a process of its own, with a time limit.

A rank's process only imports; each case runs in a fork of it, which joins the ranks of its case. So
nothing that a case leaves behind (a default dtype, a counter in a user's module) is there for the
next one, and one that crashes or hangs ends alone.

Tests: tests/verify/test_isolated.py
"""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import Config, config_from
from lockstep.errors import LockstepError, RunError
from lockstep.failures.failure import (
    first_cause,
    from_exception,
    from_exit_code,
    newest_stack,
    read_all,
    stacks_file,
)
from lockstep.machine.cores import threads_after_fork
from lockstep.machine.environment import rank_facts
from lockstep.machine.output import flush_both
from lockstep.machine.processes import die_with_this_process
from lockstep.strategy import parse_topology

if TYPE_CHECKING:
    from torch import nn

    from lockstep.trainer import Trainer

_PLACE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_POLL = 0.01  # seconds between two looks at a case that runs
_GRACE = 2.0  # seconds for a case to write its stack before it is killed
MAIN = "main"  # the case that compares all steps; the others are experiments


@dataclass
class Subject:
    """A training run before placement."""

    model: "nn.Module"  # not wrapped, not yet trained
    data: Any  # the argument of `Trainer.steps`
    # None: the one that the config names, else the model's own
    loss_fn: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None  # `parameters -> optimizer`; None: the config's
    # called with each trainer before its first step
    prepare: Callable[["Trainer"], None] = lambda _trainer: None
    close: Callable[[], None] = lambda: None  # called when the subject is no longer needed


Make = Callable[[], "Subject | tuple[nn.Module, Any]"]
"""Builds what is verified.

It is a function at the top of a module, because other processes import it by name.
"""


@dataclass(frozen=True)
class Spec:
    """Describes to every process what to train, and for how many steps."""

    config: Config
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
    # dotted keys that differ from the spec's config
    settings: dict[str, Any] = field(default_factory=dict)
    # first step, counted from 0; the state before it is the reference's in the case `main`
    start: int = 0
    steps: int = 1  # number of steps
    # changes to the running trainer (see `lockstep.verify.experiments`)
    switches: frozenset[str] = frozenset()


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

    def end_of(self, case: Case) -> Path:
        """Return the folder that tells how a case ended."""
        topology = "".join(c if c.isalnum() else "_" for c in self.topology)
        return self.folder / "ends" / f"{topology}-{case.name}"

    def results_of(self, case: Case) -> Path:
        """Return the file to which rank 0 pickles a case's results.

        It has the results step by step, or why there are none.
        """
        return self.end_of(case) / "results.pickle"


def run_isolated(
    run: Callable[[], None], folder: Path, number: int, seconds: float, *, alone: bool
) -> bool:
    """Run a case in a fork of this process, which has started no thread of torch.

    Return whether it ended in time.

    `folder` receives the failure, or the stack of a case that hangs; ranks of a case find each
    other by its `number`. A case that is `alone` is one process, and no rank.
    """
    facts = rank_facts()
    folder.mkdir(parents=True, exist_ok=True)
    flush_both()
    process = os.fork()
    if process == 0:
        _run(run, folder, number, seconds, alone)
    deadline = time.monotonic() + seconds + _GRACE
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            (folder / f"hung-{facts.rank}").touch()
            return False
        time.sleep(_POLL)
    code = os.waitstatus_to_exitcode(status)
    if code and not (folder / f"rank-{facts.rank}.json").exists():
        from_exit_code(facts.rank, facts.world_size, code, time.time(), None).write(folder)
    return True


def _run(run: Callable[[], None], folder: Path, number: int, seconds: float, alone: bool) -> None:
    """Run a case in this forked process, write its failure, and end the process."""
    facts = rank_facts()
    code = 0
    die_with_this_process()
    threads_after_fork()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in _PLACE if alone else ():
        os.environ.pop(name, None)
    # a prefix of the keys by which the ranks meet
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    stacks = stacks_file(folder, facts.rank).open("w")
    faulthandler.dump_traceback_later(seconds, file=stacks)
    try:
        run()
    except BaseException as error:
        failure = from_exception(error, facts, None)
        failure.write(folder)
        code = failure.exit_code or 1
    flush_both()
    os._exit(code)  # skip the shutdown, which may wait for peers that are gone


def why_not_ended(folder: Path, ranks: int, seconds: float) -> LockstepError | None:
    """Return why a case did not end well: the first error of a rank, or where each rank hangs.

    None if it did.
    """
    hung = [rank for rank in range(ranks) if (folder / f"hung-{rank}").exists()]
    cause = first_cause(read_all(folder))
    if cause is not None and (not hung or not cause.consequence):
        return cause.error()
    if not hung:
        return None
    places = [
        f"rank {rank} at {newest_stack(folder, rank).place or 'an unknown place'}" for rank in hung
    ]
    why = "a collective waits for a rank that does not call it, or a loop does not end"
    fix = "let all ranks call the same collectives in the same order"
    return RunError(f"no answer within {seconds:.0f} s: {'; '.join(places)}", why=why, fix=fix)
