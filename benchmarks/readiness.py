"""Measures what it costs to be ready for a rank's death: a step with and without it.

    python -m benchmarks.readiness [--size 50ms] [--launches 2] [--rounds 6] [--write]

Two ranks train the same model in each of these ways, and take turns, a block of steps each
(`benchmarks.gate`):

    off        `distributed.on_failure: restart`, no copies in memory
    watching   `continue`: a thread of each rank looks for the launcher's word; no copies
    every K    the same, with a copy in memory after each K steps

A round's figure is divided by that of `off` in the same round, and the median of these ratios is
quoted. Seconds of a core are those of all threads of the rank that took most: on a machine whose
cores all compute, what a thread writes in the background is taken from the step. Bytes are exact:
those of a copy in memory, beside what `lockstep plan` counts for it.

A copy by itself is measured, too, with `--alone` nothing else: one rank, which holds all of the
run, makes some after another. Its processor time hardly depends on what else the machine does.
"""

import argparse
import itertools
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.contestants import RATE, SIZES, Net, Rows, settings_of
from benchmarks.gate import Gate
from benchmarks.overhead import Contestant, Found
from benchmarks.page import RESULTS, machine, page, tell
from lockstep.heartbeat.files import FOLDER
from lockstep.live.ranks import LiveRanks
from lockstep.machine.environment import MEMORY, WORLD
from lockstep.machine.scratch import SHARED_MEMORY, remove, scratch_folder

RANKS = 2
BLOCK = 20  # steps of a turn; each number of steps between copies divides it
# Steps before the first turn: a copy begins some steps before a turn ends, and is written in it.
FIRST = 15
NEVER = 10**9
# name → steps between two copies; None: not ready
WAYS: dict[str, int | None] = {"off": None, "watching": NEVER, "every 20": 20, "every 10": 10}
ALLOWED = 0.02 * 0.05  # seconds of a core a step: 2 % of 50 ms
BYTES_OF_A_PARAMETER = 4 + 8  # and of the state that AdamW keeps of it


# ---- one rank ----


def train(size: str, every: int | None, run: Path) -> int:
    """Train for ever; the gate ends it."""
    from lockstep.config import config_from
    from lockstep.trainer import Trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net(SIZES[size])
    gate = Gate(BLOCK)
    passes = itertools.count()
    model.register_forward_pre_hook(lambda *_: gate() if next(passes) >= FIRST else None)
    copies = {} if every is None else {"checkpoint.memory_steps": every}
    config = config_from({**settings_of(SIZES[size]), **copies})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    Trainer(model, optimizer, config=config, output_dir=run).train(Rows(SIZES[size].width))
    return 0


def on_rank(size: str, every: int | None, run: Path) -> None:
    """Train, in the way in which `lockstep train` starts its ranks."""
    if every is None:
        train(size, every, run)
        return
    from lockstep.live.survivor import through_deaths

    through_deaths(lambda: train(size, every, run), Path(os.environ[WORLD]))


def copy_alone(size: str, copies: int = 20) -> float:
    """Return the seconds of a core that a copy takes of one rank, which writes all of it."""
    from lockstep.checkpoint import MemoryStorage, MemoryWriter, Snapshot, optimizer_state

    torch.set_num_threads(1)
    model = Net(SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    memory = scratch_folder("memory", SHARED_MEMORY)
    writer = MemoryWriter(MemoryStorage(memory))
    seconds = []
    try:
        for step in range(1, copies + 3):
            before = time.process_time()
            state, groups = optimizer_state(optimizer, names)
            run = Snapshot(dict(model.state_dict()), {"main": state}, groups={"main": groups})
            writer.write(step, run, config_yaml="")
            writer.commit(step)
            seconds.append(time.process_time() - before)
    finally:
        remove(memory)
    return median(seconds[2:])  # the first two make the files


# ---- the conductor ----


@contextmanager
def started(way: str, size: str, folder: Path) -> Iterator[tuple[Contestant, Path]]:
    """Start the ranks of a way; yield them, and the folder of their copies in memory."""
    every = WAYS[way]
    beats = folder / "beats"
    beats.mkdir(parents=True)
    memory = scratch_folder("memory", SHARED_MEMORY)
    environment = {FOLDER: str(beats), MEMORY: str(memory), WORLD: str(folder / "world.json")}
    if every is not None:
        live = LiveRanks(folder / "world.json", beats, folder, lambda *_: True, print)
        live.begin(RANKS)
    command = [sys.executable, "-m", "benchmarks.readiness", "--train", way, str(folder / "run")]
    ranks = Contestant(way, [*command, "--size", size], RANKS, environment)
    try:
        yield ranks, memory
    finally:
        ranks.end()
        remove(memory)


def bytes_of_a_copy(memory: Path) -> int:
    """Return the bytes of the complete copy that lies in the folder."""
    newest = max(path for path in memory.rglob("step-*") if (path / "manifest.json").exists())
    return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())


def launched(size: str, rounds: int) -> tuple[dict[str, Found], int]:
    """Return each way's figures, round by round, and the bytes of a copy."""
    found: dict[str, Found] = {way: {} for way in WAYS}
    with tempfile.TemporaryDirectory() as root:
        contexts = {way: started(way, size, Path(root, way.replace(" ", "-"))) for way in WAYS}
        running = {way: context.__enter__() for way, context in contexts.items()}
        try:
            for ranks, _ in running.values():
                ranks.wait()
            for ranks, _ in running.values():  # warm
                ranks.block()
                ranks.block()
            for _ in range(rounds):
                for way in random.sample(list(WAYS), len(WAYS)):
                    for key, value in running[way][0].block().items():
                        found[way].setdefault(key, []).append(value)
            size_of_copy = bytes_of_a_copy(running["every 20"][1])
        finally:
            for context in contexts.values():
                context.__exit__(None, None, None)
    return found, size_of_copy


def rows(found: dict[str, Found]) -> list[str]:
    """Return the lines of the table."""
    base = found["off"]
    lines = []
    for way, of in found.items():
        ratios = {key: median(a / b for a, b in zip(of[key], base[key], strict=True)) for key in of}
        more = median(a - b for a, b in zip(of["cpu"], base["cpu"], strict=True))
        every = WAYS[way]
        per_copy = more * every if every is not None and every != NEVER else None
        shown = "" if per_copy is None else f"{per_copy * 1e3:.0f}"
        lines.append(
            f"| {way} | {median(of['seconds']) * 1e3:.1f} | {ratios['seconds']:.3f} |"
            f" {median(of['cpu']) * 1e3:.1f} | {ratios['cpu']:.3f} | {shown} |"
        )
    return lines


def steps_between_copies(found: dict[str, Found]) -> int:
    """Return the least number of steps between two copies that costs what is allowed."""
    both = zip(found["every 10"]["cpu"], found["off"]["cpu"], strict=True)
    of_a_copy = 10 * median(ready - off for ready, off in both)
    return max(1, math.ceil(of_a_copy / ALLOWED))


def main() -> None:
    """Measure, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="50ms", choices=SIZES)
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="of a launch")
    parser.add_argument("--alone", action="store_true", help="a copy by itself, nothing else")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--train", nargs=2, metavar=("WAY", "RUN"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        on_rank(asked.size, WAYS[asked.train[0]], Path(asked.train[1]))
        return
    alone = copy_alone(asked.size)
    print(f"a copy by itself: {alone * 1e3:.1f} ms of a core", flush=True)
    if asked.alone:
        return
    found: dict[str, Found] = {way: {} for way in WAYS}
    size_of_copy = 0
    for _ in range(asked.launches):
        figures, size_of_copy = launched(asked.size, asked.rounds)
        for way, of in figures.items():
            for key, values in of.items():
                found[way].setdefault(key, []).extend(values)
    counted = BYTES_OF_A_PARAMETER * sum(p.numel() for p in Net(SIZES[asked.size]).parameters())
    text = page(
        "The cost of being ready for a rank's death",
        f"python -m benchmarks.readiness --size {asked.size} --launches {asked.launches} --rounds"
        f" {asked.rounds} --write",
        machine(),
        [
            f"A step of two ranks, blocks of {BLOCK} in turn; × is the median of the rounds' ratios"
            " to `off`.",
        ],
        "| ready by | ms a step | × time | ms of a core a step | × CPU | ms of a core a copy |",
        rows(found),
        [
            f"A copy has {size_of_copy:,} bytes; `lockstep plan` counts {counted:,}"
            f" ({BYTES_OF_A_PARAMETER} a parameter),",
            "and two of them at most lie in shared memory. By the last row, copies take 2 % of a"
            " step of 50 ms",
            f"from every {steps_between_copies(found)} steps on, where no core is idle. A copy by"
            " itself, on one rank that",
            f"writes all of it, takes {alone * 1e3:.1f} ms of a core (two ranks write half of it"
            " each).",
        ],
    )
    tell(text, RESULTS / "readiness.md" if asked.write else None)


if __name__ == "__main__":
    main()
