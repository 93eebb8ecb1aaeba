"""Kill bench: SIGKILL to ranks, launchers and all of them, at random moments and inside commits;
nothing may be lost.

    python -m benchmarks.chaos --rounds 100        (make chaos ROUNDS=100)

So many rounds for each format of checkpoint, saved in the background and not. A chain is one small
run of two ranks, which is killed `KILLS` times and started again until it is done. A round is one
kill and what follows it. After every kill each checkpoint that was committed before must still be
there, and every one that is there must prove whole; at the end of a chain the digest must be that
of a run that nobody disturbed, and the metrics hold each step once. Every second chain rotates its
checkpoints (then the newest must be whole; older ones may be gone).

Launchers and ranks are forked from this process, which has loaded all that they need
(`benchmarks.chaos_fork`); with `--started` they are those of `lockstep train`, which takes a minute
for a round where two cores are shared.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lockstep import checkpoint

ROOT = Path(__file__).parent.parent
KILLS = 10  # in a chain
STEPS = 120
STRATEGIES = ("ddp", "fsdp")  # in turn
FORMATS = ("sharded", "full", "local")
COMMIT_CALLS = 60  # about so many operations on files make a commit; a kill comes at one of them
TARGETS = ("rank", "rank", "agent", "all", "commit", "commit")
_CONFIG = """
model: {{name: "tests.faults.tiny:Net"}}
data: {{name: "benchmarks.chaos_data:Points", args: {{seconds: 0.005}}}}
training: {{max_steps: {steps}, batch_size: 4, global_batch_size: 8, eval_steps: null}}
distributed: {{device: cpu, strategy: {strategy}}}
checkpoint: {{save_steps: 3, save_total_limit: {limit}, format: {format}, async: {background}}}
monitor: {{log_steps: 1, sinks: [jsonl]}}
"""


@dataclass(frozen=True)
class Case:
    """How the checkpoints of a run are written."""

    format: str = "sharded"
    background: bool = True

    def __str__(self) -> str:
        return f"{self.format}, {'async' if self.background else 'sync'}"


CASES = tuple(Case(kept, background) for kept in FORMATS for background in (True, False))


class Process(Protocol):
    """A launcher."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


Launch = Callable[..., Process]  # (config, run directory, **environment)


@dataclass
class Report:
    """What happened."""

    case: Case
    rounds: int = 0
    chains: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    checkpoints_proved: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Chain:
    """One run, killed again and again."""

    def __init__(
        self,
        folder: Path,
        number: int,
        strategy: str,
        case: Case,
        chance: random.Random,
        report: Report,
        launch: Launch,
        steps: int,
    ) -> None:
        self.run = folder / f"run-{number}"
        self.chance = chance
        self.report = report
        self.launch = launch
        self.steps = steps
        self.keeps_all = number % 2 == 0
        limit = None if self.keeps_all else 2
        self.config = write_config(folder / f"chain-{number}.yaml", steps, limit, strategy, case)
        self.process: Process | None = None
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
        self.process = self.launch(self.config, self.run, CHAOS_COMMIT=commit)

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
        self.ensure_running(
            f"{rank}:{self.chance.randrange(1, COMMIT_CALLS)}" if target == "commit" else ""
        )
        assert self.process is not None
        starts = len(self.events("start"))
        fresh = target == "commit" or self.chance.random() < 0.8
        deadline = time.monotonic() + 120
        while (
            fresh
            and len(self.events("start")) <= max(0, starts - (target != "commit"))
            and self.running(deadline)
        ):
            time.sleep(0.02)
        committed = {path.name for path in checkpoint.list_checkpoints(self.run / "checkpoints")}
        if target == "commit":
            restarts = len(self.events("restart"))
            while len(self.events("restart")) == restarts and self.running(deadline):
                time.sleep(0.02)
        else:
            time.sleep(self.chance.uniform(0, 1.0))
            committed = {
                path.name for path in checkpoint.list_checkpoints(self.run / "checkpoints")
            }
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
        lost = committed - {path.name for path in there}
        if self.keeps_all and lost:
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
                self.report.wrong.append(
                    f"{self.run.name}: {path.name} is not whole: {problems[0]}"
                )
            self.proved.add(path.name)
            self.report.checkpoints_proved += 1

    def finish(self, expected: str) -> None:
        for _ in range(20):
            self.ensure_running()
            assert self.process is not None
            if self.process.wait() == 0:
                break
        self.check(set())
        found = checkpoint.digest(self.run / f"checkpoints/step-{self.steps:08}")
        if found != expected:
            self.report.wrong.append(f"{self.run.name}: digest {found}, not {expected}")
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        if (steps := [row["step"] for row in rows]) != list(range(1, self.steps + 1)):
            self.report.wrong.append(
                f"{self.run.name}: metrics.jsonl holds {len(steps)} steps, not each once"
            )
        self.report.chains += 1


def write_config(path: Path, steps: int, limit: int | None, strategy: str, case: Case) -> Path:
    path.write_text(
        _CONFIG.format(
            steps=steps,
            strategy=strategy,
            limit="null" if limit is None else limit,
            format=case.format,
            background=str(case.background).lower(),
        )
    )
    return path


def forked(config: Path, run: Path, **environment: str) -> Process:
    from benchmarks.chaos_fork import Forked

    return Forked(["train", config, "--output-dir", run], 2, **environment)


def started(config: Path, run: Path, **environment: str) -> Process:
    options = ["--nproc-per-node", "2", "--max-restarts", "50", "--output-dir", str(run)]
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", str(config), *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def undisturbed(
    folder: Path, strategies: Sequence[str], launch: Launch, steps: int
) -> dict[str, str]:
    """The digest of each strategy's run; formats do not change it."""
    found = {}
    for strategy in strategies:
        config = write_config(folder / f"whole-{strategy}.yaml", steps, None, strategy, Case())
        run = folder / f"whole-{strategy}"
        code = launch(config, run).wait()
        assert code == 0, f"the undisturbed run ended with {code}"
        found[strategy] = checkpoint.digest(run / f"checkpoints/step-{steps:08}")
        shutil.rmtree(run)
    return found


def bench(
    rounds: int,
    seed: int,
    case: Case = CASES[0],
    *,
    kills: int = KILLS,
    steps: int = STEPS,
    strategies: Sequence[str] = STRATEGIES,
    launch: Launch = forked,
    expected: Mapping[str, str] | None = None,
    on_chain: Callable[[Report], object] = lambda _report: None,
) -> Report:
    """So many kills, over as many chains as that takes.

    Args:
        expected: the digests of undisturbed runs, by strategy; unset: they are run.
    """
    report = Report(case)
    chance = random.Random(f"{seed} {case}")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        folder = Path(name)
        expected = expected or undisturbed(folder, strategies, launch, steps)
        while report.rounds < rounds:
            number = report.chains
            strategy = strategies[number // 2 % len(strategies)]
            chain = Chain(folder, number, strategy, case, chance, report, launch, steps)
            for _ in range(min(kills, rounds - report.rounds)):
                if not chain.disturb():
                    break
            chain.finish(expected[strategy])
            shutil.rmtree(chain.run)
            report.seconds = time.monotonic() - begun
            on_chain(report)
    return report


def text_of(reports: Sequence[Report], rounds: int, seed: int, how: str) -> str:
    rows = [
        f"| {r.case} | {r.rounds} |"
        f" {', '.join(f'{count} {target}' for target, count in sorted(r.killed.items()))} |"
        f" {r.launches} | {r.checkpoints_proved} | {r.chains} | {r.seconds:.0f} |"
        for r in reports
    ]
    wrong = "\n".join(f"- {r.case}: {line}" for r in reports for line in r.wrong) or "none"
    table = "\n".join(rows)
    return f"""# Kill bench

`make chaos ROUNDS={rounds} SEED={seed}`, 2 ranks on a CPU, {how}. A round is a kill and the recovery after it; a chain
is a run, whose digest is compared with that of the run that nobody disturbed. "agent" is the launcher, "commit" a rank
inside of a commit; launches are those by hand, besides restarts.

| checkpoints | rounds | killed | launches | checkpoints proved byte by byte | chains | seconds |
|---|---|---|---|---|---|---|
{table}

Lost or damaged checkpoints, other digests, steps missing or twice in metrics.jsonl: {wrong}
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--rounds", type=int, default=100, help="for each format, in the background and not"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument(
        "--started",
        action="store_true",
        help="start launchers and ranks as users do, without forks",
    )
    parser.add_argument("--output", type=Path, help="write the result there")
    given = parser.parse_args()
    launch, how = (started, "started by `lockstep train`") if given.started else (forked, "forked")
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name:
        expected = undisturbed(Path(name), STRATEGIES, launch, STEPS)
    for case in (case for case in CASES if case.format in given.formats):

        def write(report: Report) -> None:
            print(
                f"{report.case}: {report.rounds} rounds, {report.chains} chains,"
                f" {report.seconds:.0f} s: {report.wrong}",
                flush=True,
            )
            if given.output is not None:
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(text_of([*reports, report], given.rounds, given.seed, how))

        reports.append(
            bench(given.rounds, given.seed, case, launch=launch, expected=expected, on_chain=write)
        )
    print(text_of(reports, given.rounds, given.seed, how))
    return 1 if any(report.wrong for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
