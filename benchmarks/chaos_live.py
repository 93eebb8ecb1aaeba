"""Kill bench of live recovery: ranks are killed and stopped, and the others go on in the same bits.

    python -m benchmarks.chaos_live --rounds 40 --write

A round is one disturbance of a run on four ranks (`distributed.on_failure: continue`, a copy in
memory after each step, a save every seven) and what follows it. A run has two of them:

    kill      SIGKILL to a rank, at any moment
    two       to two ranks at once
    recovery  to a second rank at any moment while the others recover from the first one's death
    save      a rank dies at one of its operations on files of a checkpoint
    copy      a rank dies at one of its operations on files of a copy in memory
    update    a rank dies before or after its update, while the others make theirs
    stop      SIGSTOP to a rank
    cut       the connections of a rank end, and all processes live on (`ss -K`, as root)

After a run that ends well, its digest must be that of a run that nobody disturbed, and its metrics
hold each step once. A run that does not end well must say one error; every checkpoint that it left
must prove complete, and the same command, given again, must end in that digest. A run that records
nothing for longer than `PATIENCE` counts as a hang.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.page import RESULTS, machine, page, tell
from lockstep import checkpoint
from lockstep.failures.stacks import STACKS_SIGNAL
from lockstep.run_directory.records import RunDirectory
from tests.forked import Forked

ROOT = Path(__file__).parent.parent
STEPS = 30
RANKS = 4
PATIENCE = 300.0  # seconds in which a run records neither a step nor an event
# what is said of `distributed`: sizes that leave a number of ranks open
TOPOLOGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "hybrid": {"strategy": "fsdp", "fsdp.sharding_strategy": "hybrid_shard", "shard_size": "2"},
    "pipeline × replicas": {"strategy": "pipeline", "pipeline_size": "2"},
    "tensor × replicas": {"strategy": "ddp", "tensor_size": "2"},
    "tensor × shards": {"strategy": "fsdp", "tensor_size": "2"},
    "expert × replicas": {"strategy": "ddp", "expert_size": "2"},
    "expert × shards": {"strategy": "fsdp", "expert_size": "2"},
}
KINDS = ("kill", "two", "recovery", "save", "copy", "update", "stop", "cut")
_SAVE_CALLS = 80  # a rank of four makes about so many operations on files in a run's saves
_COPY_CALLS = 300
_DENSE = "{name: transformer, args: {n_layer: 2, n_embd: 32, n_head: 4, dropout: 0.1}}"
_MIXTURE = "{name: mixture, args: {n_layer: 2, n_embd: 32, n_head: 4, n_expert: 4, top_k: 2}}"
_CONFIG = f"""
data: {{name: "benchmarks.chaos_data:Tokens"}}
training: {{max_steps: {STEPS}, batch_size: 2, global_batch_size: 12, eval_steps: null}}
distributed: {{device: cpu, reproducible: true, on_failure: continue, hang: {{seconds: 3}}}}
checkpoint: {{save_steps: 7, save_total_limit: null, memory_steps: 1}}
monitor: {{log_steps: 1, sinks: [jsonl]}}
"""
# the error at the end; and the reason that each restart gives, in the line that tells of it
_ERROR = re.compile(r"rank \d+ of \d+ failed: .*")


@dataclass
class Report:
    """What happened."""

    rounds: Counter[str] = field(default_factory=Counter)  # by kind
    runs: Counter[str] = field(default_factory=Counter)  # by topology
    went_on: int = 0  # runs that ended well without a restart
    restarted: int = 0  # runs that ended well after one
    ended: Counter[str] = field(default_factory=Counter)  # errors of the others
    seconds: list[float] = field(default_factory=list)  # of each recovery
    again: int = 0  # steps that were trained again
    wrong: list[str] = field(default_factory=list)


class Disturbed:
    """One run, disturbed twice.

    Args:
        folder: of its files.
        topology: on which it begins.
        kinds: of the disturbances.
        chance: chooses ranks and moments.
        restarts: how often the launcher may start all ranks again.
    """

    def __init__(
        self,
        folder: Path,
        topology: str,
        kinds: Sequence[str],
        chance: random.Random,
        restarts: int,
    ) -> None:
        self.run = RunDirectory(folder / "run")
        self.topology = topology
        self.kinds = kinds
        self.chance = chance
        self.restarts = restarts
        self.happened: list[str] = []
        self._since = time.monotonic()  # the run recorded something
        self._recorded = 0
        config = folder / "chaos.yaml"
        config.write_text(_config(topology))
        self._command = command(config, self.run.path, topology)
        self.process: Any = None

    def disturb(self) -> str:
        """Run it, and disturb it; return what it said on stderr. Raises TimeoutError: it hangs."""
        armed = {kind: self._arm(kind) for kind in self.kinds}
        variables = {name: text for one in armed.values() for name, text in one.items()}
        more = ["--max-restarts", str(self.restarts)]
        self.process = launch([*self._command, *more], **variables)
        step = 0
        for kind in self.kinds:
            step += self.chance.randrange(3, STEPS // 3)
            if not self._wait(lambda least=step: self._step() >= least):  # type: ignore[misc]
                break
            deaths = len(self._events("recovery"))
            ways_on = self._went_on()
            if armed[kind]:  # the rank kills itself, some time
                self._wait(lambda: bool(self._events("recovery")))
            else:
                self._kill(kind)
            has_gone_on = self._wait(lambda n=ways_on: self._went_on() > n)  # type: ignore[misc]
            if has_gone_on or self.process.poll() or len(self._events("recovery")) > deaths:
                self.happened.append(kind)
            if not has_gone_on:
                break
        while True:
            with suppress(subprocess.TimeoutExpired):
                _, err = self.process.communicate(timeout=1.0)
                return str(err)
            self._require_progress()

    def again(self) -> int:
        """Give the command again, undisturbed; return its exit code."""
        process = launch(self._command)
        process.communicate(timeout=10 * PATIENCE)
        return int(process.returncode)

    def kill(self) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    @property
    def state(self) -> str:
        """How far the run has come."""
        last = self.run.read_events()[-4:]
        ages = [f"{e['kind']} {time.time() - e['time']:.0f} s ago" for e in last]
        return f"after step {self._step()}; {', '.join(ages)}; {len(self._ranks())} ranks live"

    def write_stacks(self) -> None:
        """Have each rank that lives write into the run directory what it does just now."""
        for pid in self._ranks():
            _send(pid, STACKS_SIGNAL)
        time.sleep(2.0)

    def _arm(self, kind: str) -> dict[str, str]:
        rank = self.chance.randrange(RANKS)
        if kind == "save":
            return {"CHAOS_COMMIT": f"{rank}:{self.chance.randrange(1, _SAVE_CALLS)}"}
        if kind == "copy":
            return {"CHAOS_COPY": f"{rank}:{self.chance.randrange(1, _COPY_CALLS)}"}
        if kind == "update":
            moment = self.chance.choice(("before", "after"))
            return {"CHAOS_UPDATE": f"{rank}:{self.chance.randrange(3, STEPS)}:{moment}"}
        return {}

    def _kill(self, kind: str) -> None:
        time.sleep(self.chance.uniform(0.0, 0.3))
        alive = self._ranks()
        self.chance.shuffle(alive)
        if kind == "stop":
            _send(alive[0], signal.SIGSTOP)
            return
        if kind == "cut":
            _end_connections(alive[0])
            return
        seen = len(self._events("recovery"))
        for pid in alive[: 2 if kind == "two" else 1]:
            _send(pid, signal.SIGKILL)
        if kind == "recovery" and self._wait(lambda: len(self._events("recovery")) > seen):
            time.sleep(self.chance.uniform(0.0, 0.8))
            for pid in alive[1:2]:
                _send(pid, signal.SIGKILL)

    def _ranks(self) -> list[int]:
        """Return the processes of the ranks that live."""
        starts = self._events("start")
        pids = {rank["process"] for start in starts for rank in start["ranks"]}
        return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the run has ended before."""
        while self.process.poll() is None:
            if condition():
                return True
            self._require_progress()
            time.sleep(0.02)
        return False

    def _require_progress(self) -> None:
        """Raise a TimeoutError if the run has recorded nothing for too long."""
        files = [self.run.path / name for name in ("metrics.jsonl", "events.jsonl")]
        recorded = sum(path.stat().st_size for path in files if path.exists())
        if recorded != self._recorded:
            self._recorded = recorded
            self._since = time.monotonic()
        elif time.monotonic() - self._since > PATIENCE:
            raise TimeoutError

    def _events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["kind"] == kind]

    def _went_on(self) -> int:
        """Return how often the run has gone on after a disturbance."""
        return len(self._events("recovered")) + len(self._events("restart"))

    def _step(self) -> int:
        return max((row["step"] for row in self.run.read_metrics()), default=0)


def command(config: Path, run: Path, topology: str) -> list[str]:
    """Return the words of the command that trains on four ranks."""
    overrides = [f"distributed.{key}={value}" for key, value in TOPOLOGIES[topology].items()]
    return [
        *("train", str(config), *overrides),
        *("--nproc-per-node", str(RANKS), "--output-dir", str(run)),
    ]


def launch(words: Sequence[str], **variables: str) -> Any:
    """Start a launcher, whose processes are forks of one that has imported all that they need."""
    return Forked(
        [sys.executable, "-m", "lockstep", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _config(topology: str) -> str:
    model = _MIXTURE if "expert" in topology else _DENSE
    return f"model: {model}{_CONFIG}"


def _end_connections(pid: int) -> None:
    """End all connections of a process, on both sides."""
    with suppress(psutil.NoSuchProcess):
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_ESTABLISHED:
                ends = f"sport = :{connection.laddr.port} and dport = :{connection.raddr.port}"
                subprocess.run(["ss", "-K", "-t", *ends.split()], check=False, capture_output=True)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has died meanwhile


def judge(one: Disturbed, err: str, expected: str, report: Report) -> None:
    """Compare a run that has ended with the undisturbed one."""
    wrong = report.wrong
    who = f"{one.topology} {'+'.join(one.happened)}"
    events = one.run.read_events()
    recovered = [event for event in events if event["kind"] == "recovered"]
    report.seconds += [event["seconds"] for event in recovered]
    report.again += sum(event["again"] for event in recovered)
    if one.process.returncode == 0:
        restarted = any(event["kind"] == "restart" for event in events)
        report.restarted += restarted
        report.went_on += not restarted
    else:
        errors = _ERROR.findall(err)
        starts_again = err.count("starting the ranks again")
        if len(errors) != 1 + starts_again or "Traceback" in err:
            wrong.append(f"{who}: no clear error, but {err[-2000:]!r}")
        report.ended[errors[-1].partition("failed: ")[2] if errors else "?"] += 1
        for path in checkpoint.list_checkpoints(one.run.checkpoints):
            if problems := checkpoint.verify(path):
                wrong.append(f"{who}: {path.name} is not complete: {problems[0]}")
        if code := one.again():
            wrong.append(f"{who}: given again, it ends with {code}")
            return
    found = checkpoint.digest(one.run.checkpoints / f"step-{STEPS:08}")
    if found != expected:
        wrong.append(f"{who}: digest {found}, not {expected}")
    rows = [row["step"] for row in one.run.read_metrics() if "loss" in row]
    if rows != list(range(1, STEPS + 1)):
        wrong.append(f"{who}: metrics.jsonl holds {len(rows)} steps, not each once")


def undisturbed(folder: Path, topology: str) -> str:
    """Return the digest of a run of the topology's model that nobody disturbs, on two ranks."""
    folder.mkdir()
    config = folder / "whole.yaml"
    config.write_text(_config(topology))
    words = ["train", str(config), "distributed.strategy=ddp", "--nproc-per-node", "2"]
    process = launch([*words, "--output-dir", str(folder / "whole")])
    _, err = process.communicate(timeout=10 * PATIENCE)
    assert process.returncode == 0, err
    return checkpoint.digest(folder / f"whole/checkpoints/step-{STEPS:08}")


def bench(
    rounds: int,
    seed: int,
    topologies: Sequence[str] = tuple(TOPOLOGIES),
    kinds: Sequence[str] = KINDS,
    on_run: Callable[[Report], object] = lambda _report: None,
    keep: Path | None = None,
) -> Report:
    """Disturb runs until there were so many rounds; move what is wrong to the folder `keep`."""
    report = Report()
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-live-") as name:
        expected = {
            model: undisturbed(Path(name, f"whole-{number}"), topology)
            for number, (model, topology) in enumerate({_config(t): t for t in topologies}.items())
        }
        number = 0
        while report.rounds.total() < rounds:
            # Each kind, and each topology, in turn, and other pairs of them in the next turn; the
            # second kind is any.
            pair = [kinds[number % len(kinds)], chance.choice(kinds)]
            topology = topologies[(number + number // len(kinds)) % len(topologies)]
            folder = Path(name, f"run-{number}")
            folder.mkdir()
            one = Disturbed(folder, topology, list(dict.fromkeys(pair)), chance, number % 2 * 3)
            number += 1
            wrong_before = len(report.wrong)
            try:
                judge(one, one.disturb(), expected[_config(topology)], report)
            except (TimeoutError, subprocess.TimeoutExpired):
                report.wrong.append(f"{topology} {'+'.join(one.kinds)}: it hangs {one.state}")
                one.write_stacks()
            finally:
                one.kill()
            report.runs[topology] += 1
            report.rounds.update(one.happened)
            if keep is not None and len(report.wrong) > wrong_before:
                shutil.move(folder, keep)
            else:
                shutil.rmtree(folder)
            on_run(report)
    return report


def text_of(report: Report, rounds: int, seed: int) -> str:
    """Return the page."""
    seconds = sorted(report.seconds)
    median = f"{seconds[len(seconds) // 2]:.2f}" if seconds else "–"
    most = f"{seconds[-1]:.2f}" if seconds else "–"
    words = [
        f"{report.rounds.total()} rounds in {report.runs.total()} runs of {RANKS} ranks and"
        f" {STEPS} steps, a copy in memory after each"
        f" step: {', '.join(f'{n} {k}' for k, n in sorted(report.rounds.items()))}.",
        "",
        f"{report.went_on} runs ended well in the same processes, {report.restarted} after a"
        f" restart. {len(seconds)} recoveries took {median} s in the median and {most} s at most,"
        f" from the death to the end of the first step, on two busy cores; {report.again} steps"
        " were trained again.",
    ]
    ended = [f"- {text}: {count}" for text, count in sorted(report.ended.items())]
    wrong = "; ".join(report.wrong) or "none"
    after = ["Runs that ended with an error, whose checkpoints proved complete and led to the same"]
    after += ["digest when the command was given again:", "", *(ended or ["none"]), ""]
    after += ["Hangs, other digests, steps missing or twice, checkpoints that are not complete: "]
    after[-1] += wrong
    return page(
        "Kill bench of live recovery",
        f"python -m benchmarks.chaos_live --rounds {rounds} --seed {seed}",
        machine(),
        words,
        "| topology | runs |",
        [f"| {topology} | {count} |" for topology, count in report.runs.items()],
        after,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=tuple(TOPOLOGIES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--keep", type=Path, help="a folder for the files of what is wrong")
    given = parser.parse_args()

    def write(report: Report) -> None:
        print(json.dumps({"rounds": report.rounds, "wrong": report.wrong}), flush=True)
        if given.write:
            tell(text_of(report, given.rounds, given.seed), RESULTS / "chaos_live.md")

    report = bench(given.rounds, given.seed, given.topologies, given.kinds, write, given.keep)
    print(text_of(report, given.rounds, given.seed))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
