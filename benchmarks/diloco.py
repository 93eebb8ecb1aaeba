"""How soon a loss is reached on a slow link: a reduction each step, a compressed one, and local
updates (DiLoCo).

    python -m benchmarks.diloco --link 100mbit

Two hosts are network namespaces whose link `tc` shapes (needs root; `tests.hosts`). The contestants
train the same model on the same samples, in turn, a round of steps each, so that what else the
machine does falls on all of them. After each round its loss on text that was not trained on is
taken, off the clock, and the bytes that the interface counted. Synchronous training and local
updates have a learning rate each, both the best of the same grid; the page keeps the grid, and all
else that was tried, below the line `## What was tried`, which is written by hand. `--link none`
runs them in this process alone, workers in turn: the same losses of ddp and of local updates, to
the bit, without a link and without root.
"""

import argparse
import datetime
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.curves import Curve, as_svg
from lockstep.config import config_from
from lockstep.data import Data, build_data
from lockstep.models import get_model
from lockstep.run_directory.records import StepRecord
from lockstep.trainer import Trainer
from tests.hosts import INTERFACE, hosts
from tests.ranks import run_ranks

RESULTS = Path(__file__).parent / "results"
BY_HAND = "## What was tried"  # from here on a page is kept as it is
RANKS = 2
WITHIN = 1.01  # of synchronous training's last loss: the loss that is to be reached


@dataclass
class Course:
    """One contestant's way: at the end of each round, what was measured up to there.

    Attributes:
        steps: made.
        seconds: of training.
        sent: bytes that a host has put on its link.
        losses: on text that was not trained on.
        numbers: parameters of the model.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    numbers: int = 0

    def add(self, steps: int, seconds: float, sent: float, loss: float) -> None:
        for values, more in ((self.steps, steps), (self.seconds, seconds), (self.sent, sent)):
            values.append((values[-1] if values else 0) + more)  # type: ignore[attr-defined]
        self.losses.append(loss)

    def reached(self, loss: float, of: list[float]) -> float | None:
        """What `of` (seconds, steps, bytes) was when the loss was reached, between rounds by a
        straight line.
        """
        for place, now in enumerate(self.losses):
            if now <= loss:
                if place == 0:
                    return of[0]
                before = self.losses[place - 1]
                share = (before - loss) / (before - now)
                return of[place - 1] + share * (of[place] - of[place - 1])
        return None


def contestants(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name → settings."""

    def local(
        every: int, send_as: str, outer: tuple[float, float] = (1.0, 0.0), fragments: int = 1
    ) -> dict[str, Any]:
        options = {
            "workers": RANKS,
            "inner_steps": every,
            "send_as": send_as,
            "fragments": fragments,
        }
        options |= {"outer_learning_rate": outer[0], "outer_momentum": outer[1]}
        chosen = {f"distributed.diloco.{key}": value for key, value in options.items()}
        return {
            "distributed.strategy": "diloco",
            "training.learning_rate": args.local_rate,
            **chosen,
        }

    compression = "distributed.ddp.compression"
    longer = args.int8_steps
    shorter = args.int4_steps
    powersgd = {
        f"{compression}.kind": "powersgd",
        f"{compression}.rank": 4,
        f"{compression}.start_step": 2,
    }
    outer = (args.outer_rate, args.outer_momentum)
    every: dict[str, dict[str, Any]] = {
        "ddp": {},
        "ddp, fp16": {f"{compression}.kind": "fp16"},
        "ddp, PowerSGD of rank 4": powersgd,
        f"diloco {outer[0]:g}, {outer[1]:g}, int8, every {longer}": local(longer, "int8", outer),
        f"local SGD, int8, every {longer}": local(longer, "int8"),
        f"local SGD, int4, every {shorter}": local(shorter, "int4"),
        f"local SGD, int4, every {shorter}, 2 fragments": local(shorter, "int4", fragments=2),
    }
    if args.link == "none":  # one process sends nothing: compression has nothing to do there
        every = {
            name: settings
            for name, settings in every.items()
            if compression + ".kind" not in settings
        }
        every["ddp"] = {"distributed.strategy": "single"}
    return {
        name: settings
        for name, settings in every.items()
        if not args.only or name in args.only.split(";")
    }


def trainer_for(settings: dict[str, Any], args: argparse.Namespace, data: Data) -> Trainer:
    common = {
        "training.batch_size": args.batch,
        "training.global_batch_size": RANKS * args.batch,
        "training.max_steps": args.steps,
        "training.learning_rate": args.rate,
        "training.warmup_steps": max(1, args.steps // 10),
        "training.lr_schedule": "cosine",
        "training.min_lr_ratio": 0.0,
        "training.seed": args.seed,
        "precision.mode": "fp32",
        "distributed.strategy": "ddp",
        "distributed.ddp.bucket_cap_mb": 1.0,
    }
    with torch.device("meta"):
        model = get_model("transformer")(
            n_layer=args.layers,
            n_embd=args.width,
            n_head=4,
            vocab_size=data.facts["vocab_size"],
            dropout=0.0,
        )
    return Trainer(model, config=config_from({**common, **settings}))


def race(args: argparse.Namespace) -> dict[str, Course]:
    """All contestants, a round each in turn; on every rank."""
    torch.set_num_threads(1)
    section = config_from({"data.name": "python-docs", "data.args": {"block_size": 64}}).data
    data = build_data(section, seed=1)
    assert data.validation is not None
    trainers = {
        name: trainer_for(settings, args, data) for name, settings in contestants(args).items()
    }
    running = {name: trainer.steps(data.train) for name, trainer in trainers.items()}
    courses = {
        name: Course(numbers=trainer.placed.num_parameters) for name, trainer in trainers.items()
    }
    for number in range(args.steps // args.round):
        names = list(trainers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            sent, seconds = one_round(running[name], args.round)
            loss = trainers[name].evaluate(data.validation)
            courses[name].add(args.round, seconds, sent, loss)
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(
                    f"{name}: step {courses[name].steps[-1]}, {seconds:.1f} s, loss {loss:.4f}",
                    flush=True,
                )
    return courses


def one_round(records: Iterator[StepRecord], steps: int) -> tuple[float, float]:
    """(bytes that this host sent, seconds)."""
    before = settled()
    begin = time.perf_counter()
    for _ in range(steps):
        next(records)
    if dist.is_initialized():
        dist.barrier()
    seconds = time.perf_counter() - begin
    return settled() - before, seconds


def settled() -> float:
    """Bytes that this host has sent, once nothing is on its way."""
    if not dist.is_initialized():
        return 0.0
    dist.barrier()
    time.sleep(0.3)
    dist.barrier()
    return float(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def measure(args: argparse.Namespace) -> dict[str, Course]:
    here = import_module("benchmarks.diloco")  # as other processes find it: this one is __main__
    if args.link == "none":
        return here.race(args)  # type: ignore[no-any-return]
    with hosts(RANKS, rate=args.link) as on:
        found: dict[str, Course] = run_ranks(here.race, RANKS, args, on=on, timeout=7200)[0]
    return found


def page(courses: dict[str, Course], args: argparse.Namespace, seconds: float) -> str:
    first = next(iter(courses.values()))
    target = WITHIN * first.losses[-1]
    given = (
        "link",
        "steps",
        "round",
        "layers",
        "width",
        "batch",
        "rate",
        "local_rate",
        "int8_steps",
        "int4_steps",
        "outer_rate",
        "outer_momentum",
        "seed",
    )
    command = " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in given)
    lines = [
        "# Local updates on a slow link: time and bytes to a loss",
        "",
        f"`python -m benchmarks.diloco {command}`",
        "",
        (
            f"A transformer of {first.numbers:,} parameters on Python's documentation, {RANKS}"
            f" workers on {RANKS} hosts,"
        ),
        (
            f"{RANKS * args.batch} × 64 bytes of it a step over all workers, AdamW, {args.steps}"
            " steps, a core a worker."
        ),
        (
            "All see the same samples as often. The learning rate warms up over a tenth of the"
            " steps and falls to zero"
        ),
        (
            f"along a half-cosine; its peak is {args.rate:g} for ddp and {args.local_rate:g} for"
            " local updates, chosen"
        ),
        (
            "as the tables at the end say. Workers exchange what they changed every so many steps"
            " as a row says; local SGD"
        ),
        "is diloco with an outer learning rate of 1 and no momentum.",
        (
            "Losses are on the tenth of the text that was not trained on; bytes are those that a"
            " host's interface counted,"
        ),
        (
            f"with headers. The loss to be reached is {WITHIN:g} × that at which synchronous"
            " training ends."
        ),
        "",
        (
            f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f},"
            f" {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {seconds:.0f} s."
        ),
        "",
        (
            "| | loss at the end | of ddp's | seconds a step | MB a step | ddp's bytes over these"
            f" | seconds to {target:.3f} | ddp's over these |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, course in courses.items():
        took = course.reached(target, course.seconds)
        of_first = first.reached(target, first.seconds)
        lines.append(
            f"| {name} | {course.losses[-1]:.4f} | {course.losses[-1] / first.losses[-1]:.4f} |"
            f" {course.seconds[-1] / course.steps[-1]:.3f} |"
            f" {course.sent[-1] / course.steps[-1] / 1e6:.4f} |"
            f" {_ratio(first.sent[-1], course.sent[-1])} |"
            f" {'not reached' if took is None else f'{took:.1f}'} | {_ratio(of_first, took)} |"
        )
    return "\n".join([*lines, "", "![loss over seconds](diloco.svg)", "", *_by_round(courses)])


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.1f}" if one and other else "–"


def _by_round(courses: dict[str, Course]) -> list[str]:
    names = list(courses)
    lines = [
        "## Losses after each round",
        "",
        f"| step | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for place, step in enumerate(courses[names[0]].steps):
        lines.append(
            f"| {step} | "
            + " | ".join(f"{courses[name].losses[place]:.4f}" for name in names)
            + " |"
        )
    return [*lines, ""]


def by_hand(path: Path) -> str:
    """The part of a page that is not the program's."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    return "\n" + before[before.index(BY_HAND) :] if BY_HAND in before else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link", default="100mbit", help="rate as `tc` writes it; none: one process, no link"
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument(
        "--round",
        type=int,
        default=100,
        help="steps between evaluations; exchanges should divide it",
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument(
        "--batch", type=int, default=32, help="samples in a micro-batch; a worker runs one a step"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of ddp")
    parser.add_argument(
        "--local-rate", type=float, default=4.2e-3, help="peak learning rate of local updates"
    )
    parser.add_argument(
        "--int8-steps", type=int, default=50, help="steps between exchanges of int8"
    )
    parser.add_argument(
        "--int4-steps", type=int, default=20, help="steps between exchanges of int4"
    )
    parser.add_argument(
        "--outer-rate", type=float, default=0.7, help="of the contestant with an outer momentum"
    )
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--only", default="", help="names of contestants, with ; between")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder for diloco.md and diloco.svg"
    )
    args = parser.parse_args()
    begin = time.perf_counter()
    courses = measure(args)
    text = page(courses, args, time.perf_counter() - begin)
    args.output.mkdir(exist_ok=True, parents=True)
    (args.output / "diloco.md").write_text(
        text + by_hand(args.output / "diloco.md"), encoding="utf-8"
    )
    curves = [Curve(name, course.seconds, course.losses) for name, course in courses.items()]
    target = WITHIN * next(iter(courses.values())).losses[-1]
    svg = as_svg(
        curves, "seconds of training", f"loss on held-out text, link of {args.link}", target
    )
    (args.output / "diloco.svg").write_text(svg, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
