"""Schedules of pipelines against theory, with stages that sleep: ranks that compute nothing fit two
cores, all of them.

    python -m benchmarks.pipeline_schedules [--ranks 2,4,8,16] [--write]

A stage sleeps in its forward pass, in the gradient of its input and in that of its weight, each for
`--seconds`. It is trained through `lockstep.parallel.place`, as any model is. Theory is the
schedule's own list of actions with these times (`lockstep.parallel.pipeline.schedules`), sending
being free. The first stage has no input to differentiate: under a schedule that splits the backward
pass, both of its halves come with the second.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.config import config_from
from lockstep.data.batches import MicroBatch
from lockstep.models.objective import Objective
from lockstep.parallel.facts import facts_of
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.pipeline.schedules import (
    SCHEDULES,
    UNITS,
    ScheduleTimeline,
    actions,
    simulate,
)
from lockstep.parallel.place import place
from lockstep.precision import Precision
from lockstep.strategy import resolve
from tests.ranks import run_ranks

GOAL = 0.03
RANKS_A_CORE = 4


class Sleep(torch.autograd.Function):
    """Its argument, unchanged; the gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """One stage."""

    def __init__(self, seconds: float, *, first: bool, last: bool) -> None:
        super().__init__()
        self.seconds = seconds
        self.last = last
        self.weight = nn.Parameter(torch.zeros(8))
        # So that the first stage's input, too, has a gradient that takes its time.
        self.start = nn.Parameter(torch.zeros(8)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        x = x if self.start is None else x + self.start
        y = Sleep.apply(x, self.seconds) + Sleep.apply(self.weight, self.seconds)
        return y.sum() if self.last else y


class Sleepers(nn.Module):
    def __init__(self, stages: int, seconds: float) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            Sleeper(seconds, first=i == 0, last=i == stages - 1) for i in range(stages)
        )

    def segments(self) -> list[tuple[str, nn.Module]]:
        return [(f"stages.{i}", stage) for i, stage in enumerate(self.stages)]


class Case(NamedTuple):
    schedule: str
    ranks: int
    stages_per_rank: int
    micro_batches: int

    def theory(self, seconds: float) -> ScheduleTimeline:
        """The run with each action's own time."""
        splits = SCHEDULES[self.schedule].splits_backward

        times = {
            (kind, stage): (
                seconds * ({"I": 0.0, "W": 2.0}.get(kind, cost) if splits and stage == 0 else cost)
            )
            for kind, cost in UNITS.items()
            for stage in range(self.ranks * self.stages_per_rank)
        }
        return simulate(
            actions(self.schedule, self.ranks, self.stages_per_rank, self.micro_batches), times
        )


def measure(cases: list[tuple[Any, ...]], seconds: float, repeats: int) -> list[list[float]]:
    """On each rank: the times of each case, from when all ranks are ready until this
    one is done.
    """
    return [one(Case(*case), seconds, repeats) for case in cases]


def one(case: Case, seconds: float, repeats: int) -> list[float]:
    config = config_from(
        {
            "distributed.strategy": "pipeline",
            "distributed.pipeline.schedule": case.schedule,
            "distributed.pipeline.stages_per_rank": case.stages_per_rank,
        }
    )
    device = torch.device("cpu")
    objective = Objective(
        lambda batch: ((batch,), {}), lambda loss, _batch: loss, lambda batch: len(batch)
    )
    facts = facts_of(Sleepers(case.ranks * case.stages_per_rank, seconds))
    placed = place(
        replace(facts, objective=objective),
        resolve(config.distributed, case.ranks),
        config.step,
        device=device,
        precision=Precision("fp32", "cpu"),
    )
    micro_batches = [MicroBatch(i, torch.zeros(1, 8)) for i in range(case.micro_batches)]
    times = []
    for _ in range(repeats + 1):  # the first one learns shapes
        accumulator = LossAccumulator(case.micro_batches, device, shared=True)
        dist.barrier()
        start = time.perf_counter()
        placed.forward_backward(micro_batches, accumulator, 1.0)
        times.append(time.perf_counter() - start)
        accumulator.totals()
    return times[1:]


def cases_of(ranks: int, micro_batches: int) -> list[Case]:
    return [
        Case(name, ranks, facts.stages_per_rank or 2, facts.padded(micro_batches, ranks, ranks * 2))
        for name, facts in SCHEDULES.items()
    ]


def row(case: Case, seconds: float, theory: float, found: float, bubble: float) -> str:
    return (
        f"| {case.schedule} | {case.ranks} | {case.stages_per_rank} | {case.micro_batches} |"
        f" {seconds:g} | {theory:.3f} | {found:.3f} | {found / theory - 1:+.1%} | {bubble:.1%} |"
    )


def importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """As other processes find it: here it is in `__main__`."""
    found: Callable[..., Any] = getattr(
        import_module("benchmarks.pipeline_schedules"), function.__name__
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.1,
        help=(
            "of a forward pass, and of each half of a backward; more than four ranks a core sleep"
            " longer"
        ),
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="the shortest counts: other programs only add"
    )
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = []
    worst = 0.0
    for ranks in map(int, args.ranks.split(",")):
        cases = cases_of(ranks, args.micro_batches)
        plain = [tuple(case) for case in cases]
        seconds = args.seconds * max(1.0, ranks / RANKS_A_CORE / (os.cpu_count() or 1))
        results = run_ranks(importable(measure), ranks, plain, seconds, args.repeats, timeout=3600)
        for place_, case in enumerate(cases):
            found = min(
                max(of_rank)
                for of_rank in zip(*(result[place_] for result in results), strict=True)
            )
            theory = case.theory(seconds)
            rows.append(row(case, seconds, theory.end, found, theory.bubble))
            worst = max(worst, found / theory.end - 1)
            print(rows[-1], flush=True)
    command = (
        f"python -m benchmarks.pipeline_schedules --ranks {args.ranks} --micro-batches"
        f" {args.micro_batches}"
    )
    text = page(
        "Schedules of pipelines, measured and in theory",
        f"{command} --seconds {args.seconds:g} --repeats {args.repeats}",
        machine(),
        [
            (
                "Stages that sleep so many seconds in a forward pass, and in each half of a"
                " backward pass. An action takes"
            ),
            (
                f"about 1 ms of a core besides: more than {RANKS_A_CORE} ranks a core sleep longer"
                " in proportion."
            ),
            f"Goal: within {GOAL:.0%} of theory. Worst: {worst:+.1%}.",
        ],
        "| schedule | ranks | stages a rank | micro-batches | sleep, s | theory, s | measured, s |"
        " over | bubble |",
        rows,
    )
    tell(text, RESULTS / "pipeline_schedules.md" if args.write else None)
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
