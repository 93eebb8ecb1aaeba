"""Compares steps on slow links with the limits of computation and link, and with an all-reduce.

The all-reduce is a raw one. Needs root.

    python -m benchmarks.slow_links [--hosts 2,4] [--rates 100mbit,1gbit] [--computation 0.1,1,3]
        [--rounds 5] [--write]

Hosts are network namespaces with one rank each (`tests.hosts`); computation sleeps, so that cores
do not matter and what overlaps is seen. It is as long as `--computation` says, in units of the time
that an all-reduce of the gradients takes on the link; what it takes with all that does not sleep
(gradients, clipping, update) is measured beside it, by a loop without communication, on all hosts
at once. A step is held against two limits:

    max(computation, link)     with link = bytes / rate, of the bytes that the busiest host was
                               counted to send
    in order                   what no schedule can beat: a gradient is sent after it was computed,
                               and parameters come before they are used; forward and backward pass
                               follow each other

The raw all-reduce sends the gradients' bytes with nothing beside it, in turn with the steps; a step
that moves its bytes as fast as that is not behind it. DDP and FSDP2 as one writes them by hand take
turns with them too.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.config import config_from
from lockstep.parallel.comm.compression import sent_numbers
from lockstep.trainer import Trainer
from tests.hosts import hosts, sent_bytes
from tests.ranks import run_ranks

BLOCKS = 8
HEADER = (
    "| hosts | rate | sleeps | strategy | MB | of theory | step, s | alone, s | of max | in order |"
    " as raw |"
)
WORDS = [
    (
        f"{BLOCKS} blocks (52.4 MB at 1gbit, 4.7 MB below) that sleep, `sleeps` times as long as an"
        " all-reduce of the"
    ),
    (
        "gradients needs on the link; `alone` is a step of a plain loop without communication."
        " Seconds are medians over"
    ),
    (
        "rounds, of the slowest rank; MB are what the busiest host sends in a step, with headers,"
        " and `of theory` what"
    ),
    (
        "that is of a ring's. `of max` is max(alone, bytes / rate) over the step: where the two are"
        " alike it can't be near"
    ),
    (
        "1, for the first gradient comes after the forward pass. `in order` is the least that the"
        " order of things allows."
    ),
    (
        "`as raw` is the same with the rate of the raw all-reduce of this run in place of the"
        " link's: 1 and above is not"
    ),
    "behind it. The goal is 0.95. `by hand` is torch's own DDP or FSDP2 in a plain loop.",
]
_COMPRESSION = "distributed.ddp.compression.kind"
_DDP: dict[str, Any] = {"distributed.strategy": "ddp"}
_FSDP = {"distributed.strategy": "fsdp", "distributed.fsdp.auto_wrap_policy": ["Slow"]}
CASES = {
    "ddp": _DDP,
    "ddp, fp16": {**_DDP, _COMPRESSION: "fp16"},
    "ddp, PowerSGD": {
        **_DDP,
        _COMPRESSION: "powersgd",
        "distributed.ddp.compression.start_step": 2,
    },
    "fsdp full_shard": _FSDP,
    "fsdp shard_grad_op": {**_FSDP, "distributed.fsdp.sharding_strategy": "shard_grad_op"},
}
BY_HAND = ("ddp, by hand", "fsdp full_shard, by hand", "fsdp shard_grad_op, by hand")
BUCKET_MB = 0.5


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    """x → linear(x), in so many seconds, and twice as many backward: then the weight's gradient is
    there.
    """

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), self.seconds)  # type: ignore[no-untyped-call,no-any-return]


class Data(Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((self.width,), index / 4096), torch.zeros(self.width)


class Load(NamedTuple):
    """The model's width, and the seconds of a step that sleep, a third of them forward."""

    width: int
    sleeps: float

    @property
    def parameters(self) -> int:
        return BLOCKS * self.width**2


class Found(NamedTuple):
    """Of a case: bytes that a step sends; and of each round the seconds of its step, of the raw
    all-reduce beside it, and of a step without communication: (forward, backward, the rest).
    """

    sent: float
    seconds: list[float]
    raw: list[float]
    alone: list[tuple[float, float, float]]


def theory(name: str, ranks: int, load: Load) -> float:
    """Bytes that a rank sends in a step if every collective sends the least (a ring)."""
    share = (ranks - 1) / ranks
    whole = 4.0 * load.parameters
    if name.startswith("fsdp"):
        return share * whole * _passes(name)
    kind = {"ddp, fp16": "fp16", "ddp, PowerSGD": "powersgd"}.get(name, "none")
    shapes = {f"{block}": (load.width, load.width) for block in range(BLOCKS)}
    return 2 * share * 4 * sent_numbers(shapes, kind, 1)


def _passes(name: str) -> int:
    """How often fsdp sends the model: gathered once or twice, reduced once."""
    return 3 if "full" in name else 2


def in_order(name: str, alone: tuple[float, float, float], link: float) -> float:
    """Seconds below which no step can be, if `link` is those that its messages need."""
    forward, backward, rest = alone
    if name.startswith("ddp"):
        bucket = link / BLOCKS
        return forward + max(backward + bucket, backward / BLOCKS + link) + rest
    once = link / _passes(name)  # through the model: BLOCKS messages
    first = max(once + forward / BLOCKS, once / BLOCKS + forward)
    if "full" in name:
        return first + max(2 * once, backward + 2 * once / BLOCKS) + rest
    return first + max(backward + once / BLOCKS, backward / BLOCKS + once) + rest


def trainer_for(settings: dict[str, Any], load: Load) -> Trainer:
    torch.manual_seed(0)
    common = {
        "training.batch_size": 4,
        "training.max_steps": 100,
        "training.optimizer": "sgd",
        "precision.mode": "fp32",
        "distributed.ddp.bucket_cap_mb": BUCKET_MB,
    }
    return Trainer(
        model_of(load),
        config=config_from({**common, **settings}),
        loss_fn=nn.MSELoss(reduction="sum"),
    )


def model_of(load: Load) -> nn.Module:
    return nn.Sequential(*[Slow(load.width, load.sleeps / 3 / BLOCKS) for _ in range(BLOCKS)])


class Done(NamedTuple):
    loss: Tensor


def by_hand(name: str, load: Load) -> Iterator[Done]:
    """Steps of the same model in a loop as torch's tutorials write it."""
    model = model_of(load)
    if name.startswith("ddp"):
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    else:
        for unit in (*model, model):
            sharded = fully_shard(unit, reshard_after_forward="full" in name)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)  # gloo takes no mean
            sharded.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(4, load.width)
    while True:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield Done(loss.detach())


class Alone:
    """A step of the same model without communication."""

    def __init__(self, load: Load) -> None:
        self._model = model_of(load)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._x = torch.ones(4, load.width)

    def step(self) -> tuple[float, float, float]:
        """Seconds of (forward, backward, the rest)."""
        dist.barrier()
        times = [time.perf_counter()]
        loss = self._model(self._x).square().mean()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def measure(loads: list[Load], rounds: int) -> list[dict[str, tuple[Any, ...]]]:
    """On every rank, one load after the other."""
    return [_measured(load, rounds) for load in loads]


def _measured(load: Load, rounds: int) -> dict[str, tuple[Any, ...]]:
    runs: dict[str, Iterator[Any]] = {}
    for name, settings in CASES.items():
        runs[name] = iter(trainer_for(settings, load).steps(Data(load.width)))
    for name in BY_HAND:
        runs[name] = by_hand(name, load)
    for steps in runs.values():
        for _ in range(4):  # buckets are cut, PowerSGD compresses
            next(steps)
    flat = torch.zeros(load.parameters)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    raw: list[float] = []
    without = Alone(load)
    alone = []
    without.step()
    for _ in range(rounds):
        alone.append(without.step())
        raw.append(_timed(partial(dist.all_reduce, flat)))
        for name, steps in runs.items():
            seconds[name].append(_timed(partial(_step, steps)))
    found = {}
    for name, steps in runs.items():
        before = _settled()
        for _ in range(2):
            next(steps)
        found[name] = tuple(Found((_settled() - before) / 2, seconds[name], raw, alone))
    return found


def _step(steps: Any) -> float:
    return float(next(steps).loss)


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


def rows(ranks: int, rate: str, computations: list[float], rounds: int) -> list[str]:
    here = import_module("benchmarks.slow_links")  # as other processes find it
    # on two cores small blocks would measure Python
    width = 384 if bytes_a_second(rate) < 5e7 else 1280
    alone = 2 * (ranks - 1) / ranks * 4 * BLOCKS * width**2 / bytes_a_second(rate)
    loads = [here.Load(width, share * alone) for share in computations]
    with hosts(ranks, rate=rate) as on:
        everyone = run_ranks(here.measure, ranks, loads, rounds, on=on, timeout=3000)
    return [
        row(ranks, rate, share, load, name, [Found(*rank[place][name]) for rank in everyone])
        for place, (share, load) in enumerate(zip(computations, loads, strict=True))
        for name in (*CASES, *BY_HAND)
    ]


def row(ranks: int, rate: str, share: float, load: Load, name: str, found: list[Found]) -> str:
    """Of one case: medians over rounds of the slowest rank."""
    seconds = median(max(each) for each in zip(*(rank.seconds for rank in found), strict=True))
    raw = median(max(each) for each in zip(*(rank.raw for rank in found), strict=True))
    alone = median(max(each, key=sum) for each in zip(*(rank.alone for rank in found), strict=True))
    sent = max(rank.sent for rank in found)
    link = sent / bytes_a_second(rate)
    as_raw = raw * sent / theory("ddp", ranks, load)
    limits = max(sum(alone), link), in_order(name, alone, link), in_order(name, alone, as_raw)
    return (
        f"| {ranks} | {rate} | {share:g} | {name} | {sent / 1e6:.2f} |"
        f" {sent / theory(name, ranks, load):.3f} | {seconds:.3f} | {sum(alone):.3f} | "
        + " | ".join(f"{limit / seconds:.2f}" for limit in limits)
        + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--rates", default="100mbit,1gbit", help="whole numbers of mbit or gbit")
    parser.add_argument(
        "--computation", default="0.1,1,3", help="times the link's time for an all-reduce"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    table = []
    for ranks in map(int, asked.hosts.split(",")):
        for rate in asked.rates.split(","):
            found = rows(
                ranks, rate, [float(share) for share in asked.computation.split(",")], asked.rounds
            )
            print("\n".join(found), flush=True)
            table += found
    command = (
        f"python -m benchmarks.slow_links --hosts {asked.hosts} --rates {asked.rates} --computation"
        f" {asked.computation} --rounds {asked.rounds} --write"
    )
    text = page("Steps on slow links, against the limit", command, machine(), WORDS, HEADER, table)
    tell(text, RESULTS / "slow_links.md" if asked.write else None)


if __name__ == "__main__":
    main()
