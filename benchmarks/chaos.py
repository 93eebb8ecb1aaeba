"""Kill bench: SIGKILL to ranks, launchers and all of them, at random moments and inside commits; nothing may be lost.

    python -m benchmarks.chaos --rounds 100        (make chaos ROUNDS=100)

A chain is one small run of two ranks, which is killed `KILLS` times and started again until it is done. A round is one
kill and what follows it. After every kill each checkpoint that was committed before must still be there, and every one
that is there must prove whole; at the end of a chain the digest must be that of a run that nobody disturbed.
Every second chain rotates its checkpoints (then the newest must be whole; older ones may be gone).
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep import checkpoint

ROOT = Path(__file__).parent.parent
KILLS = 10  # in a chain
STEPS = 120
STRATEGIES = ("ddp", "fsdp")  # in turn
COMMIT_CALLS = 60  # about so many operations on files make a commit; a kill comes at one of them
TARGETS = ("rank", "rank", "agent", "all", "commit", "commit")
_CONFIG = """
model: {{name: "tests.faults.tiny:Net"}}
data: {{name: "benchmarks.chaos_data:Points", args: {{seconds: 0.01}}}}
training: {{max_steps: {steps}, batch_size: 4, global_batch_size: 8, eval_steps: null}}
distributed: {{device: cpu, strategy: {strategy}}}
checkpoint: {{save_steps: 3, save_total_limit: {limit}, async: {background}}}
monitor: {{log_steps: 1, sinks: [jsonl]}}
"""


@dataclass
class Report:
    """What happened."""

    rounds: int = 0
    chains: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    checkpoints_proved: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Chain:
    """One run, killed again and again."""

    def __init__(self, folder: Path, number: int, chance: random.Random, report: Report) -> None:
        self.run, self.chance, self.report = folder / f"run-{number}", chance, report
        self.keeps_all = number % 2 == 0
        config = write_config(folder / f"chain-{number}.yaml", None if self.keeps_all else 2, number)
        self.command = ["train", str(config), "--nproc-per-node", "2", "--max-restarts", "50", "--output-dir", self.run]
        self.process: subprocess.Popen[bytes] | None = None
        self.proved: set[str] = set()

    def events(self, kind: str) -> list[dict[str, object]]:
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["kind"] == kind]

    def ensure_running(self, commit: str = "") -> None:
        if self.process is not None and self.process.poll() is None and not commit:
            return
        if self.process is not None and self.process.poll() is None:
            self.kill_all()
        self.report.launches += 1
        self.process = launch(self.command, CHAOS_COMMIT=commit)

    def kill_all(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        time.sleep(0.3)  # ranks die with their launcher; data of theirs is on its way no more

    def disturb(self) -> bool:
        """One kill; False if the run was done before it came."""
        target = self.chance.choice(TARGETS)
        rank = self.chance.randrange(2)
        self.ensure_running(f"{rank}:{self.chance.randrange(1, COMMIT_CALLS)}" if target == "commit" else "")
        assert self.process is not None
        starts = len(self.events("start"))
        fresh = target == "commit" or self.chance.random() < 0.8
        deadline = time.monotonic() + 120
        while fresh and len(self.events("start")) <= max(0, starts - (target != "commit")) and self.running(deadline):
            time.sleep(0.02)
        committed = {path.name for path in checkpoint.list_checkpoints(self.run / "checkpoints")}
        if target == "commit":
            restarts = len(self.events("restart"))
            while len(self.events("restart")) == restarts and self.running(deadline):
                time.sleep(0.02)
        else:
            time.sleep(self.chance.uniform(0, 2.0))
            committed = {path.name for path in checkpoint.list_checkpoints(self.run / "checkpoints")}
            self.kill(target, rank)
        if self.process.poll() == 0:
            return False
        self.report.killed[target] += 1
        self.report.rounds += 1
        self.check(committed)
        return True

    def running(self, deadline: float) -> bool:
        assert self.process is not None
        return self.process.poll() is None and time.monotonic() < deadline

    def kill(self, target: str, rank: int) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            return
        if target == "all":
            self.kill_all()
        elif target == "agent":
            self.process.kill()
            self.process.wait()
            time.sleep(0.3)
        else:
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            children = [int(child) for child in path.read_text().split()]
            if children:
                os.kill(children[rank % len(children)], signal.SIGKILL)

    def check(self, committed: set[str]) -> None:
        there = checkpoint.list_checkpoints(self.run / "checkpoints")
        if self.keeps_all and (lost := committed - {path.name for path in there}):
            self.report.wrong.append(f"{self.run.name}: lost {sorted(lost)}")
        if not self.keeps_all and committed and not there:
            self.report.wrong.append(f"{self.run.name}: no checkpoint is left")
        for path in there:
            if path.name in self.proved:
                continue
            try:
                problems = checkpoint.verify(path)
            except FileNotFoundError:
                continue  # rotated away just now
            if problems and path.exists():
                self.report.wrong.append(f"{self.run.name}: {path.name} is not whole: {problems[0]}")
            self.proved.add(path.name)
            self.report.checkpoints_proved += 1

    def finish(self, expected: str) -> None:
        for _ in range(20):
            self.ensure_running()
            assert self.process is not None
            if self.process.wait() == 0:
                break
        self.check(set())
        found = checkpoint.digest(self.run / f"checkpoints/step-{STEPS:08}")
        if found != expected:
            self.report.wrong.append(f"{self.run.name}: digest {found}, not {expected}")
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        if (steps := [row["step"] for row in rows]) != list(range(1, STEPS + 1)):
            self.report.wrong.append(f"{self.run.name}: metrics.jsonl holds {len(steps)} steps, not each once")
        self.report.chains += 1


def write_config(path: Path, limit: int | None, number: int) -> Path:
    strategy = STRATEGIES[number // 2 % 2]
    background = str(number // 4 % 2 == 0).lower()
    path.write_text(
        _CONFIG.format(steps=STEPS, strategy=strategy, limit="null" if limit is None else limit, background=background)
    )
    return path


def launch(command: list[object], **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *map(str, command)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def undisturbed(folder: Path, strategies: Sequence[str]) -> dict[str, str]:
    """The digest of each strategy's run."""
    found = {}
    for strategy in strategies:
        number = 2 * STRATEGIES.index(strategy)
        config = write_config(folder / f"whole-{strategy}.yaml", None, number)
        run = folder / f"whole-{strategy}"
        code = launch(["train", config, "--nproc-per-node", "2", "--output-dir", run]).wait()
        assert code == 0, f"the undisturbed run ended with {code}"
        found[strategy] = checkpoint.digest(run / f"checkpoints/step-{STEPS:08}")
        shutil.rmtree(run)
    return found


def bench(
    rounds: int,
    seed: int,
    kills: int = KILLS,
    on_chain: Callable[[Report], object] = lambda _report: None,
    strategies: Sequence[str] = STRATEGIES,
) -> Report:
    """So many kills, over as many chains as that takes."""
    report, chance, started = Report(), random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        folder = Path(name)
        expected = undisturbed(folder, strategies)
        number = 0
        while report.rounds < rounds:
            chain = Chain(folder, number, chance, report)
            for _ in range(min(kills, rounds - report.rounds)):
                if not chain.disturb():
                    break
            chain.finish(expected[STRATEGIES[number // 2 % 2]])
            shutil.rmtree(chain.run)
            number += 1
            report.seconds = time.monotonic() - started
            print(f"{report.rounds} rounds, {report.chains} chains, {report.seconds:.0f} s: {report.wrong}", flush=True)
            on_chain(report)
    return report


def text_of(report: Report, rounds: int, seed: int) -> str:
    killed = ", ".join(f"{count} {target}" for target, count in sorted(report.killed.items()))
    wrong = "\n".join(f"- {line}" for line in report.wrong) or "none"
    return f"""# Kill bench

`make chaos ROUNDS={rounds} SEED={seed}`, 2 ranks on a CPU, in {report.seconds:.0f} s.

| | |
|---|---|
| rounds (kills, each followed by a recovery) | {report.rounds} |
| killed: rank, agent (the launcher), all, inside a commit | {killed} |
| launches of `lockstep train` by hand, besides its own restarts | {report.launches} |
| checkpoints proved byte by byte | {report.checkpoints_proved} |
| chains whose digest was compared with the undisturbed run's | {report.chains} |

Lost or damaged checkpoints, other digests, steps missing or twice in metrics.jsonl: {wrong}
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the result there")
    given = parser.parse_args()

    def write(report: Report) -> None:
        if given.output is not None:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(text_of(report, given.rounds, given.seed))

    report = bench(given.rounds, given.seed, on_chain=write)
    print(text_of(report, given.rounds, given.seed))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
