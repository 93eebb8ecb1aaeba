"""Measures what a step costs besides the model's own work.

It compares Lockstep, the loop that one writes by hand, and Lockstep's peers.

    python -m benchmarks.overhead [--ranks 1,2] [--sizes 1ms,5ms,linears50] [--launches 5]
        [--instructions] [--write]

The contestants (`benchmarks.contestants`; with data and layers of a user's own,
`benchmarks.own_layers`) run side by side in one tree of processes and take turns,
a block of steps each, in a new order every round; all but one stand still. A contestant's figure of
a round is divided by that of the hand-written loop in the same round, and the median of these
ratios is quoted, with the middle half of them. Besides the clock, calls of functions in the
training thread are counted, which no load of the machine changes; `--instructions` counts those of
the processor too, under valgrind (minutes).

Peers are those that can be imported: `pip install lightning accelerate transformers deepspeed`,
best into an environment of their own; an absent one is named as such.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.contestants import CONTESTANTS, EVERY, SIZES
from benchmarks.gate import BLOCK, CALLS, DUMPS, END, GO, INSTRUCTIONS, READ, WRITE, under_callgrind
from benchmarks.own_layers import CASES
from benchmarks.own_layers import CONTESTANTS as WITH_OWN_LAYERS
from benchmarks.page import RESULTS, machine, page, tell

REPOSITORY = Path(__file__).parent.parent
BASE = "hand-written"
PACKAGES = {
    "fabric": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning",
    "deepspeed": "deepspeed",
}
NOTHING: Mapping[str, str] = {}
Found = dict[str, list[float]]  # seconds, cpu, calls, instructions → of each round, a step


class Contestant:
    """One, on all of its ranks.

    Args:
        name: in messages.
        command: starts a rank, which waits at its gate before each block of steps.
        environment: what it is told besides.
        root: the folder whose packages it imports.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        ranks: int,
        environment: Mapping[str, str] = NOTHING,
        root: Path = REPOSITORY,
    ) -> None:
        self.name = name
        self._ranks = []
        port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        for rank in range(ranks):
            theirs, mine = os.pipe()
            told, tell = os.pipe()
            own = {
                **environment,
                **_environment(root, rank, ranks, port),
                READ: str(theirs),
                WRITE: str(tell),
            }
            process = subprocess.Popen(
                command,
                env={**os.environ, **own},
                stdout=self._log,
                stderr=self._log,
                cwd=root,
                pass_fds=(theirs, tell),
            )
            os.close(theirs)
            os.close(tell)
            self._ranks.append((process, mine, os.fdopen(told)))

    def wait(self) -> dict[str, float]:
        """What the block that ended took: of the slowest rank."""
        lines = [told.readline() for _, _, told in self._ranks]
        if not all(lines):
            self._log.seek(0)
            raise SystemExit(
                f"{self.name} ended:\n{self._log.read().decode(errors='replace')[-3000:]}"
            )
        found = [json.loads(line) for line in lines]
        return {key: max(of[key] for of in found) for key in found[0]}

    def block(self, word: str = GO) -> dict[str, float]:
        """Let it take a block of steps."""
        for _, mine, _ in self._ranks:
            os.write(mine, word.encode())
        return self.wait()

    def end(self) -> None:
        """End its processes."""
        for process, mine, _ in self._ranks:
            if process.poll() is None:
                os.write(mine, END.encode())
        for process, mine, told in self._ranks:
            process.wait(30)
            os.close(mine)
            told.close()


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _command(name: str, size: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.contestants", name, size]


def _environment(root: Path, rank: int, ranks: int, port: str) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(root)}
    if ranks == 1:
        return fixed
    return {
        **fixed,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "TORCHELASTIC_RUN_ID": "overhead",
    }


def present(names: list[str]) -> list[str]:
    """Those whose package is installed."""
    return [
        name
        for name in names
        if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None
    ]


def timed(names: list[str], size: str, ranks: int, launches: int) -> dict[str, Found]:
    """Rounds of blocks, all contestants in turn; of several launches, for where memory lies makes a
    difference.
    """
    found: dict[str, Found] = {name: {} for name in names}
    per_launch = CASES[size].rounds if size in CASES else SIZES[size].rounds
    rounds = max(3, per_launch // ranks**2)  # over a link a step takes longer
    for _ in range(launches):
        for name, of in launched(names, size, ranks, rounds).items():
            for key, values in of.items():
                found[name].setdefault(key, []).extend(values)
    return found


def launched(names: list[str], size: str, ranks: int, rounds: int) -> dict[str, Found]:
    running = {name: Contestant(name, _command(name, size), ranks) for name in names}
    found: dict[str, Found] = {name: {} for name in names}
    try:
        for contestant in running.values():
            contestant.wait()
        for contestant in running.values():  # warm
            contestant.block()
        for _ in range(rounds):
            for name in random.sample(names, len(names)):
                for key, value in running[name].block().items():
                    found[name].setdefault(key, []).append(value)
        for name, contestant in running.items():
            found[name]["calls"] = [contestant.block(CALLS)["calls"]]
    finally:
        for contestant in running.values():
            contestant.end()
    return found


def counted(name: str, size: str, ranks: int) -> float:
    """Instructions of a step, of the rank that needs most.

    They are those of steps 41 to 60: Lockstep looks for side effects of a model in its first ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {DUMPS: folder, BLOCK: str(2 * EVERY)}
        contestant = Contestant(
            name, [*under_callgrind(folder), *_command(name, size)], ranks, environment
        )
        try:
            contestant.wait()
            for _ in range(2):
                contestant.block()
            return contestant.block(INSTRUCTIONS)["instructions"]
        finally:
            contestant.end()


def rows(found: dict[str, Found], size: str, ranks: int) -> list[str]:
    base = found[BASE]
    lines = []
    for name, of in found.items():
        ratios = {key: _ratios(of[key], base[key]) for key in of}
        low, _, high = quantiles(ratios["seconds"], n=4)
        more = of["instructions"][0] / 1e6 if "instructions" in of else None
        lines.append(
            f"| {size} | {ranks} | {name} | {median(of['seconds']) * 1e3:.3f} |"
            f" {median(ratios['seconds']):.3f} ({low:.3f}–{high:.3f}) | {median(ratios['cpu']):.3f}"
            f" | {of['calls'][0]:.0f} | "
            + (f"{more:.3f} | {ratios['instructions'][0]:.3f} |" if more is not None else "| |")
        )
    return lines


def _ratios(mine: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--sizes", default=",".join([*SIZES, *CASES]))
    parser.add_argument(
        "--only", default=",".join(CONTESTANTS), help=f"contestants, {BASE} among them"
    )
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument(
        "--instructions", action="store_true", help="count those too, under valgrind"
    )
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.instructions and shutil.which("valgrind") is None:
        raise SystemExit("--instructions needs valgrind and gcc")
    names = present(asked.only.split(","))
    lines = []
    for ranks in map(int, asked.ranks.split(",")):
        for size in asked.sizes.split(","):
            if size in CASES and ranks > 1:
                continue  # what they measure is the same on each rank
            taking_part = [name for name in names if size in SIZES or name in WITH_OWN_LAYERS]
            found = timed(taking_part, size, ranks, asked.launches)
            if asked.instructions:
                for name in taking_part:
                    found[name]["instructions"] = [counted(name, size, ranks)]
            lines += rows(found, size, ranks)
            print("\n".join(rows(found, size, ranks)), flush=True)
    text = text_of(lines, asked, [name for name in asked.only.split(",") if name not in names])
    tell(text, RESULTS / "overhead.md" if asked.write else None)


def text_of(lines: list[str], asked: Any, absent: list[str]) -> str:
    versions = [
        f"{p} {importlib.metadata.version(p)}"
        for p in sorted({"torch", *PACKAGES.values()})
        if _has(p)
    ]
    flags = (
        f"--ranks {asked.ranks} --sizes {asked.sizes} --launches {asked.launches}"
        + " --instructions" * asked.instructions
    )
    return page(
        "What a step costs besides the model's own work",
        f"python -m benchmarks.overhead {flags} --write",
        f"{', '.join(versions)}; Python {platform.python_version()}, {machine()}"
        + (f"; absent: {', '.join(absent)}" if absent else ""),
        [
            (
                f"Medians over the rounds of {asked.launches} launches, blocks in turn; × is the"
                " median of the rounds'"
            ),
            (
                "ratios to the hand-written loop (the middle half of them). Calls are those of"
                " functions in the training"
            ),
            "thread, a step.",
        ],
        "| size | ranks | contestant | ms a step | × time | × CPU | calls | M instructions | × |",
        lines,
    )


def _has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
