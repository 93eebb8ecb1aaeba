"""Steps on slow links, against the limit of computation and link, and against a raw all-reduce. Needs root.

    python -m benchmarks.slow_links [--hosts 2,4] [--rates 100mbit,1gbit] [--rounds 7] [--write]

Hosts are network namespaces with one rank each (`tests.hosts`); computation sleeps, so that cores do not matter and
what overlaps is seen. The limit of a step is max(computation, bytes / rate), with the bytes that the busiest host was
counted to send. The raw all-reduce sends the gradients' bytes with nothing beside it, in turn with the steps: no step
that sends as much may be behind computation and it together, the one hidden behind the other.
"""

import argparse
import os
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lockstep.parallel.compression import sent_numbers
from lockstep.trainer import Trainer
from tests.hosts import hosts, sent_bytes
from tests.plan.timed import BACKWARD, BLOCKS, FORWARD, WIDTH, Case, Data, Sleepy
from tests.ranks import run_ranks

RESULT = Path(__file__).parent / "results" / "slow_links.md"
COMPUTATION = BLOCKS * (FORWARD + BACKWARD)
PARAMETERS = BLOCKS * WIDTH * WIDTH
_COMPRESSION = "distributed.ddp.compression.kind"
_FSDP = (("distributed.strategy", "fsdp"), ("distributed.fsdp.auto_wrap_policy", ["Sleepy"]))
CASES = {
    "ddp": Case("ddp", settings=(("distributed.strategy", "ddp"),)),
    "ddp, fp16": Case("fp16", settings=(("distributed.strategy", "ddp"), (_COMPRESSION, "fp16"))),
    "ddp, PowerSGD": Case(
        "powersgd",
        settings=(
            ("distributed.strategy", "ddp"), (_COMPRESSION, "powersgd"), ("distributed.ddp.compression.start_step", 2)
        ),
    ),
    "fsdp full_shard": Case("full", settings=_FSDP),
    "fsdp shard_grad_op": Case("grad_op", settings=(*_FSDP, ("distributed.fsdp.sharding_strategy", "shard_grad_op"))),
}  # fmt: skip


class Found(NamedTuple):
    """Of a case: seconds of each round's step and of the raw all-reduce beside it, bytes that a step sends."""

    seconds: list[float]
    raw: list[float]
    sent: float


def theory(name: str, ranks: int) -> float:
    """Bytes that a rank sends in a step if every collective sends the least (a ring)."""
    share, whole = (ranks - 1) / ranks, 4.0 * PARAMETERS
    if name.startswith("fsdp"):
        gathers = 2 if "full" in name else 1
        return share * whole * (gathers + 1)
    kind = {"ddp": "none", "ddp, fp16": "fp16", "ddp, PowerSGD": "powersgd"}[name]
    shapes = {f"{block}": (WIDTH, WIDTH) for block in range(BLOCKS)}
    return 2 * share * 4 * sent_numbers(shapes, kind, 1)


def measure(rounds: int) -> dict[str, tuple[Any, ...]]:
    """On every rank."""
    runs = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        model = nn.Sequential(*[Sleepy() for _ in range(BLOCKS)])
        trainer = Trainer(model, config=case.config(), loss_fn=nn.MSELoss(reduction="sum"))
        runs[name] = iter(trainer.steps(Data()))
        for _ in range(4):  # buckets are cut, PowerSGD compresses
            next(runs[name])
    flat = torch.zeros(PARAMETERS)
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    raw: list[float] = []
    for _ in range(rounds):
        raw.append(_timed(lambda: dist.all_reduce(flat)))
        for name, steps in runs.items():
            seconds[name].append(_timed(lambda steps=steps: float(next(steps).loss)))
    found = {}
    for name, steps in runs.items():
        before = _settled()
        for _ in range(2):
            next(steps)
        found[name] = tuple(Found(seconds[name], raw, (_settled() - before) / 2))
    return found


def _timed(call: Any) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _settled() -> int:
    dist.barrier()
    time.sleep(0.3)
    return sent_bytes()


def bytes_a_second(rate: str) -> float:
    units = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}
    return float(rate[:-4]) * units[rate[-4:]]


def rows(ranks: int, rate: str, rounds: int) -> list[str]:
    function = import_module("benchmarks.slow_links").measure  # as other processes find it
    with hosts(ranks, rate=rate) as on:
        everyone = run_ranks(function, ranks, rounds, on=on, timeout=1800)
    lines = []
    for name in CASES:
        found = [Found(*rank[name]) for rank in everyone]
        seconds = median(max(each) for each in zip(*(rank.seconds for rank in found), strict=True))
        raw = median(max(each) for each in zip(*(rank.raw for rank in found), strict=True))
        sent = max(rank.sent for rank in found)
        limit = max(COMPUTATION, sent / bytes_a_second(rate))
        lines.append(
            f"| {ranks} | {rate} | {name} | {sent / 1e6:.2f} | {sent / theory(name, ranks):.3f} | {raw:.3f} "
            f"| {limit:.3f} | {seconds:.3f} | {limit / seconds:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--rates", default="100mbit,1gbit", help="whole numbers of mbit or gbit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    table = []
    for ranks in map(int, asked.hosts.split(",")):
        for rate in asked.rates.split(","):
            table += rows(ranks, rate, asked.rounds)
            print("\n".join(table[-len(CASES) :]), flush=True)
    text = "\n".join(
        [
            "# Steps on slow links, against the limit",
            "",
            f"`python -m benchmarks.slow_links --hosts {asked.hosts} --rates {asked.rates} --rounds {asked.rounds} "
            f"--write`; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}. Goal: 0.95 of the limit.",
            "",
            f"{BLOCKS} blocks of {4 * WIDTH * WIDTH / 2**20:.0f} MiB, computation of {COMPUTATION:.2f} s that sleeps;",
            "seconds are medians over rounds, of the slowest rank; MB are what the busiest host sends in a step, with",
            "headers, and `of theory` what that is of a ring's. gloo's reduce-scatter is an all-reduce of which a part",
            "is kept, so shards send more than a ring would.",
            "",
            "| hosts | rate | strategy | MB | of theory | raw all-reduce, s | limit, s | step, s | of the limit |",
            "|---|---|---|---|---|---|---|---|---|",
            *table,
            "",
        ]
    )
    if asked.write:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
