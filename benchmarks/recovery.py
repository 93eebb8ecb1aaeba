"""Measures how long it takes until a run goes on after a rank was killed, and what was lost.

    python -m benchmarks.recovery [--rounds 3] [--ranks 4] [--write]

In each round three runs take turns, of real ranks, and the last rank of each is killed (SIGKILL):

    live      `lockstep train`, `distributed.on_failure: continue`, a copy in memory after each step
    restart   `lockstep train --max-restarts`, with the same copies
    torchrun  torchrun's restart of the same command, which has no copies: a save every 20 steps

With torchft (`pip install torchft-nightly`, best into an environment of its own) there is another,
`torchft`: each rank a replica group of its own, and the lighthouse started as torchft's README says
(`benchmarks.peers.torchft_replicas`). As root there is `2 hosts`: `live` with the ranks shared out to two network namespaces,
where the last rank is one of the second host.

The time from the kill to the end of the next step is split by what the run itself writes down:

    detect       kill → the launcher's event `recovery` or `restart` (torchrun writes none)
    meet         → the processes that go on, or new ones, have met, and have built the model
    load         choosing, verifying and loading the copy or checkpoint (event `resume`)
    first step   → the next record in metrics.jsonl

and for `live`, the groups of processes by themselves: destroying the old ones and making the new.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.run_directory.records import RunDirectory
from tests.hosts import can_make_hosts, hosts

ROOT = Path(__file__).parent.parent
PATIENCE = 180.0
_CONFIG = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "tests.faults.tiny:Points", args: {seconds: SECONDS}}
training: {max_steps: 100000, batch_size: 2, global_batch_size: SAMPLES, eval_steps: null}
distributed: {device: cpu, strategy: ddp}
checkpoint: {save_steps: 20}
monitor: {log_steps: 1, sinks: [jsonl]}
"""
_LOCKSTEP = (sys.executable, "-m", "lockstep")
_HOSTS = "2 hosts"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3")
PARTS = ("detect", "meet", "load", "first step", "kill to next step", "steps lost", "groups")
# name → the command, for so many ranks, and what it says to `lockstep train`
CONTESTANTS: dict[str, tuple[Callable[[int], Sequence[str]], Sequence[str]]] = {
    "live": (
        lambda _ranks: (*_LOCKSTEP, "train"),
        ("distributed.on_failure=continue", "checkpoint.memory_steps=1"),
    ),
    "restart": (
        lambda _ranks: (*_LOCKSTEP, "train"),
        ("--max-restarts", "3", "checkpoint.memory_steps=1"),
    ),
    "torchrun": (
        lambda ranks: (*_TORCHRUN, "--nproc-per-node", str(ranks), "-m", "lockstep", "train"),
        (),
    ),
}
if can_make_hosts():
    CONTESTANTS[_HOSTS] = CONTESTANTS["live"]
_TORCHFT = "torchft"
_SAMPLES = 24  # of a step, over all ranks
_SECONDS_A_SAMPLE = 0.01


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return what is true of a condition, once something is."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return found


def one_kill(run: RunDirectory, ranks: int) -> dict[str, float]:
    """Kill the last rank, behind the first save; return seconds of each part, and steps lost."""

    def event(kind: str, after: float = 0.0) -> Any:
        found = (e for e in run.read_events() if e["kind"] == kind and e["time"] > after)
        return next(found, None)

    wait_for(lambda: event("save"))
    reached = max(row["step"] for row in run.read_metrics())
    wait_for(lambda: any(row["step"] >= reached + 10 for row in run.read_metrics()))
    processes = {rank["rank"]: rank["process"] for rank in event("start")["ranks"]}
    killed = time.time()
    os.kill(processes[ranks - 1], signal.SIGKILL)
    before = max(row["step"] for row in run.read_metrics())
    resume = wait_for(lambda: event("resume", killed))
    told = event("recovery", killed) or event("restart", killed)
    noticed = killed if told is None else told["time"]
    rows = wait_for(lambda: [row for row in run.read_metrics() if row["time"] > resume["time"]])
    found = {} if told is None else {"detect": noticed - killed}
    found |= {
        "meet": resume["time"] - resume["seconds"] - noticed,
        "load": resume["seconds"],
        "first step": rows[0]["time"] - resume["time"],
        "kill to next step": rows[0]["time"] - killed,
        "steps lost": float(before - resume["step"]),
    }
    if event("recovery", killed):
        found["groups"] = wait_for(lambda: event("recovered", killed))["parts"]["groups"]
    return found


def measure(name: str, ranks: int, folder: Path) -> dict[str, float]:
    """Start one contestant, and kill a rank of it."""
    if name == _TORCHFT:
        return measure_torchft(ranks, folder)
    words, settings = CONTESTANTS[name]
    config = folder / "tiny.yaml"
    config.write_text(
        _CONFIG.replace("SECONDS", str(_SECONDS_A_SAMPLE)).replace("SAMPLES", str(_SAMPLES))
    )
    run = RunDirectory(folder / name)
    own = () if name == "torchrun" else ("--nproc-per-node", str(ranks))
    commands = [[*words(ranks), str(config), *own, *settings, "--output-dir", str(run.path)]]
    with ExitStack() as stack:
        if name == _HOSTS:
            two = stack.enter_context(hosts(2))
            own = ("--nproc-per-node", str(ranks // 2), "--nnodes", "2")
            own += ("--master-addr", two[0].address)
            common = [*words(ranks), str(config), *own, *settings, "--output-dir", str(run.path)]
            commands = [
                [*host.command, *common, "--node-rank", str(number)]
                for number, host in enumerate(two)
            ]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]
        try:
            return one_kill(run, ranks)
        except TimeoutError:
            processes[0].kill()
            raise SystemExit(f"{name}: {processes[0].communicate()[1]}") from None
        finally:
            for process in processes:
                process.kill()  # its ranks die with it
                process.wait()


def measure_torchft(ranks: int, folder: Path) -> dict[str, float]:
    """Start torchft's replica groups, kill the last, and wait for the next step of the others."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100
    )
    logs = [folder / f"{replica}.jsonl" for replica in range(ranks)]
    program = (sys.executable, "-m", "benchmarks.peers.torchft_replicas", lighthouse.address())
    sizes = (str(_SAMPLES // ranks), str(_SECONDS_A_SAMPLE))
    groups = [
        subprocess.Popen(
            [*program, str(replica), *sizes, str(log)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for replica, log in enumerate(logs)
    ]

    def steps(of: int) -> list[dict[str, Any]]:
        """Return the steps that the first group has taken with so many groups."""
        if not logs[0].exists():
            return []
        lines = logs[0].read_text().rpartition("\n")[0].splitlines()
        return [row for row in map(json.loads, lines) if row["groups"] == of]

    try:
        wait_for(lambda: len(steps(ranks)) > 20)
        killed = time.time()
        groups[-1].kill()
        # groups that had not joined yet made steps of fewer at the start
        first = wait_for(lambda: [row for row in steps(ranks - 1) if row["time"] > killed])[0]
        before = steps(ranks)[-1]["step"]
    finally:
        for group in groups:
            group.kill()
            group.wait()
        lighthouse.shutdown()
    return {
        "kill to next step": first["time"] - killed,
        "steps lost": float(before + 1 - first["step"]),
    }


def text_of(found: dict[str, list[dict[str, float]]], ranks: int) -> str:
    """Return the page."""
    rounds = len(found["live"])
    rows = []
    for part in PARTS:
        cells = [f"| {part}"]
        for one in found.values():
            values = [kill[part] for kill in one if part in kill]
            cells.append(_spread(values) if values else "–")
        rows.append(" | ".join(cells) + " |")
    words = [
        f"SIGKILL to the last of {ranks} ranks of a tiny run on the CPU, {rounds} times each, in"
        " turns. Seconds: median (least to most).",
        "`live` goes on in the processes that are left, on fewer ranks; `restart` and `torchrun`"
        " start all of them again. Both of Lockstep's have a copy in memory after each step;"
        " torchrun's ranks go on from a save every 20 steps.",
    ]
    after = [
        "`meet` is leaving the step, or starting processes, then meeting and building the model; a"
        " model's own size adds to it and to `load`. Objective of `live`: at most 1.0 s to the end"
        " of the next step, and 0.3 s for the groups. `2 hosts` are network"
        " namespaces of this machine.",
    ]
    if _TORCHFT in found:
        after.append(
            f"torchft {importlib.metadata.version('torchft-nightly')}: the groups that are left take"
            " a step once the lighthouse has missed the dead one's heartbeats for its 5 s. The step"
            " is another one than the undisturbed run's: nobody reads the dead group's samples."
        )
    head = " | ".join(["| ", *found])
    return page(
        "Recovery after a kill",
        f"python -m benchmarks.recovery --rounds {rounds} --ranks {ranks}",
        machine(),
        words,
        f"{head} |",
        rows,
        after,
    )


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    names = [*CONTESTANTS]
    if importlib.util.find_spec("torchft") is not None:
        names.append(_TORCHFT)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name, kills in found.items():
            with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as folder:
                kills.append(measure(name, given.ranks, Path(folder)))
            print(name, json.dumps(kills[-1]), flush=True)
    path = RESULTS / "recovery.md" if given.write else None
    tell(text_of(found, given.ranks), path)


if __name__ == "__main__":
    main()
