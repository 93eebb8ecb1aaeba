"""Signals in the first seconds of a start: none may hang a run, lose anything, or leave anything
behind.

    python -m benchmarks.start_signals --rounds 200 --at-once 3

A round is one start of a small run of two ranks, and a signal at a random moment of its first
seconds (`--first`). It must then be gone within `PATIENCE` seconds, with exit code 75 (or 0, where
it was done; 1 after a second Ctrl-C), without a traceback, a process or a temporary file left;
every checkpoint that was committed must be there and prove whole. Rounds follow each other in one
run directory until the run is done; then its digest must be that of a run that nobody disturbed,
and its records must hold each step once.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import psutil

from benchmarks.page import RESULTS, machine, page
from lockstep import checkpoint

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0
STEPS = 300
_CONFIG = """
model: {{name: "tests.faults.tiny:Net"}}
data: {{name: "benchmarks.chaos_data:Points", args: {{seconds: 0.005}}}}
training: {{max_steps: {steps}, batch_size: 4, global_batch_size: 8, eval_steps: null}}
distributed: {{device: cpu, strategy: {strategy}}}
checkpoint: {{save_steps: 20}}
monitor: {{log_steps: 1, sinks: [jsonl]}}
"""
_STRATEGIES = ("ddp", "fsdp")
# How often in 8: what comes, to whom.
_KINDS = (
    "SIGTERM",
    "SIGTERM",
    "SIGINT",
    "SIGINT",
    "SIGUSR1",
    "SIGHUP",
    "SIGTERM to all processes",
    "SIGINT twice",
)


@dataclass
class Round:
    """One start that was disturbed.

    Attributes:
        kind: of signal.
        after: seconds from the start to the signal.
        code: exit code.
        seconds: from the last signal until nothing was left.
        heard: whether the process had begun to listen.
        wrong: what did not hold.
    """

    kind: str
    after: float
    code: int
    seconds: float
    heard: bool
    wrong: list[str] = field(default_factory=list)


class Chain:
    """One run directory, started and disturbed until the run is done."""

    def __init__(self, folder: Path, number: int, chance: random.Random, first: float) -> None:
        self.folder = folder
        self.chance = chance
        self.first = first
        self.run = folder / "run"
        self.scratch = folder / "tmp"
        self.scratch.mkdir(parents=True)
        self.strategy = _STRATEGIES[number % 2]
        self.config = folder / "config.yaml"
        self.config.write_text(_CONFIG.format(steps=STEPS, strategy=self.strategy))

    def start(self) -> subprocess.Popen[bytes]:
        command = [
            "train",
            str(self.config),
            "--nproc-per-node",
            "2",
            "--output-dir",
            str(self.run),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.scratch)}
        with (self.folder / "said.txt").open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "lockstep", *command],
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                stdout=said,
                stderr=said,
            )

    def committed(self) -> set[str]:
        return {path.name for path in checkpoint.list_checkpoints(self.run / "checkpoints")}

    def disturb(self) -> Round:
        """Start the run, send it a signal, and look at what is left."""
        kind = self.chance.choice(_KINDS)
        after = self.chance.uniform(0, self.first)
        process = self.start()
        time.sleep(after)
        everything = _tree(process.pid)
        heard = _listens(process.pid)
        before = self.committed()
        self._send(kind, process)
        sent = time.monotonic()
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = -999
        everything += [p for p in _tree(process.pid) if p not in everything]
        _, left = psutil.wait_procs(everything, timeout=5)
        found = Round(kind, after, code, time.monotonic() - sent, heard)
        self._look(found, before, left)
        for one in left:
            one.kill()
        process.wait()
        return found

    def _send(self, kind: str, process: subprocess.Popen[bytes]) -> None:
        number = signal.Signals[kind.split()[0]]
        if process.poll() is not None:
            return
        if kind.endswith("all processes"):
            for one in _tree(process.pid):
                if one.is_running():
                    os.kill(one.pid, number)
            return
        process.send_signal(number)
        if kind.endswith("twice"):
            time.sleep(self.chance.uniform(0.1, 1.0))
            process.send_signal(number)

    def _look(self, found: Round, before: set[str], left: list[psutil.Process]) -> None:
        said = (self.folder / "said.txt").read_text(errors="replace")
        # A signal that comes before Python has run Lockstep's first line ends the process as any
        # other.
        unheard = (
            not found.heard
            and found.after < 2
            and found.code in (-signal.Signals[found.kind.split()[0]], 1)
        )
        allowed = {75, 0} | ({1} if found.kind == "SIGINT twice" else set())
        if found.code == -999:
            found.wrong.append(f"hangs: not gone after {PATIENCE:g} s")
        elif found.code not in allowed and not unheard:
            found.wrong.append(f"exit code {found.code}: {said[-1500:]}")
        if found.code == 0 and not self.done():
            found.wrong.append("exit code 0, but the run is not done")
        if "Traceback" in said and not unheard:
            found.wrong.append(f"a traceback: {said[-1500:]}")
        if left:
            found.wrong.append(f"processes are left: {[p.pid for p in left]}")
        if names := [path.name for path in self.scratch.glob("lockstep-*")]:
            found.wrong.append(f"temporary files are left: {names}")
        if lost := before - self.committed():
            found.wrong.append(f"lost {sorted(lost)}")
        for path in checkpoint.list_checkpoints(self.run / "checkpoints"):
            if problems := checkpoint.verify(path):
                found.wrong.append(f"{path.name} is not whole: {problems[0]}")

    def done(self) -> bool:
        return f"step-{STEPS:08}" in self.committed()

    def result(self) -> str:
        """The digest of the run at its end, which is let end; with what is wrong with its records,
        if anything.
        """
        if not self.done():
            code = self.start().wait(600)
            assert code == 0, (self.folder / "said.txt").read_text()
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        whole = [row["step"] for row in rows if "step" in row and "loss" in row] == list(
            range(1, STEPS + 1)
        )
        digest = checkpoint.digest(self.run / f"checkpoints/step-{STEPS:08}")
        return digest if whole else f"{digest}, but metrics.jsonl does not hold each step once"


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _listens(pid: int) -> bool:
    """Whether the process catches SIGTERM."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def bench(rounds: int, at_once: int, seed: int, first: float) -> tuple[list[Round], list[str]]:
    """Run the rounds; returns them, and what is wrong with the runs at their ends."""
    found: list[Round] = []
    wrong: list[str] = []
    lock = Lock()
    with tempfile.TemporaryDirectory(prefix="start-signals-") as folder:
        chains = iter(range(10**6))
        alone = {
            name: Chain(Path(folder, f"alone-{name}"), index, random.Random(0), 0.0).result()
            for index, name in enumerate(_STRATEGIES)
        }

        def work(worker: int) -> None:
            while True:
                with lock:
                    number = next(chains)
                chance = random.Random(f"{seed} {worker} {number}")
                chain = Chain(Path(folder, f"chain-{number}"), number, chance, first)
                while not chain.done():
                    with lock:
                        if len(found) >= rounds:
                            break
                    one = chain.disturb()
                    with lock:
                        found.append(one)
                        _say(len(found), chain, one)
                result = chain.result()
                with lock:
                    if result != alone[chain.strategy]:
                        wrong.append(f"{chain.strategy}: {result}, not {alone[chain.strategy]}")
                    if len(found) >= rounds:
                        return

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(work, range(at_once)))
    return found, wrong


def _say(number: int, chain: Chain, one: Round) -> None:
    told = "; ".join(one.wrong) or "well"
    print(
        f"{number}: {chain.strategy}, {one.kind} after {one.after:.1f} s: {one.code} in"
        f" {one.seconds:.1f} s, {told}",
        flush=True,
    )


def table(found: list[Round]) -> list[str]:
    rows = []
    for kind in dict.fromkeys(_KINDS):
        mine = [one for one in found if one.kind == kind]
        if not mine:
            continue
        codes = Counter(one.code for one in mine)
        told = ", ".join(f"{code} × {count}" for code, count in sorted(codes.items()))
        slow = sorted(one.seconds for one in mine)
        rows.append(
            f"| {kind} | {len(mine)} | {told} | {slow[len(slow) // 2]:.1f} s | {slow[-1]:.1f} s "
            f"| {sum(bool(one.wrong) for one in mine)} |"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=float, default=10.0, help="seconds in which the signal comes (default: 10)"
    )
    parser.add_argument("--write", action="store_true", help="write the results page")
    given = parser.parse_args()
    # the runs inherit it: under nohup they would ignore theirs
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    started = time.monotonic()
    found, wrong = bench(given.rounds, given.at_once, given.seed, given.first)
    wrong += [f"{one.kind} after {one.after:.1f} s: {text}" for one in found for text in one.wrong]
    unheard = sum(not one.heard and one.code < 0 for one in found)
    words = [
        (
            f"{len(found)} starts of a run of two ranks, {given.at_once} at once, each with a"
            " signal in its first"
        ),
        (
            f"{given.first:g} s, in {(time.monotonic() - started) / 60:.0f} min. {len(wrong)} were"
            " wrong: hung, lost a checkpoint, left a process"
        ),
        (
            "or a file behind, printed a traceback, or ended in other values than a run that nobody"
            " disturbed. 75 is"
        ),
        (
            f"stopped, 0 done, 1 a second Ctrl-C; {unheard} signals came before Python had run the"
            " first line (negative codes)."
        ),
    ]
    options = f"--rounds {given.rounds} --at-once {given.at_once} --first {given.first:g}"
    command = f"python -m benchmarks.start_signals {options} --write"
    header = "| signal | starts | exit codes | until all was gone: median | longest | wrong |"
    text = page(
        "Signals while a run starts", command, machine(), words, header, table(found), wrong
    )
    print(text)
    if given.write:
        (RESULTS / "start_signals.md").write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
