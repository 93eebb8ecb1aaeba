"""Where the time goes from a command to its first step.

    python -m benchmarks.start [--ranks 1,2] [--rounds 3] [--compile] [--write]

`lockstep train` runs as it is, in turns:

    fresh   ranks are fresh processes (`--fresh-processes`)
    cold    ranks are forks of a process that their launcher splits off, once it has imported all
    warm    all are forks of the process that `lockstep warm` has left

The model and the data are classes of `start_parts.py`, which write down when they are asked for.
Imports are what Python itself counts (`-X importtime`) for a worker, taken apart.
"""

import argparse
import compileall
import json
import os
import re
import shutil
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
WAYS = ("fresh", "cold", "warm")
ORDER = ["command", "process", "data", "model", "forward", "second forward", "end"]
NAMES = {
    ("command", "process"): "launcher: command → the last rank's process (cold: all imports)",
    ("process", "data"): "imports and rendezvous: process → data asked for",
    ("data", "model"): "data",
    ("model", "forward"): "model built and placed, run directory, first batch",
    ("forward", "second forward"): "first step (compiles, counts its FLOPs)",
    ("second forward", "end"): "the other two steps, end",
    ("command", "forward"): "**command → first forward pass**",
}


def install(folder: str) -> Path:
    """Put the package where it has its bytecode, as one that is installed; return the folder."""
    for name in ("lockstep", "benchmarks"):
        shutil.copytree(REPOSITORY / name, Path(folder, name))
    compileall.compile_dir(folder, quiet=2)
    return Path(folder)


def one(package: Path, ranks: int, compiled: bool, way: str) -> dict[str, float]:
    """Seconds of each mark after the command; of the rank that came last."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "start.yaml")
        config.write_text(CONFIG.replace("COMPILE", str(compiled).lower()))
        marks = Path(folder, "marks")
        marks.mkdir()
        environment = {
            **os.environ,
            MARKS: str(marks),
            "PYTHONPATH": str(package),
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
        if way == "warm":
            run(["warm"], package, environment)
        begin = time.time()
        done = subprocess.run(
            [*command, "--nproc-per-node", str(ranks), *["--fresh-processes"] * (way == "fresh")],
            cwd=package,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        end = time.time()
        if way == "warm":
            run(["warm", "--stop"], package, environment)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, float] = {"command": 0.0, "end": end - begin}
        for path in marks.iterdir():
            for line in path.read_text().splitlines():
                name, at = json.loads(line)
                found[name] = max(found.get(name, 0.0), at - begin)
    return found


def run(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a command of Lockstep to its end."""
    subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )


def import_torch() -> float:
    """Seconds of a process that imports torch, and ends."""
    begin = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.time() - begin


def imports(package: Path) -> list[tuple[str, float]]:
    """Seconds that a worker's imports take, by package, the largest; each without what it imports
    of the others.
    """
    command = [sys.executable, "-X", "importtime", "-c", "import lockstep.trainer"]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=package, env=environment
    )
    own: dict[str, float] = {}
    for line in done.stderr.splitlines():
        found = re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)", line)
        if found:
            package = found[2].partition(".")[0]
            own[package] = own.get(package, 0.0) + int(found[1]) / 1e6
    return sorted(own.items(), key=lambda item: -item[1])[:8]


def rows(package: Path, ranks: int, rounds: int, compiled: bool) -> list[str]:
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, found in runs.items():
            found.append(one(package, ranks, compiled, way))
    table = []
    for (first, last), title in NAMES.items():
        spent = {way: [run[last] - run[first] for run in found] for way, found in runs.items()}
        cells = [f"{median(seconds):.2f} | {min(seconds):.2f}" for seconds in spent.values()]
        table.append(f"| {ranks} | {title} | {' | '.join(cells)} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked: Any = parser.parse_args()
    torch_alone = [import_torch() for _ in range(asked.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        package = install(folder)
        table = [
            row
            for ranks in map(int, asked.ranks.split(","))
            for row in rows(package, ranks, asked.rounds, asked.compile)
        ]
        of_packages = imports(package)
    command = (
        f"python -m benchmarks.start --ranks {asked.ranks} --rounds {asked.rounds}"
        + " --compile" * asked.compile
    )
    packages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in of_packages)
    text = page(
        "From a command to its first step",
        f"{command} --write",
        machine(),
        [
            "Seconds, of the rank that came last; a small model; Lockstep and torch have their"
            " bytecode, as installed. Starting Python is in the first two lines. Ranks are fresh"
            " processes; forks of a process that the launcher splits off (cold); or all are"
            " forks of what `lockstep warm` left (warm)."
        ],
        "| ranks | what | fresh, median | least | cold, median | least | warm, median | least |",
        table,
        [
            f"A process that imports torch alone, in the same run: {median(torch_alone):.2f}"
            f" (least {min(torch_alone):.2f}).",
            "Imports of a worker, seconds of each package's own modules (with the profiler's"
            " cost): " + packages + ".",
        ],
    )
    tell(text, RESULTS / "start.md" if asked.write else None)


if __name__ == "__main__":
    main()
