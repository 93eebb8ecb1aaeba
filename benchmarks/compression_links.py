"""What compressing gradients sends, what it takes and what it costs in loss, on links of several
rates.

    python -m benchmarks.compression_links --links 100mbit,1gbit,loopback --rounds 8 --steps 120

Needs root: two hosts are network namespaces whose links `tc` shapes (`tests.hosts`); on `loopback`
both ranks share one host. Kinds take steps in turn, so that what else the machine does falls on all
of them. Bytes are those that a host's interface has counted;
`lockstep.parallel.comm.compression.sent_numbers` calculates them. Losses are those of runs of the
same seed over the same data, which no link changes: they are taken where the link is fastest.
"""

import argparse
import datetime
import os
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from lockstep.config import config_from
from lockstep.data import Data, build_data
from lockstep.models import get_model
from lockstep.parallel.comm.compression import sent_numbers
from lockstep.run_directory.records import StepRecord
from lockstep.trainer import Trainer
from tests.hosts import hosts
from tests.ranks import run_ranks

RESULTS = Path(__file__).parent / "results" / "compression_links.md"
RANKS = 2
SETTLED = 4  # steps after which buckets are cut and PowerSGD compresses


class Kind(NamedTuple):
    kind: str
    rank: int = 1

    def __str__(self) -> str:
        return f"{self.kind}, rank {self.rank}" if self.kind == "powersgd" else self.kind


KINDS = [
    Kind("none"),
    Kind("fp16"),
    Kind("bf16"),
    Kind("powersgd", 1),
    Kind("powersgd", 2),
    Kind("powersgd", 4),
]


class Timed(NamedTuple):
    """Of one kind on one link: bytes a rank sends in a step, and is calculated to; seconds of a
    step, and the least.
    """

    sent: float
    calculated: float
    seconds: float
    fastest: float


class Trained(NamedTuple):
    """Of one kind: the mean loss of the last tenth of the steps, and the loss on text that was not
    trained on.
    """

    loss: float
    eval_loss: float


def trainer_for(kind: Kind, width: int, data: Data) -> Trainer:
    settings = {
        "training.batch_size": 4,
        "training.max_steps": 10_000,
        "training.learning_rate": 2e-3,
        "training.warmup_steps": 10,
        "training.lr_schedule": "constant",
        "precision.mode": "fp32",
        "distributed.strategy": "ddp",
        "distributed.ddp.bucket_cap_mb": 1.0,
        "distributed.ddp.compression.kind": kind.kind,
        "distributed.ddp.compression.rank": kind.rank,
        "distributed.ddp.compression.start_step": 2,
    }
    with torch.device("meta"):
        model = get_model("transformer")(
            n_layer=4, n_embd=width, n_head=4, vocab_size=data.facts["vocab_size"], dropout=0.0
        )
    return Trainer(model, config=config_from(settings))


def text() -> Data:
    section = config_from({"data.name": "python-docs", "data.args": {"block_size": 64}}).data
    return build_data(section, seed=1)


def counted(interface: str) -> int:
    """Bytes that this host has sent, once nothing is on its way."""
    dist.barrier()
    time.sleep(0.3)
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def on_a_link(interface: str, sharing: int, rounds: int, steps: int, width: int) -> dict[str, Any]:
    """On every rank; `sharing`: how many ranks send through the interface."""
    data = text()
    runs = {}
    shapes = {}
    for kind in KINDS:
        trainer = trainer_for(kind, width, data)
        shapes = {name: tuple(p.shape) for name, p in trainer.placed.parameters.items()}
        runs[kind] = trainer.steps(data.train)
        for _ in range(SETTLED):
            next(runs[kind])
    times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, records in runs.items():
            times[kind].append(one_step(records))
    timed = {}
    for kind, records in runs.items():
        before = counted(interface)
        for _ in range(2):
            next(records)
        sent = (counted(interface) - before) / 2 / sharing
        calculated = 4 * sent_numbers(shapes, kind.kind, kind.rank) * 2 * (RANKS - 1) / RANKS
        timed[kind] = tuple(Timed(sent, calculated, median(times[kind]), min(times[kind])))
    numbers = int(sent_numbers(shapes, "none"))
    losses = {kind: tuple(trained(kind, steps, width, data)) for kind in KINDS} if steps else {}
    return {"timed": timed, "losses": losses, "numbers": numbers}


def one_step(records: Iterator[StepRecord]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    float(next(records).loss)
    return time.perf_counter() - begin


def trained(kind: Kind, steps: int, width: int, data: Data) -> Trained:
    trainer = trainer_for(kind, width, data)
    records = trainer.steps(data.train)
    losses = [float(next(records).loss) for _ in range(steps)]
    assert data.validation is not None
    some = Subset(
        data.validation, range(0, len(data.validation), max(1, len(data.validation) // 128))
    )  # type: ignore[arg-type]
    return Trained(mean(losses[-max(1, steps // 10) :]), trainer.evaluate(some))


def measure(link: str, rounds: int, steps: int, width: int) -> dict[str, Any]:
    """Both ranks on one host share its loopback; else each has a host, and a link of its own."""
    alone = link == "loopback"
    with hosts(1 if alone else RANKS, rate=None if alone else link) as on:
        interface, sharing = ("lo", RANKS) if alone else ("eth0", 1)
        found = run_ranks(
            importable(on_a_link),
            RANKS,
            interface,
            sharing,
            rounds,
            steps if alone else 0,
            width,
            on=on,
            timeout=1800,
        )
    first: dict[str, Any] = found[0]
    return first


def importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """As other processes find it: here it is in `__main__`."""
    found: Callable[..., Any] = getattr(
        import_module("benchmarks.compression_links"), function.__name__
    )
    return found


def table_of_link(link: str, found: dict[str, Any]) -> list[str]:
    timed = {Kind(*kind): Timed(*row) for kind, row in found["timed"].items()}
    plain = timed[KINDS[0]]
    lines = [
        f"## {link}",
        "",
        (
            "| compression | calculated, MB a step | counted, MB | of it | s a step, median | of"
            " none | least | of none |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in timed.items():
        lines.append(
            f"| {kind} | {row.calculated / 1e6:.3f} | {row.sent / 1e6:.3f} |"
            f" {row.sent / row.calculated:.3f} | {row.seconds:.3f} |"
            f" {row.seconds / plain.seconds:.2f} | {row.fastest:.3f} |"
            f" {row.fastest / plain.fastest:.2f} |"
        )
    return [*lines, ""]


def table_of_losses(found: dict[str, Any], steps: int) -> list[str]:
    lines = [
        "## Losses",
        "",
        (
            f"| compression | mean loss of the last tenth of {steps} steps | on text not trained on"
            " | against none |"
        ),
        "|---|---|---|---|",
    ]
    losses = {Kind(*kind): Trained(*row) for kind, row in found["losses"].items()}
    plain = losses[KINDS[0]].eval_loss
    for kind, row in losses.items():
        lines.append(
            f"| {kind} | {row.loss:.4f} | {row.eval_loss:.4f} | {row.eval_loss - plain:+.4f} |"
        )
    chance = (
        "One run each. fp16 and bf16 differ from none by rounding alone: their differences show how"
        " much is chance."
    )
    return [*lines, "", chance, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--links", default="100mbit,1gbit,loopback", help="rates as `tc` writes them, and loopback"
    )
    parser.add_argument("--rounds", type=int, default=8, help="steps of each kind that are timed")
    parser.add_argument(
        "--steps", type=int, default=120, help="of each kind for its loss, on loopback; 0: none"
    )
    parser.add_argument("--width", type=int, default=192, help="of the model")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    begin = time.perf_counter()
    found = {}
    args.output.parent.mkdir(exist_ok=True)
    for link in args.links.split(","):
        found[link] = measure(link, args.rounds, args.steps, args.width)
        args.output.write_text(page(found, args, time.perf_counter() - begin), encoding="utf-8")
        print("\n".join(table_of_link(link, found[link])), flush=True)
    print(args.output.read_text())


def page(found: dict[str, dict[str, Any]], args: argparse.Namespace, seconds: float) -> str:
    some = next(iter(found.values()))
    lines = [
        "# Compressing gradients: bytes, seconds and losses",
        "",
        (
            f"`python -m benchmarks.compression_links --links {args.links} --rounds {args.rounds}"
            f" --steps {args.steps} --width {args.width}`"
        ),
        "",
        (
            f"ddp on {RANKS} ranks (gloo), a transformer of {some['numbers']:,} parameters on"
            " Python's documentation,"
        ),
        (
            f"4 × 64 bytes of it a rank and step, AdamW. Seconds are those of {args.rounds} steps,"
            " the kinds in turn;"
        ),
        (
            "bytes are what one rank sends, headers included. PowerSGD compresses from step 2 on,"
            " with error feedback and"
        ),
        (
            "warm start. Where other programs keep the cores busy, the fastest step says more than"
            " the median."
        ),
        "",
        (
            f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f},"
            f" {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {seconds:.0f} s."
        ),
        "",
    ]
    for link, of_link in found.items():
        lines += table_of_link(link, of_link)
    if "loopback" in found and args.steps:
        lines += table_of_losses(found["loopback"], args.steps)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
