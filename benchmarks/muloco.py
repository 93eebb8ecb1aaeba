"""Muon as the inner optimizer of local updates (MuLoCo, arXiv:2505.23725) beside synchronous Muon.

    python -m benchmarks.muloco --write

Workers train in one process, in turn, which gives the same losses, to the bit, as workers on ranks
(`tests/parallel/diloco/test_diloco.py`). All ways train the same small transformer on the same
samples; each is tried with every rate of a grid, and the best of a way is compared with the best of
synchronous Muon, by the loss on text that was not trained on. Some runs go side by side, in
processes of one thread each: losses do not depend on what else the machine does.
"""

import argparse
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.diloco import RANKS, trainer_for
from benchmarks.page import RESULTS, machine, page, tell
from lockstep.config import config_from
from lockstep.data import build_data

WITHIN = 1.005  # of synchronous Muon's loss
SYNCHRONOUS = "synchronous Muon"


@dataclass(frozen=True)
class Way:
    """How a run trains.

    Attributes:
        every: steps between exchanges; None: it is synchronous.
        send_as: what is exchanged.
        outer: rate and momentum of the outer step.
    """

    optimizer: str = "muon"
    every: int | None = None
    send_as: str = "int8"
    outer: tuple[float, float] = (1.0, 0.0)

    @property
    def name(self) -> str:
        kind = "Muon" if self.optimizer == "muon" else "AdamW"
        if self.every is None:
            return f"synchronous {kind}"
        rate, momentum = self.outer
        outer = "averages" if self.outer == (1.0, 0.0) else f"outer {rate:g}, {momentum:g}"
        return f"{RANKS} workers, {kind}, {outer}, {self.send_as} every {self.every}"

    def settings(self, learning_rate: float) -> dict[str, Any]:
        common = {"training.optimizer": self.optimizer, "training.learning_rate": learning_rate}
        if self.every is None:
            return {**common, "distributed.strategy": "single"}
        options = {
            "workers": RANKS,
            "inner_steps": self.every,
            "send_as": self.send_as,
            "outer_learning_rate": self.outer[0],
            "outer_momentum": self.outer[1],
        }
        chosen = {f"distributed.diloco.{key}": value for key, value in options.items()}
        return {**common, "distributed.strategy": "diloco", **chosen}


def ways(every: int) -> list[Way]:
    return [
        Way(),
        Way(every=every),
        Way(every=every, send_as="int4"),
        Way(every=every, outer=(0.7, 0.9)),
        Way(optimizer="adamw"),
        Way(optimizer="adamw", every=every),
    ]


def trained(way: Way, rate: float, args: Namespace) -> float:
    """Train a run to its end, and return its loss on text that was not trained on."""
    torch.set_num_threads(1)
    section = config_from({"data.name": "python-docs", "data.args": {"block_size": 64}}).data
    data = build_data(section, seed=1)
    assert data.validation is not None
    settings = {**way.settings(rate), "training.lr_schedule": args.schedule}
    trainer = trainer_for(settings, args, data)
    for _ in trainer.steps(data.train):
        pass
    return trainer.evaluate(data.validation)


def page_of(losses: dict[tuple[Way, float], float], args: Namespace, seconds: float) -> str:
    """Return the page of what was tried, of each way by each rate."""
    tried = list(dict.fromkeys(way for way, _ in losses))
    rates = list(dict.fromkeys(rate for _, rate in losses))
    best = {way: min(losses[way, rate] for rate in rates) for way in tried}
    reference = best[tried[0]]
    rows = []
    for way in tried:
        each = " | ".join(f"{losses[way, rate]:.4f}" for rate in rates)
        met = "" if way.every is None else ("yes" if best[way] <= WITHIN * reference else "no")
        rows.append(f"| {way.name} | {each} | {best[way] / reference:.4f} | {met} |")
    flags = (
        "steps",
        "every",
        "rates",
        "schedule",
        "layers",
        "width",
        "batch",
        "seed",
        "processes",
        "ways",
    )
    command = " ".join(f"--{name} {getattr(args, name)}" for name in flags)
    course = "falling to zero along a half-cosine"
    if args.schedule == "constant":
        course = "constant"
    words = [
        f"A small transformer on Python's documentation, {RANKS * args.batch} × 64 bytes of it a"
        f" step over {RANKS} workers, {args.steps} steps,",
        f"the rate {course} after a tenth of warm-up; losses at the end, on the tenth of the text"
        " that",
        "was not trained on, by peak learning rate. Of each way's best rate: its loss over that of"
        f" {SYNCHRONOUS}, and whether",
        f"it is within {100 * (WITHIN - 1):g} % of it. One seed each: neighbouring rates may differ"
        " by more than ways do.",
    ]
    header = "| | " + " | ".join(f"{rate:g}" for rate in rates) + f" | of {SYNCHRONOUS}'s | met |"
    return page(
        "Muon as the inner optimizer of local updates",
        f"python -m benchmarks.muloco {command} --write",
        f"{machine()}, {seconds:.0f} s",
        words,
        header,
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=30, help="local steps between exchanges")
    parser.add_argument("--rates", default="0.003,0.006", help="peak learning rates")
    parser.add_argument("--schedule", choices=("cosine", "constant"), default="cosine")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="samples of a worker and step")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--processes", type=int, default=2, help="runs side by side")
    parser.add_argument("--ways", type=int, default=6, help="the first so many")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.rate = 0.0  # each way has its own

    here = import_module("benchmarks.muloco")  # as other processes find it: this one is __main__
    rates = [float(rate) for rate in args.rates.split(",")]
    tried = here.ways(args.every)[: args.ways]
    begin = time.perf_counter()
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        running = {
            (way, rate): pool.submit(here.trained, way, rate, args)
            for way in tried
            for rate in rates
        }
        losses = {}
        for (way, rate), future in running.items():
            losses[way, rate] = future.result()
            spent = time.perf_counter() - begin
            print(f"{way.name}, {rate:g}: {losses[way, rate]:.4f} ({spent:.0f} s)", flush=True)

    text = page_of(losses, args, time.perf_counter() - begin)
    tell(text, RESULTS / "muloco.md" if args.write else None)


if __name__ == "__main__":
    main()
