"""Where the time goes from a command to its first step.

    python -m benchmarks.start [--ranks 1,2] [--rounds 3] [--compile] [--write]

`lockstep train` runs as it is; the model and the data are classes of this file, which write down
when they are asked for. Imports are what Python itself counts (`-X importtime`) for a worker, taken
apart.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import RESULTS, machine, page, tell

MARKS = "START_MARKS"  # a folder: a file for each rank, a line for each mark
REPOSITORY = Path(__file__).parent.parent
CONFIG = """
model: {name: "benchmarks.start_parts:Model"}
data: {name: "benchmarks.start_parts:Rows"}
training: {batch_size: 4, max_steps: 3, compile: COMPILE}
precision: {mode: fp32}
checkpoint: {save_strategy: none}
monitor: {sinks: [jsonl]}
"""
ORDER = ["command", "process", "data", "model", "forward", "second forward", "end"]
NAMES = {
    ("command", "process"): "launcher: command → the last rank's process",
    ("process", "data"): "imports and rendezvous: process → data asked for",
    ("data", "model"): "data",
    ("model", "forward"): "model built and placed, run directory, first batch",
    ("forward", "second forward"): "first step (compiles, counts its FLOPs)",
    ("second forward", "end"): "the other two steps, end",
    ("command", "forward"): "**command → first forward pass**",
}


def one(ranks: int, compiled: bool) -> dict[str, float]:
    """Seconds of each mark after the command; of the rank that came last."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "start.yaml")
        config.write_text(CONFIG.replace("COMPILE", str(compiled).lower()))
        marks = Path(folder, "marks")
        marks.mkdir()
        environment = {
            **os.environ,
            MARKS: str(marks),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            str(config),
            "--output-dir",
            f"{folder}/run",
        ]
        begin = time.time()
        done = subprocess.run(
            [*command, "--nproc-per-node", str(ranks)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        end = time.time()
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, float] = {"command": 0.0, "end": end - begin}
        for path in marks.iterdir():
            for line in path.read_text().splitlines():
                name, at = json.loads(line)
                found[name] = max(found.get(name, 0.0), at - begin)
    return found


def imports() -> list[tuple[str, float]]:
    """Seconds that a worker's imports take, by package, the largest; each without what it imports
    of the others.
    """
    command = [sys.executable, "-X", "importtime", "-c", "import lockstep.trainer"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    own: dict[str, float] = {}
    for line in done.stderr.splitlines():
        found = re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)", line)
        if found:
            package = found[2].partition(".")[0]
            own[package] = own.get(package, 0.0) + int(found[1]) / 1e6
    return sorted(own.items(), key=lambda item: -item[1])[:8]


def rows(ranks: int, rounds: int, compiled: bool) -> list[str]:
    runs = [one(ranks, compiled) for _ in range(rounds)]
    return [
        f"| {ranks} | {title} | {median(run[last] - run[first] for run in runs):.2f} "
        f"| {min(run[last] - run[first] for run in runs):.2f} |"
        for (first, last), title in NAMES.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked: Any = parser.parse_args()
    table = [
        row
        for ranks in map(int, asked.ranks.split(","))
        for row in rows(ranks, asked.rounds, asked.compile)
    ]
    command = (
        f"python -m benchmarks.start --ranks {asked.ranks} --rounds {asked.rounds}"
        + " --compile" * asked.compile
    )
    packages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in imports())
    text = page(
        "From a command to its first step",
        f"{command} --write",
        machine(),
        [
            "Seconds, of the rank that came last; a small model. Starting Python is in the first"
            " two lines."
        ],
        "| ranks | what | median | least |",
        table,
        [
            "Imports of a worker, seconds of each package's own modules (with the profiler's"
            " cost): " + packages + "."
        ],
    )
    tell(text, RESULTS / "start.md" if asked.write else None)


if __name__ == "__main__":
    main()
