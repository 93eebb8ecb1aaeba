"""Measures the time of a step with another revision of the code, and with this one.

The two take turns in one run.

    python -m benchmarks.revisions REVISION [--cases single,1F1B] [--sizes 5ms,20ms]
        [--launches 5] [--write]
    python -m benchmarks.revisions REVISION --bytes [--cases ddp:2,fsdp:2] [--write]

REVISION is checked out into a folder of its own; `--path FOLDER` names one that is there. Both
sides train the same model on the same data. All their processes run at the same time, and all but
one side stand still: a block of steps each, in a new order every round (`benchmarks.gate`). A
side's figure of a round is divided by that of the other in the same round, and the median of these
ratios is quoted, with the middle half of them: what else the machine does falls on both. Calls of
functions in the training thread are counted, too, which no load changes.

With `--bytes` each side trains in a network namespace of its own (needs Linux, and root), and what
its kernel sends is counted: the bytes of 30 steps less those of 10, in twentieths.

Cases are `single`, a topology such as `fsdp:2`, or a schedule, which runs on a pipeline of two
ranks.
"""

import argparse
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.gate import CALLS, Gate
from benchmarks.overhead import REPOSITORY, Contestant, Found
from benchmarks.page import RESULTS, machine, page, tell

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
CASES = ("single", "ddp:2", "fsdp:2", *SCHEDULES)
# steps of the two runs whose bytes are counted
FEW = 10
MANY = 30
MICRO_BATCHES = 8
STEPS = 1_000_000


class Size(NamedTuple):
    """Of a model and its batches; `block`: steps of a turn."""

    width: int
    depth: int
    batch: int
    block: int


# On one rank of one core, a step takes about as long as the name says.
SIZES = {"5ms": Size(64, 8, 4, 40), "20ms": Size(192, 8, 8, 10), "100ms": Size(512, 8, 8, 4)}


# ---- a side: one process a rank ----


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of one table."""

    deterministic = True

    def __init__(self, width: int) -> None:
        self.x = torch.randn(1000, width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index % 1000], torch.tensor(index % 16)


def model_of(size: Size) -> nn.Sequential:
    """A chain that every strategy and schedule can cut."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )
        for _ in range(size.depth)
    ]
    return nn.Sequential(*blocks, nn.Linear(size.width, 16))


def settings_of(case: str) -> dict[str, Any]:
    """The keys of the config that say how a case runs."""
    from lockstep.strategy import parse_topology

    if case in SCHEDULES:
        return {
            "distributed.strategy": "pipeline",
            "distributed.pipeline.schedule": case,
            "distributed.pipeline.stages_per_rank": SCHEDULES[case],
        }
    return {f"distributed.{key}": value for key, value in parse_topology(case)[0].items()}


def train(case: str, size: Size, steps: int | None = None) -> None:
    """Train for so many steps; unset: for ever, until the gate ends it."""
    from lockstep.config import config_from
    from lockstep.trainer import Trainer

    config = config_from(
        {
            **settings_of(case),
            "training.batch_size": size.batch,
            "training.global_batch_size": size.batch * MICRO_BATCHES,
            "training.max_steps": steps or STEPS,
            "training.lr_schedule": "constant",
            "training.warmup_steps": 0,
            "precision.mode": "fp32",
        }
    )
    trainer = Trainer(model_of(size), loss_fn=nn.CrossEntropyLoss(), config=config)
    gate = None if steps else Gate(size.block)
    for _ in trainer.steps(Rows(size.width)):
        if gate is not None:
            gate()


# ---- the conductor ----


def side(root: Path, case: str, size: str) -> Contestant:
    """Start the ranks of one revision."""
    command = [sys.executable, __file__, "--train", case, size]
    return Contestant(f"{case} of {root}", command, 1 if case == "single" else 2, root=root)


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check a revision out into a folder of its own, for the length of the block."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "old")
        subprocess.run(
            ["git", "clone", "-q", "--shared", "--no-checkout", REPOSITORY, root], check=True
        )
        commit = subprocess.check_output(
            ["git", "rev-parse", revision], cwd=REPOSITORY, text=True
        ).strip()
        subprocess.run(["git", "checkout", "-q", commit], cwd=root, check=True)
        yield root


def compared(old: Path, case: str, size: str, launches: int, rounds: int) -> tuple[Found, Found]:
    """Return the figures of both sides, round by round; of several launches: where memory lies
    makes a difference.
    """
    found: dict[str, Found] = {"old": {}, "new": {}}
    for _ in range(launches):
        sides = {"old": side(old, case, size), "new": side(REPOSITORY, case, size)}
        try:
            for each in sides.values():
                each.wait()
            for each in sides.values():  # warm
                each.block()
            for _ in range(rounds):
                for name in random.sample(list(sides), 2):
                    for key, value in sides[name].block().items():
                        found[name].setdefault(key, []).append(value)
            for name, each in sides.items():
                found[name]["calls"] = [each.block(CALLS)["calls"]]
        finally:
            for each in sides.values():
                each.end()
    return found["old"], found["new"]


def bytes_sent(root: Path, case: str, size: str) -> int:
    """Return the bytes that two ranks of a revision send in a step, all headers included."""
    sent = []
    for steps in (FEW, MANY):
        train_so_long = [sys.executable, __file__, "--train", case, size, "--steps", str(steps)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*launch, "--no-python", *train_so_long]
        in_namespace = 'ip link set lo up && "$@" >&2 && grep lo: /proc/net/dev'
        ended = subprocess.run(
            ["unshare", "--net", "sh", "-c", in_namespace, "sh", *command],
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        sent.append(int(ended.stdout.split()[9]))
    return (sent[1] - sent[0]) // (MANY - FEW)


def report_bytes(old: Path, asked: Any) -> None:
    """Compare the bytes that are sent, and print the page."""
    lines = []
    for case in asked.cases.split(","):
        before, after = (bytes_sent(root, case, "20ms") for root in (old, REPOSITORY))
        lines.append(f"| {case} | {before:,} | {after:,} | {after / before:.3f} |")
        print(lines[-1], flush=True)
    text = page(
        "What a step sends, before and after",
        f"python -m benchmarks.revisions {asked.revision} --bytes --cases {asked.cases}",
        f"torch {torch.__version__}; Python {platform.python_version()}, {machine()}",
        [
            f"Bytes that two ranks send each other in a step of {MICRO_BATCHES} micro-batches, with"
            " TCP's headers and",
            "what goes to the store where they meet, as the kernel counted them.",
        ],
        "| case | old | new | × |",
        lines,
    )
    tell(text, RESULTS / "revision_bytes.md" if asked.write else None)


def row(case: str, size: str, old: Found, new: Found) -> str:
    """Return a case's line of the table."""
    ratios = {
        key: [a / b for a, b in zip(new[key], old[key], strict=True)] for key in ("seconds", "cpu")
    }
    low, middle, high = quantiles(ratios["seconds"], n=4)
    return (
        f"| {size} | {case} | {median(old['seconds']) * 1e3:.2f} | {middle:.3f}"
        f" ({low:.3f}–{high:.3f}) | {median(ratios['cpu']):.3f} | {old['calls'][0]:.0f} |"
        f" {new['calls'][0]:.0f} |"
    )


def main() -> None:
    """Compare the cases that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument(
        "--path", type=Path, help="a folder with the other revision, in place of a checkout"
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sizes", default="5ms,20ms")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20, help="of a launch")
    parser.add_argument("--bytes", action="store_true", help="count what is sent, in place of time")
    parser.add_argument("--train", nargs=2, metavar=("CASE", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.train:
        case, size = asked.train
        train(case, SIZES[size], asked.steps)
        return
    compare = report_bytes if asked.bytes else report
    if asked.path is not None:
        compare(asked.path.resolve(), asked)
    else:
        with checked_out(asked.revision) as old:
            compare(old, asked)


def report(old: Path, asked: Any) -> None:
    """Compare, and print the page."""
    lines = []
    for size in asked.sizes.split(","):
        for case in asked.cases.split(","):
            lines.append(row(case, size, *compared(old, case, size, asked.launches, asked.rounds)))
            print(lines[-1], flush=True)
    text = page(
        "A step before and after",
        f"python -m benchmarks.revisions {asked.revision} --cases {asked.cases} --sizes"
        f" {asked.sizes}",
        f"torch {torch.__version__}; Python {platform.python_version()}, {machine()}",
        [
            (
                f"Medians over {asked.launches} launches of {asked.rounds} rounds, blocks in turn;"
                " × is the median of the"
            ),
            (
                "rounds' ratios, new to old (the middle half of them). Calls are those of functions"
                " in the training"
            ),
            f"thread, a step of {MICRO_BATCHES} micro-batches.",
        ],
        "| size | case | ms a step, old | × time | × CPU | calls, old | calls, new |",
        lines,
    )
    tell(text, RESULTS / "revisions.md" if asked.write else None)


if __name__ == "__main__":
    main()
