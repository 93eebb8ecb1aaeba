"""Measures the time and memory of `lockstep report` and `lockstep top` for a long run.

They are given by the number of its steps.

The run is written as training writes it on one rank of a CPU: each step is logged, about one in ten
with the times of phases and the memory, which are gathered once a second. The memory is the peak
that the system saw of the process.

    python benchmarks/report_size.py [--steps 10000,1000000]
        [--output benchmarks/results/report_size.md]
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.page import machine, page, tell

MOST = 300  # MiB that a report may take, however long the run was


def write_run(folder: Path, steps: int) -> Path:
    """A run directory with so many steps, an evaluation and a save every thousand."""
    run = folder / f"run-{steps}"
    noise = random.Random(0)
    run.mkdir()
    (run / "config.yaml").write_text("training: {max_steps: 1}\n")
    spread = [0.004, 0.004, 0.0041, 0]
    phases = {"data": spread, "forward_backward": spread, "optimizer": spread, "other": spread}
    memory = {"host": [4e8, 4e8, 4e8, 0], "total": [8e9, 8e9, 8e9, 0]}
    with (run / "metrics.jsonl").open("w") as metrics, (run / "events.jsonl").open("w") as events:
        events.write(
            json.dumps({"kind": "start", "time": 1e9, "layout": "single", "total_steps": steps})
            + "\n"
        )
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "loss": 1.5 + 3 * math.exp(-step / steps * 5) + noise.gauss(0, 0.05),
                "grad_norm": 0.6 + noise.random(),
                "lr": 1e-3 * (1 - step / steps),
                "samples": 64,
                "tokens": 16384,
                "epoch": 0,
                "clipped": 0.0,
                "skipped": False,
                "step_seconds": 0.1 + noise.random() * 0.01,
                "samples_per_second": 640.0,
                "tokens_per_second": 163840.0,
                "memory_bytes": 400_000_000,
                "time": 1e9 + step * 0.1,
                "skipped_steps": 0,
            }
            if step % 10 == 0:
                row |= {
                    "phases": phases,
                    "memory": memory,
                    "own_seconds": [0.1],
                    "gradient_norms": {"a": 0.1, "b": 1},
                }
            metrics.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                metrics.write(
                    json.dumps({"step": step, "time": 1e9 + step * 0.1, "eval_loss": 2.0}) + "\n"
                )
                events.write(
                    json.dumps({"kind": "save", "time": 1e9 + step * 0.1, "step": step}) + "\n"
                )
        events.write(
            json.dumps({"kind": "stop", "time": 1e9 + steps * 0.1, "reason": "done"}) + "\n"
        )
    return run


_MEASURED = """
import json, resource, sys, time
from lockstep import cli

code = cli.main(sys.argv[2:])
taken = {"code": code, "seconds": time.process_time()}
taken["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
open(sys.argv[1], "w").write(json.dumps(taken))
"""


def measure(*arguments: str) -> tuple[float, float]:
    """Seconds of a core (with the start of Python) and MiB of one command."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "taken.json")
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", _MEASURED, str(out), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        taken = json.loads(out.read_text())
    assert taken["code"] == 0, arguments
    return taken["seconds"], taken["mib"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", default="10000,100000,1000000")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    most = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for steps in map(int, given.steps.split(",")):
            run = write_run(Path(folder), steps)
            size = (run / "metrics.jsonl").stat().st_size / 2**20
            seconds, mib = measure("report", str(run))
            top_seconds, top_mib = measure("top", "--once", str(run))
            page_size = (run / "report.html").stat().st_size / 2**10
            most = max(most, mib, top_mib)
            taken = (
                f"{seconds:.2f} | {mib:.0f} | {page_size:.0f} | {top_seconds:.2f} | {top_mib:.0f}"
            )
            rows.append(f"| {steps:,} | {size:,.0f} | {taken} |")
            print(rows[-1], flush=True)
    where = f"{machine()}, Python {sys.version.split()[0]}"
    words = [
        (
            f"Each step is logged. A report may take {MOST} MiB, however long the run was: the most"
            f" was {most:.0f}."
        ),
        (
            "It reads metrics.jsonl as a stream and keeps so many rows as fit into 12 MiB of lines,"
            " with the peaks."
        ),
    ]
    header = (
        "| steps | metrics.jsonl, MiB | report, s of a core | report, MiB | page, KiB | top, s of a"
        " core | top, MiB |"
    )
    tell(
        page(
            "What the report of a long run takes",
            "python -m benchmarks.report_size",
            where,
            words,
            header,
            rows,
        ),
        given.output,
    )
    if most > MOST:
        sys.exit(f"more than {MOST} MiB")


if __name__ == "__main__":
    main()
