"""Starts a script in worlds of several ranks, and as processes of their own beside each other.

Tests: tests/verify/test_script.py
"""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.files.paths import RUNS
from lockstep.launch.spawn import spawn_again
from lockstep.machine.environment import rank_facts
from lockstep.machine.processes import die_with_this_process
from lockstep.verify.launchers import PlainScript
from lockstep.verify.script.observed.observe import observe
from lockstep.verify.script.observed.saved_files import put_back
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.task import (
    AS_IT_IS,
    AS_WRITTEN,
    Conditions,
    GivenValues,
    ScriptTask,
    for_ranks,
)
from lockstep.verify.subject import run_isolated, why_not_ended
from lockstep.verify.watch import injected

_SECONDS = 600.0  # limit for a run of the script; ranks that wait for each other end sooner
_PRELOAD = ("accelerate.optimizer", "transformers.trainer", "lightning.fabric", "lightning_fabric")
_LAST_LINES = 12  # of a process that failed without an exception
Start = Callable[[Sequence[ScriptTask], int], None]


class HangError(LockstepError):
    """Ranks wait for each other; `found`: rank → where it waits, empty: it has ended.

    `records`: None: it has none.
    """

    def __init__(self, locations: dict[int, str], records: list[ScriptRecord | None]) -> None:
        super().__init__("ranks wait for each other")
        self.locations = locations
        self.records = records


class Runs:
    """Runs one program again and again, each time in new processes and a folder of its own.

    `start` runs the one task of a number of ranks, or as many tasks as one process each.
    """

    def __init__(self, task: ScriptTask, start: Start, report: Callable[[str], None]) -> None:
        self._task = task
        self._start = start
        self._report = report
        self._number = 0
        self._saves = False  # whether the script saves files

    def world(
        self,
        ranks: int,
        what: str,
        given: GivenValues = AS_IT_IS,
        conditions: Conditions = AS_WRITTEN,
        steps: int | None = None,
    ) -> tuple[Path, list[ScriptRecord]]:
        """Run the script on several ranks, and return the folder of its records, and these.

        They take as many steps as the task says, or `steps`.

        Raises HangError: a collective waits for a rank that does not call it. LockstepError: a rank
        failed.
        """
        task = self._new_task(given, conditions, steps)
        self._report(f"{ranks} rank{'s' * (ranks != 1)}: {what}")
        self._start_and_put_back([task], ranks)
        hanging = {rank: path for rank in range(ranks) if (path := task.hang_file(rank)).exists()}
        if hanging:
            written = [task.record_file(rank).exists() for rank in range(ranks)]
            records = [
                task.load_record(rank) if is_written else None
                for rank, is_written in enumerate(written)
            ]
            raise HangError(
                {rank: json.loads(path.read_text()) for rank, path in hanging.items()}, records
            )
        error = why_not_ended(task.folder, ranks, _SECONDS)
        if error is not None:
            raise _with_output(error, task.folder, ranks)
        return task.folder, [task.load_record(rank) for rank in range(ranks)]

    def alone(
        self,
        what: str,
        given: Sequence[GivenValues] = (AS_IT_IS,),
        conditions: Conditions = AS_WRITTEN,
        steps: int | None = None,
    ) -> list[ScriptRecord]:
        """Run the script as one process for each of `given`.

        They take as many steps as the ranks are to take, or `steps`. They run at the same time, but
        for those of a script that saves files, which would read those of each other.

        Raises LockstepError: one failed.
        """
        tasks = [self._new_task(values, conditions, steps) for values in given]
        self._report(f"one process: {what}")
        one_by_one = self._saves
        for together in [[task] for task in tasks] if one_by_one else [tasks]:
            self._start_and_put_back(together, len(together))
        for number, task in enumerate(tasks):
            place = 1 if one_by_one else number + 1
            error = why_not_ended(task.folder, place, _SECONDS)
            if error is None and task.hang_file(0).exists():
                at = json.loads(task.hang_file(0).read_text()) or "its end"
                error = RunError(
                    f"one process waits for something at {at}, and nothing computes",
                    why="run without other ranks, it waits for one, or for a file, a port or input",
                    fix="let the script run as one process, too, with WORLD_SIZE=1",
                )
            if error is not None:
                raise _with_output(error, task.folder, 1)
        return [task.load_record(0) for task in tasks]

    def _start_and_put_back(self, tasks: Sequence[ScriptTask], ranks: int) -> None:
        """Run tasks, and put back the files that they have saved."""
        try:
            self._start(tasks, ranks)
        finally:
            for task in tasks:
                self._saves |= put_back(task.saved)

    def _new_task(
        self, given: GivenValues, conditions: Conditions, steps: int | None = None
    ) -> ScriptTask:
        self._number += 1
        folder = self._task.folder / f"run-{self._number}"
        folder.mkdir()
        return replace(
            self._task,
            folder=folder,
            given=given,
            conditions=conditions,
            steps=self._task.steps if steps is None else steps,
        )


def runs_of(
    script: str | PlainScript, steps: int, folder: Path, report: Callable[[str], None]
) -> Runs:
    """Return the runs of a script, or of a command that starts its own processes, in a folder."""
    if isinstance(script, str):
        return Runs(ScriptTask(script, (), steps, folder), start_command, report)
    start = script_starter(script.file)
    return Runs(ScriptTask.of(script, steps, folder), start, report)


def libraries_of(script: str) -> list[str]:
    """Return the large modules of libraries that a script imports, to be loaded once.

    Empty for a command, whose script is not known.
    """
    path = Path(script)
    text = path.read_text(errors="replace") if path.is_file() else ""
    names = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.M))
    return [module for module in _PRELOAD if module.partition(".")[0] in names]


def script_starter(script: str) -> Start:
    """Return what starts a script, with what it may import loaded once, for all its processes."""
    preload = libraries_of(script)
    # pipelining brings torch's compiler, which DDP would import in each process.
    preload = ["torch.distributed.pipelining", "lockstep.verify.script.observed.observe", *preload]

    def start(tasks: Sequence[ScriptTask], ranks: int) -> None:
        spawn_again(_take, ([task.write() for task in tasks],), ranks, preload=preload)

    return start


def _take(folders: Sequence[Path]) -> None:
    alone = rank_facts().world_size == len(folders)  # else all ranks take the one task together
    task = ScriptTask.read(folders[rank_facts().rank] if alone else folders[0])
    run_isolated(partial(observe, task, alone=alone), task.folder, 0, _SECONDS, alone=alone)


def start_command(tasks: Sequence[ScriptTask], ranks: int) -> None:
    """Run a command, in which `{n}` stands for the number of ranks; it starts its own processes."""
    for task in tasks:  # one after another: launchers may take the same port
        task.write()
        words = [
            for_ranks(word, ranks if len(tasks) == 1 else 1) for word in shlex.split(task.script)
        ]
        where = shlex.join(words)
        environment = injected(LOCKSTEP_OBSERVED_RUN=str(task.folder))
        environment[RUNS] = str(task.runs)
        what = ""
        try:
            with (task.folder / "output-0.log").open("w") as log:
                code = subprocess.run(
                    words,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    timeout=_SECONDS,
                    check=False,
                    preexec_fn=die_with_this_process,
                ).returncode
            what = f"ended with code {code}" if code else ""
        except OSError as error:
            text = f"there is no program {words[0]} to run: {error.strerror}"
            fix = "write a command that runs here, as in torchrun --nproc-per-node {n} train.py"
            raise UsageError(text, where=where, fix=fix) from None
        except subprocess.TimeoutExpired:
            what = f"has not ended within {_SECONDS:.0f} s"
        if not what and not list(task.folder.glob("record-*.pt")):
            what = "has ended, and no process of it took a training step"
        if what:
            fix = "run it with this number of ranks until it trains"
            raise _with_output(
                RunError(f"the command {what}", where=where, fix=fix), task.folder, 1
            )


def _with_output(error: LockstepError, folder: Path, ranks: int) -> LockstepError:
    for rank in range(ranks):
        log = folder / f"output-{rank}.log"
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []
        if lines:
            error.add_note("\n".join([f"output of rank {rank}:", *(f"  {line}" for line in lines)]))
            break
    return error
