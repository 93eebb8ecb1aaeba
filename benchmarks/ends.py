"""Runs that are done: does every rank's process end well, again and again?

    python -m benchmarks.ends --runs 500 --write

Each rank is the worker of `lockstep train` from its first line to the end of its interpreter. A
process that has loaded torch and Lockstep is forked for it, so that a run takes a second. What is
counted are exit statuses other than 0.

With `--late` the threads that run gloo's collectives get a core last, a collective comes right
before the end, and the end takes 0.3 s longer: what happens in a few of a hundred runs on a busy
machine then happens in a third. Needs Linux.
"""

import argparse
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import lockstep.cli.verbs
import lockstep.trainer  # noqa: F401  # what ranks import is imported before they are forked
from benchmarks.page import RESULTS, machine, page, tell
from lockstep.cli import main as command
from lockstep.process_group import cluster, collectives

_CONFIG = """
model: {{name: transformer, args: {{n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 17, block_size: 8}}}}
data: {{name: "benchmarks.ends:Tokens"}}
training: {{max_steps: 2, batch_size: 2, global_batch_size: 8, eval_steps: null}}
distributed: {{device: cpu, timeout_seconds: 60, {strategy}}}
checkpoint: {{{saving}}}
monitor: {{sinks: [jsonl]}}
"""
STRATEGIES = {
    "single": (1, "strategy: single"),
    "ddp": (2, "strategy: ddp"),
    "fsdp": (2, "strategy: fsdp"),
    "hybrid": (4, "strategy: fsdp, shard_size: 2, fsdp: {sharding_strategy: hybrid_shard}"),
    "pipeline": (2, "strategy: pipeline"),
}
# in turn
_SAVING = ("save_strategy: none", "save_steps: 2, async: false", "save_steps: 2, async: true")
_SECONDS = 120.0  # after which a run hangs
_MODULES = "modules"  # a file: what a rank had imported at its end


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """64 rows of 8 numbers that count upwards."""

    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 9) % 17
        return {"input_ids": ids[:-1], "targets": ids[1:]}


class ThisIsARank(BaseException):
    """Leads a forked process out of the loop that starts ranks, to the top of the program."""

    def __init__(self, run: "Run") -> None:
        super().__init__()
        self.run = run


@dataclass
class Run:
    """One run: the folder it works in, its ranks' processes and what they ended with."""

    strategy: str
    number: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="lockstep-ends-")))
    processes: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Fork the ranks.

        Raises:
            ThisIsARank: in each of them.
        """
        world, strategy = STRATEGIES[self.strategy]
        for inner in ("beats", "failures"):
            (self.folder / inner).mkdir()
        saving = _SAVING[self.number % len(_SAVING)]
        (self.folder / "config.yaml").write_text(_CONFIG.format(strategy=strategy, saving=saving))
        for rank in range(world):
            process = os.fork()
            if not process:
                self._become_rank(rank, world)
                raise ThisIsARank(self)
            self.processes.append(process)

    def _become_rank(self, rank: int, world: int) -> None:
        """Take the environment and the output that the launcher gives a rank."""
        out = os.open(self.folder / f"console-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": self.folder.name,
            "TORCH_FR_BUFFER_SIZE": "2000",
            "LOCKSTEP_HEARTBEATS": f"{self.folder}/beats",
            "LOCKSTEP_FAILURES": f"{self.folder}/failures",
            "LOCKSTEP_LAUNCHER_PID": str(os.getppid()),
        }

    @property
    def arguments(self) -> list[str]:
        return ["train", str(self.folder / "config.yaml"), "--output-dir", str(self.folder / "run")]

    def wait(self) -> None:
        """Until all ranks have ended; those that take too long are killed."""
        deadline = time.monotonic() + _SECONDS
        while len(self.codes) < len(self.processes):
            for process in self.processes:
                if process in self.codes:
                    continue
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self.codes[process] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                for process in set(self.processes) - self.codes.keys():
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.005)

    @property
    def end(self) -> str:
        """`good`, or the exit statuses that were not 0."""
        return ", ".join(sorted({str(code) for code in self.codes.values() if code})) or "good"

    def show(self) -> None:
        """Print the end of what the ranks said."""
        for path in sorted(
            [*self.folder.glob("run/logs/rank-*.log"), *self.folder.glob("console-*")]
        ):
            lines = path.read_text(errors="replace").splitlines()[-8:]
            print(f"{self.strategy}, {path.name}:", *lines, sep="\n    ", flush=True)


def import_what_ranks_import(modules: Path) -> None:
    """Import what a run has imported, so that the next ones need not."""
    for name in modules.read_text().split():
        if name not in sys.modules and not name.startswith("__"):
            with suppress(Exception):  # one that is made as the program runs, and is in no file
                importlib.import_module(name)


def measure(strategy: str, runs: int, at_once: int) -> str:
    """One row of the table."""
    ends: Counter[str] = Counter()
    since = time.monotonic()
    for first in range(0, runs, at_once):
        started = [Run(strategy, number) for number in range(first, min(first + at_once, runs))]
        for run in started:
            run.start()
        for run in started:
            run.wait()
            ends[run.end] += 1
            if run.end != "good":
                run.show()
            if not first and (run.folder / _MODULES).exists():
                import_what_ranks_import(run.folder / _MODULES)
            shutil.rmtree(run.folder)
    bad = (
        ", ".join(f"{count} × {end}" for end, count in sorted(ends.items()) if end != "good")
        or "none"
    )
    seconds = (time.monotonic() - since) / runs
    row = f"| {strategy} | {STRATEGIES[strategy][0]} | {runs} | {bad} | {seconds:.1f} |"
    print(row, flush=True)
    return row


class Window:
    """Sleeps when the interpreter, which is ending, clears its modules: late threads get a core
    then.
    """

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(0.3)


def be_late() -> None:
    """Have a collective right before the end, by threads that get a core when nobody else wants
    one.
    """
    leave = cluster.cleanup

    def late() -> None:
        if not dist.is_initialized():
            return leave()
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for thread in Path("/proc/self/task").iterdir():
            if (thread / "comm").read_text().strip() == "pt_gloo_runloop":
                os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
        sys.setswitchinterval(5)  # Python, too, is lent to another thread only where this one waits
        collectives.all_reduce(torch.ones(1000))
        sys.modules["__main__"].__dict__["window"] = Window()
        return leave()

    cluster.cleanup = late


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="of each strategy")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--late", action="store_true", help="gloo's threads get a core last")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("strategies", nargs="*", default=[], help=", ".join(STRATEGIES))
    arguments = parser.parse_args()
    rows = []
    try:
        for strategy in arguments.strategies or STRATEGIES:
            rows.append(measure(strategy, arguments.runs, arguments.at_once))
    except ThisIsARank as rank:
        if arguments.late and STRATEGIES[rank.run.strategy][0] > 1:
            be_late()
        code = command(rank.run.arguments)
        (rank.run.folder / _MODULES).write_text("\n".join(sys.modules))
        gc.freeze()  # as `python -m lockstep` does
        return code
    options = " ".join(
        [f"--runs {arguments.runs}{' --late' * arguments.late}", *arguments.strategies]
    )
    text = page(
        "Ends of runs",
        f"python -m benchmarks.ends {options} --write",
        machine(),
        [
            (
                "Ranks whose process ended with another exit status than 0, after runs of two steps"
                " that were done."
            ),
            "Saves are off, waited for and in the background, in turn.",
            *["gloo's threads get a core last (see the program)."] * arguments.late,
        ],
        "| strategy | ranks | runs | bad ends | seconds a run |",
        rows,
    )
    tell(text, RESULTS / "ends.md" if arguments.write else None)
    return int(any("| none |" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
