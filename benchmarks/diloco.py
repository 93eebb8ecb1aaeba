"""How soon a loss is reached on a slow link: a reduction each step, a compressed one, and local updates (DiLoCo).

    python -m benchmarks.diloco --link 100mbit --steps 300 --round 30

Two hosts are network namespaces whose link `tc` shapes (needs root; `tests.hosts`). The contestants train the same
model on the same samples, in turn, a round of steps each, so that what else the machine does falls on all of them.
After each round its loss on text that was not trained on is taken, off the clock, and the bytes that the interface
counted.
`--link none` runs them in this process alone, workers in turn: the same losses of ddp and of local updates, to the bit,
without a link and without root.
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
from torch.utils.data import Subset

from benchmarks.curves import Curve, as_svg
from lockstep.config import config_from
from lockstep.data import Data, build_data
from lockstep.models import get_model
from lockstep.records import StepRecord
from lockstep.trainer import Trainer
from tests.hosts import INTERFACE, hosts
from tests.ranks import run_ranks

RESULTS = Path(__file__).parent / "results"
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
        """What `of` (seconds, steps, bytes) was when the loss was reached, between rounds by a straight line."""
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
    local = {
        "distributed.strategy": "diloco",
        "distributed.diloco.workers": RANKS,
        "distributed.diloco.inner_steps": args.round,
        "distributed.diloco.outer_learning_rate": args.outer_rate,
        "distributed.diloco.outer_momentum": args.outer_momentum,
    }
    int8 = {**local, "distributed.diloco.send_as": "int8"}
    compression = "distributed.ddp.compression"
    powersgd = {f"{compression}.kind": "powersgd", f"{compression}.rank": 4, f"{compression}.start_step": 2}
    every: dict[str, dict[str, Any]] = {
        "ddp": {},
        "ddp, fp16": {f"{compression}.kind": "fp16"},
        "ddp, PowerSGD of rank 4": powersgd,
        "diloco": local,
        "diloco, int8": int8,
        "diloco, int8, 3 fragments": {**int8, "distributed.diloco.fragments": 3},
        "local SGD": {**local, "distributed.diloco.outer_learning_rate": 1.0, "distributed.diloco.outer_momentum": 0.0},
    }
    if args.link == "none":  # one process sends nothing: compression has nothing to do there
        every = {name: settings for name, settings in every.items() if compression + ".kind" not in settings}
        every["ddp"] = {"distributed.strategy": "single"}
    return {name: settings for name, settings in every.items() if not args.only or name in args.only.split(";")}


def trainer_for(settings: dict[str, Any], args: argparse.Namespace, data: Data) -> Trainer:
    common = {
        "training.batch_size": args.batch,
        "training.global_batch_size": RANKS * args.batch,
        "training.max_steps": args.steps,
        "training.learning_rate": args.rate,
        "training.warmup_steps": max(1, args.steps // 10),
        "precision.mode": "fp32",
        "distributed.strategy": "ddp",
        "distributed.ddp.bucket_cap_mb": 1.0,
    }
    with torch.device("meta"):
        model = get_model("transformer")(
            n_layer=args.layers, n_embd=args.width, n_head=4, vocab_size=data.facts["vocab_size"], dropout=0.0
        )
    return Trainer(model, config=config_from({**common, **settings}))


def race(args: argparse.Namespace) -> dict[str, Course]:
    """All contestants, a round each in turn; on every rank."""
    torch.set_num_threads(1)
    section = config_from({"data.name": "python-docs", "data.args": {"block_size": 64}}).data
    data = build_data(section, seed=1)
    assert data.validation is not None
    every = max(1, len(data.validation) // args.samples)  # type: ignore[arg-type]
    held_out = Subset(data.validation, range(0, len(data.validation), every))  # type: ignore[arg-type]
    trainers = {name: trainer_for(settings, args, data) for name, settings in contestants(args).items()}
    running = {name: trainer.steps(data.train) for name, trainer in trainers.items()}
    courses = {name: Course(numbers=trainer.placed.num_parameters) for name, trainer in trainers.items()}
    for number in range(args.steps // args.round):
        names = list(trainers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            sent, seconds = one_round(running[name], args.round)
            loss = trainers[name].evaluate(held_out)
            courses[name].add(args.round, seconds, sent, loss)
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"{name}: step {courses[name].steps[-1]}, {seconds:.1f} s, loss {loss:.4f}", flush=True)
    return courses


def one_round(records: Iterator[StepRecord], steps: int) -> tuple[float, float]:
    """(bytes that this host sent, seconds)."""
    before, begin = settled(), time.perf_counter()
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
    lines = [
        "# Local updates on a slow link: time and bytes to a loss",
        "",
        f"`python -m benchmarks.diloco --link {args.link} --steps {args.steps} --round {args.round} "
        f"--layers {args.layers} --width {args.width} --batch {args.batch} --rate {args.rate:g} "
        f"--outer-rate {args.outer_rate:g} --outer-momentum {args.outer_momentum:g}`",
        "",
        f"A transformer of {first.numbers:,} parameters on Python's documentation, {RANKS} workers on {RANKS} hosts,",
        f"{RANKS * args.batch} × 64 bytes of it a step over all workers, AdamW, {args.steps} steps, a core a worker.",
        f"Workers of diloco exchange what they changed every {args.round} steps. All see the same samples as often.",
        "Losses are on text that was not trained on; bytes are those that a host's interface counted, with headers.",
        f"The loss to be reached is {WITHIN:g} × that at which synchronous training ends.",
        "",
        f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} "
        f"UTC, {seconds:.0f} s.",
        "",
        "| | loss at the end | of ddp's | seconds a step | MB a step | ddp's bytes over these | "
        f"seconds to {target:.3f} | ddp's over these |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, course in courses.items():
        took, of_first = course.reached(target, course.seconds), first.reached(target, first.seconds)
        lines.append(
            f"| {name} | {course.losses[-1]:.4f} | {course.losses[-1] / first.losses[-1]:.4f} | "
            f"{course.seconds[-1] / course.steps[-1]:.3f} | {course.sent[-1] / course.steps[-1] / 1e6:.4f} | "
            f"{_ratio(first.sent[-1], course.sent[-1])} | {'not reached' if took is None else f'{took:.1f}'} | "
            f"{_ratio(of_first, took)} |"
        )
    return "\n".join([*lines, "", "![loss over seconds](diloco.svg)", "", *_by_round(courses)])


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.1f}" if one and other else "–"


def _by_round(courses: dict[str, Course]) -> list[str]:
    names = list(courses)
    lines = ["## Losses after each round", "", f"| step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for place, step in enumerate(courses[names[0]].steps):
        lines.append(f"| {step} | " + " | ".join(f"{courses[name].losses[place]:.4f}" for name in names) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit", help="rate as `tc` writes it; none: one process, no link")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--round", type=int, default=30, help="steps between exchanges, and between evaluations")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=160, help="of the model")
    parser.add_argument("--batch", type=int, default=8, help="samples in a micro-batch; a worker runs one a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--outer-rate", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--samples", type=int, default=256, help="that a loss is taken on")
    parser.add_argument("--only", default="", help="names of contestants, with ; between")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for diloco.md and diloco.svg")
    args = parser.parse_args()
    begin = time.perf_counter()
    courses = measure(args)
    text = page(courses, args, time.perf_counter() - begin)
    args.output.mkdir(exist_ok=True, parents=True)
    (args.output / "diloco.md").write_text(text, encoding="utf-8")
    curves = [Curve(name, course.seconds, course.losses) for name, course in courses.items()]
    target = WITHIN * next(iter(courses.values())).losses[-1]
    svg = as_svg(curves, "seconds of training", f"loss on held-out text, link of {args.link}", target)
    (args.output / "diloco.svg").write_text(svg, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
