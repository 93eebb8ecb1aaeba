"""Measures how long it takes until a run goes on after a rank was killed, and what was lost.

    python -m benchmarks.recovery [--kills 5] [--processes 2]

A run of real ranks; rank 1 is killed with SIGKILL again and again. The time from the kill to the
next step is split by what the run itself writes down:

    detect       kill → the launcher's event `restart`
    restart      → ranks start as forks of the launcher's prepared process, meet, build the model
    load         → event `resume`, which says how long choosing, verifying and loading the
                 checkpoint took
    first step   → the next record in metrics.jsonl
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
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import tell

ROOT = Path(__file__).parent.parent
_CONFIG = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "tests.faults.tiny:Points", args: {seconds: 0.01}}
training: {max_steps: 100000, batch_size: 4, global_batch_size: 8, eval_steps: null}
distributed: {device: cpu}
checkpoint: {save_steps: 20}
monitor: {log_steps: 1, sinks: [jsonl]}
"""


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def wait_for(run: Path, kind: str, after: float) -> dict[str, Any]:
    deadline = time.time() + 120
    while time.time() < deadline:
        for event in lines(run / "events.jsonl"):
            if event["kind"] == kind and event["time"] > after:
                return event
        time.sleep(0.02)
    raise TimeoutError(f"no event {kind}")


def one_kill(run: Path) -> dict[str, float]:
    """Kill rank 1 somewhere between two saves; seconds of each part, and steps lost."""
    saved = wait_for(run, "save", time.time())
    time.sleep(random.uniform(0, 1.0))
    start = [event for event in lines(run / "events.jsonl") if event["kind"] == "start"][-1]
    pid = next(rank["process"] for rank in start["ranks"] if rank["rank"] == 1)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    restart = wait_for(run, "restart", killed)
    reached = max(row["step"] for row in lines(run / "metrics.jsonl"))
    resume = wait_for(run, "resume", killed)
    while not (
        after := [row for row in lines(run / "metrics.jsonl") if row["time"] > resume["time"]]
    ):
        time.sleep(0.02)
    assert resume["step"] >= saved["step"]
    return {
        "detect": restart["time"] - killed,
        "restart": resume["time"] - resume.get("seconds", 0.0) - restart["time"],
        "load": resume.get("seconds", 0.0),
        "first step": after[0]["time"] - resume["time"],
        "whole": after[0]["time"] - killed,
        "steps lost": float(reached - resume["step"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as name:
        run = Path(name, "run")
        config = Path(name, "tiny.yaml")
        config.write_text(_CONFIG)
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            str(config),
            "--nproc-per-node",
            str(given.processes),
        ]
        process = subprocess.Popen(
            [*command, "--max-restarts", str(given.kills), "--output-dir", str(run)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found = [one_kill(run) for _ in range(given.kills)]
        finally:
            process.kill()
            process.wait()
    rows = "\n".join(
        f"| {part} | {median(kill[part] for kill in found):.2f} |"
        f" {min(kill[part] for kill in found):.2f} | {max(kill[part] for kill in found):.2f} |"
        for part in found[0]
    )
    text = f"""# Recovery after a kill

`python -m benchmarks.recovery --kills {given.kills} --processes {given.processes}`: SIGKILL to rank 1 of a tiny run on
the CPU, a checkpoint every 20 steps. Objective: what is lost are the steps since the last commit, `save_steps` and
the save that is under way at most, trained again to the same bits; the next step ends a restart later.

| seconds | median | least | most |
|---|---|---|---|
{rows}

`restart` is starting the ranks as forks of the process that the first ones came from, meeting, and building the model; a model's own size adds to it
and to `load`.
"""
    tell(text, given.output)


if __name__ == "__main__":
    main()
