"""Kill bench of a run in a bucket: kills, faults of the link, and a service that goes away.

    python -m benchmarks.chaos_bucket --rounds 100 --write

The run directory of two ranks is a bucket, on a real server of S3's protocol behind a proxy
(`tests/bucket.py`). A round is one disturbance, and what follows it:

    rank      SIGKILL to a rank: its launcher starts both again
    all       to the launcher and all ranks; the same command is given again, in half of the cases
              by a machine with an empty disk
    request   to all of them at a request of a save, before or after the server has seen it
    faults    of the next requests every third is dropped, delayed, sent twice, or answered with 500
              or 503, or its answer is lost or cut
    away      no request is answered for some seconds

A run has `DISTURBANCES` of them. After each, every checkpoint that was committed before is still
there, and every new one is compared with its checksums, past the proxy. A run that was disturbed
ends with the digest of one that was not, and its metrics hold each step once.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
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
from lockstep.checkpoint import Location, ObjectStorage
from lockstep.files.object_client import ObjectClient
from tests import bucket
from tests.bucket import Plan, Proxy, Request
from tests.forked import Forked
from tests.hosts import REPOSITORY

STEPS = 60
DISTURBANCES = 5  # of a run
KINDS = ("rank", "all", "request", "request", "faults", "away")
STRATEGIES = ("ddp", "fsdp")  # in turn
PASSING = ("drop", "lose", "truncate", "duplicate", "delay", "500", "503")
PATIENCE = 300.0  # seconds in which a run commits nothing
_REQUESTS = 40  # of a save, about; a kill comes at one of them
_FAULTY = 90  # requests, every third of which has a fault
_AWAY = (1.0, 6.0)  # seconds
_CONFIG = """
model: {{name: "tests.faults.tiny:Net"}}
data: {{name: "tests.faults.tiny:Points", args: {{seconds: 0.003}}}}
training: {{max_steps: {steps}, batch_size: 4, global_batch_size: 8, eval_steps: null}}
distributed: {{device: cpu, strategy: {strategy}}}
checkpoint: {{save_steps: 4, save_total_limit: {limit}, async: {background}}}
monitor: {{log_steps: 1, sinks: [jsonl]}}
"""


@dataclass
class Report:
    """What happened."""

    rounds: Counter[str] = field(default_factory=Counter)  # by kind
    runs: int = 0
    launches: int = 0
    proved: int = 0  # checkpoints, byte by byte
    requests: int = 0
    wrong: list[str] = field(default_factory=list)


class Disturbed:
    """One run, disturbed some times.

    Args:
        folder: of its machines.
        number: of the run.
        proxy: before the server.
        direct: the variables with which a client reaches the server itself.
        chance: chooses what and when.
        report: is told what happened.
    """

    def __init__(
        self, folder: Path, number: int, proxy: Proxy, chance: random.Random, report: Report
    ) -> None:
        self.url = f"{bucket.SCHEME}://team/chaos-{number}"
        self._folder = folder
        self._machines = 0
        self._machine = self._new_machine()
        self._proxy = proxy
        self._chance = chance
        self._report = report
        self._keeps_all = number % 3 != 0
        strategy = STRATEGIES[number % 2]
        self._config = folder / "train.yaml"
        self._config.write_text(config_of(strategy, number % 4 < 2, self._keeps_all))
        self._storage = ObjectStorage(self.url)
        self._process: Any = None
        self._proved: set[str] = set()

    def disturb(self, kind: str) -> bool:
        """Disturb it once; return False if the run was done before."""
        self._require_running()
        before = set(self._storage.names())
        if not self._wait(lambda: not before >= set(self._storage.names())):
            return False
        time.sleep(self._chance.uniform(0.0, 0.5))
        committed = set(self._storage.names())
        getattr(self, f"_{kind}")()
        if self._process.poll() == 0:
            return False
        self._report.rounds[kind] += 1
        self._check(committed)
        return True

    def finish(self, expected: str) -> None:
        """Let it come to its end, and compare it with an undisturbed run."""
        self._proxy.plan = lambda request: None
        for _ in range(20):
            self._require_running()
            if self._wait(lambda: False) or self._process.poll() == 0:
                break
        wrong = self._report.wrong
        self._check(set())
        name = f"step-{STEPS:08}"
        if name not in self._storage.names():
            wrong.append(f"{self.url}: it ends with {self._process.poll()}, without {name}")
            return
        if (found := checkpoint.digest(Location(self._storage, name))) != expected:
            wrong.append(f"{self.url}: digest {found}, not {expected}")
        text = ObjectClient(self.url).get("records/metrics.jsonl")
        if (steps := [json.loads(line)["step"] for line in text.splitlines()]) != [
            *range(1, STEPS + 1)
        ]:
            wrong.append(f"{self.url}: metrics.jsonl holds {len(steps)} steps, not each once")
        self._report.runs += 1

    def kill(self) -> None:
        """End all of its processes."""
        if self._process is None or self._process.poll() is not None:
            return
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            processes = [root, *root.children(recursive=True)]
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes[1:], timeout=60)
        self._process.wait()

    def _rank(self) -> None:
        with suppress(psutil.NoSuchProcess):
            ranks = self._ranks()
            if ranks:
                self._chance.choice(ranks).kill()

    def _all(self) -> None:
        self.kill()
        if self._chance.random() < 0.5:
            shutil.rmtree(self._machine)
            self._machine = self._new_machine()

    def _request(self) -> None:
        """Kill all at one of the next requests, before or after the server sees it."""
        number = len(self._proxy.requests) + self._chance.randrange(_REQUESTS)
        fault = self._chance.choice(("drop", "lose"))
        reached = threading.Event()

        def plan(request: Request) -> str | None:
            if request.number < number:
                return None
            reached.set()
            return fault if request.number == number else "drop"

        self._proxy.plan = plan
        self._wait(reached.is_set)
        time.sleep(0.05)  # "lose": the server has it by then
        self.kill()
        self._proxy.plan = lambda request: None

    def _faults(self) -> None:
        begin = len(self._proxy.requests)
        offset = self._chance.randrange(len(PASSING))

        def plan(request: Request) -> str | None:
            number = request.number - begin
            if number % 3 or number >= _FAULTY:
                return None
            return PASSING[(number // 3 + offset) % len(PASSING)]

        self._proxy.plan = plan
        self._wait(lambda: len(self._proxy.requests) >= begin + _FAULTY)
        self._proxy.plan = lambda request: None

    def _away(self) -> None:
        plan: Plan = lambda request: "drop"  # noqa: E731
        self._proxy.plan = plan
        time.sleep(self._chance.uniform(*_AWAY))
        self._proxy.plan = lambda request: None

    def _lose(self) -> None:
        """Delete a checkpoint, to see that it is told."""
        self._storage.delete(self._storage.names()[0])

    def _damage(self) -> None:
        """Change a byte of a checkpoint, to see that it is told."""
        name = self._storage.names()[0]
        client = ObjectClient(self.url)
        key = f"data/{self._storage.pinned(name)}/model/__0_0.distcp"
        data = bytearray(client.get(key))
        data[len(data) // 2] ^= 1
        client.put(key, bytes(data))
        self._proved.discard(name)

    def _check(self, committed: set[str]) -> None:
        there = self._storage.names()
        wrong = self._report.wrong
        lost = committed - set(there)
        if self._keeps_all and lost:
            wrong.append(f"{self.url}: lost {sorted(lost)}")
        if committed and not there:
            wrong.append(f"{self.url}: no checkpoint is left")
        for name in there:
            if name in self._proved:
                continue
            problems = checkpoint.verify(Location(self._storage, name))
            if problems and self._storage.exists(name):  # else it was deleted just now
                wrong.append(f"{self.url}: {name} is not whole: {problems[0]}")
            self._proved.add(name)
            self._report.proved += 1

    def _require_running(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._report.launches += 1
            self._process = launch(self._machine, self._config, self.url, self._proxy)

    def _ranks(self) -> list[psutil.Process]:
        return list(psutil.Process(self._process.pid).children(recursive=True))

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the run has ended before. Raises TimeoutError."""
        begun = time.monotonic()
        names: list[str] = []
        while self._process.poll() is None:
            if condition():
                return True
            time.sleep(0.05)
            if time.monotonic() - begun > PATIENCE:
                if names == (names := self._storage.names()):
                    raise TimeoutError
                begun = time.monotonic()
        return False

    def _new_machine(self) -> Path:
        """Return an empty folder, as the disk of another machine."""
        self._machines += 1
        machine = self._folder / f"machine-{self._machines}"
        machine.mkdir()
        return machine


def config_of(strategy: str, background: bool = True, keeps_all: bool = True) -> str:
    return _CONFIG.format(
        steps=STEPS,
        strategy=strategy,
        limit="null" if keeps_all else 2,
        background=str(background).lower(),
    )


def launch(machine: Path, config: Path, url: str, proxy: Proxy) -> Any:
    """Start a launcher on a machine, whose ranks reach the bucket through the proxy."""
    words = ["--nproc-per-node", "2", "--max-restarts", "50", "--output-dir", url]
    return Forked(
        [sys.executable, "-m", "lockstep", "train", str(config), *words],
        cwd=machine,
        env={
            **os.environ,
            **bucket.environment(proxy.url),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def undisturbed(folder: Path, proxy: Proxy) -> dict[str, str]:
    """Return the digest of each strategy's run, which nobody disturbs."""
    digests = {}
    for strategy in STRATEGIES:
        config = folder / f"whole-{strategy}.yaml"
        config.write_text(config_of(strategy))
        url = f"{bucket.SCHEME}://team/whole-{strategy}"
        code = launch(folder, config, url, proxy).wait()
        assert code == 0, f"the undisturbed run ended with {code}"
        digests[strategy] = checkpoint.digest(ObjectStorage(url).path(f"step-{STEPS:08}"))
    return digests


def bench(
    rounds: int,
    seed: int,
    kinds: Sequence[str] = KINDS,
    on_run: Callable[[Report], object] = lambda _report: None,
) -> Report:
    """Disturb runs until there were so many rounds."""
    report = Report()
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name,
        bucket.bucket_server() as port,
    ):
        os.environ.update(bucket.environment(f"http://127.0.0.1:{port}"))  # of this process
        proxy = Proxy(port)
        expected = undisturbed(Path(name), proxy)
        number = 0
        while report.rounds.total() < rounds:
            number += 1
            folder = Path(name, f"run-{number}")
            folder.mkdir()
            run = Disturbed(folder, number, proxy, chance, report)
            try:
                for _ in range(min(DISTURBANCES, rounds - report.rounds.total())):
                    if not run.disturb(chance.choice(kinds)):
                        break
                run.finish(expected[STRATEGIES[number % 2]])
            except TimeoutError:
                report.wrong.append(f"{run.url}: it hangs")
            finally:
                run.kill()
            report.requests += len(proxy.requests)
            proxy.reset()
            shutil.rmtree(folder)
            on_run(report)
        proxy.close()
    return report


def text_of(report: Report, rounds: int, seed: int) -> str:
    """Return the page."""
    return page(
        "Kill bench of a run in a bucket",
        f"python -m benchmarks.chaos_bucket --rounds {rounds} --seed {seed} --write",
        machine(),
        [
            f"{report.rounds.total()} rounds in {report.runs} runs of two ranks and {STEPS} steps,"
            f" {report.launches} launches besides restarts;",
            f"{report.requests:,} requests to a server of S3's protocol (moto's), through a proxy;"
            f" {report.proved} checkpoints were proved byte by byte.",
            "What each kind is, is told at the head of `benchmarks/chaos_bucket.py`.",
        ],
        "| disturbance | rounds |",
        [f"| {kind} | {count} |" for kind, count in sorted(report.rounds.items())],
        [
            "Lost or damaged checkpoints, other digests, steps missing or twice in metrics.jsonl,"
            " hangs: " + ("; ".join(report.wrong) or "none"),
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the page after each run")
    given = parser.parse_args()

    def write(report: Report) -> None:
        print(json.dumps({"rounds": report.rounds, "wrong": report.wrong}), flush=True)
        if given.write:
            tell(text_of(report, given.rounds, given.seed), RESULTS / "chaos_bucket.md")

    report = bench(given.rounds, given.seed, on_run=write)
    print(text_of(report, given.rounds, given.seed))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
