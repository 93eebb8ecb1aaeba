"""What logging costs: steps of 5 ms, logged every step to the default sinks, against the same steps
with sinks off.

On a terminal there is a bar, too, which is measured on a pseudo-terminal of 80 columns. All are
measured in one run: short blocks of steps, in turn with and without, in a random order, so that
what else the machine does falls on all alike. A step sleeps for 5 ms (its length does not depend on
the load of the machine) and its loss is a tensor, as in training. The cost is the difference of the
medians over blocks.

    python benchmarks/logging_overhead.py [--blocks 60] [--steps 40]
"""

import argparse
import os
import pty
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO

import torch

from lockstep.config import MonitorConfig
from lockstep.monitor import Figures, Monitor, PhaseClock
from lockstep.run_directory.records import RunDirectory, StepRecord

STEP_SECONDS = 0.005


def record(step: int) -> StepRecord:
    loss = torch.tensor(2.0) / step
    return StepRecord(
        step=step, loss=loss, grad_norm=loss * 2, lr=1e-3, samples=8, tokens=torch.tensor(512.0)
    )


def make(folder: Path, sinks: list[str]) -> tuple[Monitor, PhaseClock]:
    run = RunDirectory(folder)
    run.create()
    clock = PhaseClock()
    config = MonitorConfig.model_validate({"log_steps": 1, "sinks": sinks})
    return Monitor(config, run, is_main=True, total_steps=10**6, figures=Figures(clock)), clock


def block(
    monitor: Monitor, clock: PhaseClock, first: int, steps: int
) -> tuple[float, float, float]:
    """Seconds a step, of these what the monitor takes, and the CPU seconds of all threads."""
    inside = 0.0
    since = time.perf_counter()
    cpu = time.process_time()
    for step in range(first, first + steps):
        clock.enter("forward_backward")
        time.sleep(STEP_SECONDS)
        clock.enter("optimizer")
        made = record(step)
        clock.enter("other")
        before = time.perf_counter()
        monitor.on_step(made)
        inside += time.perf_counter() - before
    return (
        (time.perf_counter() - since) / steps,
        inside / steps,
        (time.process_time() - cpu) / steps,
    )


def terminal() -> TextIO:
    """A terminal that somebody reads."""
    primary, secondary = pty.openpty()
    subprocess.Popen(["cat"], stdin=primary, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ["TERM"] = "xterm"
    return open(secondary, "w", encoding="utf-8", buffering=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    default = ["console", "jsonl", "tensorboard"]
    kinds = {
        "sinks off": [],
        "console, jsonl, tensorboard": default,
        "the same on a terminal": default,
    }
    off, on, bar = kinds
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    streams: dict[str, TextIO] = {off: nowhere, on: nowhere, bar: terminal()}
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
    monitors = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, sinks) in enumerate(kinds.items()):
            with redirect_stdout(streams[name]):
                monitors[name] = make(Path(folder, str(number)), sinks)
                block(*monitors[name], 1, 5)  # the first record loads and opens what it needs
                streams[name] = sys.stdout  # type: ignore[assignment]  # a bar puts its own stream there
        for number in range(given.blocks):
            for name in random.sample(list(monitors), len(monitors)):
                with redirect_stdout(streams[name]):
                    results[name].append(
                        block(*monitors[name], 10 + number * given.steps, given.steps)
                    )
        for monitor, _ in monitors.values():
            monitor.close()
    clock, within, cpu = (
        {
            name: statistics.median(value[place] for value in values)
            for name, values in results.items()
        }
        for place in range(3)
    )
    print(
        f"blocks {given.blocks} × {given.steps} steps of {STEP_SECONDS * 1000:g} ms, each step"
        " logged"
    )
    worst = 0.0
    for name in kinds:
        cost = within[name] - within[off]
        work = cpu[name] - cpu[off]
        worst = max(worst, (cost - (within[on] - within[off] if name == bar else 0)) / STEP_SECONDS)
        print(
            f"{name:<30} {clock[name] * 1e3:.3f} ms a step ({clock[name] / clock[off] - 1:+.2%}),"
            f" of which in the monitor {within[name] * 1e6:.0f} µs ({cost / STEP_SECONDS:.2%} of a"
            f" step more than without); CPU of all threads {cpu[name] * 1e6:.0f} µs"
            f" ({work / STEP_SECONDS:.2%})"
        )
    print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    sys.exit(0 if worst < 0.02 else 1)  # of logging, and of the bar beside it


if __name__ == "__main__":
    main()
