"""Measures tokens a second, MFU and peak memory of Lockstep and of a loop written by hand.

Both run on one GPU. The loop is the best that one writes by hand.

    python -m benchmarks.gpu.throughput [--models transformer-124m,transformer-774m,bdh]
        [--rounds 9] [--steps 20] [--fp8 linears]
    python -m benchmarks.gpu.throughput --device cpu --tiny

Both train the same model from the same data in bf16 (autocast over fp32 parameters), compiled, with
fused AdamW, flash attention and clipping, and log on every tenth step. They take turns in blocks of
steps; the median of the rounds' ratios is quoted. FLOPs are those of the model's own matrix
products, counted eagerly, so that recomputation counts for nothing; the peak is the data sheet's.
Predicted memory is `lockstep plan`'s rehearsal of the same step, uncompiled. With `--fp8`
Lockstep's linears multiply in float8, and the loop by hand stays in bf16. Lightning's Fabric takes
part where it is installed. torchtitan does not: it trains its own models from its own configs.
"""

import gc
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.gpu.common import (
    TINY,
    WORKLOADS,
    RandomTokens,
    Workload,
    flops_of_a_step,
    parser,
    require,
    wait,
    where,
)
from benchmarks.page import RESULTS, page, tell
from lockstep.config import Config, config_from
from lockstep.monitor.figures import peak_flops
from lockstep.plan.rehearsal import rehearse
from lockstep.plan.workload import Workload as Planned
from lockstep.strategy import resolve
from lockstep.trainer import Trainer

RATE = 3e-4
CLIP = 1.0
EVERY = 10


def by_hand(work: Workload, device: torch.device, compiled: bool) -> Iterator[None]:
    """One step for each `next`."""
    torch.manual_seed(0)
    model = work.model().to(device)
    own: Any = model
    runs: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    data = RandomTokens(work.length, work.args.get("vocab_size", 256))
    cuda = device.type == "cuda"
    loader = DataLoader(data, work.batch, shuffle=True, num_workers=2 * cuda, pin_memory=cuda)
    for step, batch in enumerate(loader, start=1):
        batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = own.loss(runs(batch["input_ids"]), batch) / batch["targets"].numel()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % EVERY == 0:
            assert loss.item() + norm.item() > 0  # the log reads them
        yield


def config_of(work: Workload, device: torch.device, compiled: bool, fp8: str = "none") -> Config:
    cuda = device.type == "cuda"
    return config_from(
        {
            "training.batch_size": work.batch,
            "training.max_steps": 1_000_000,
            "training.learning_rate": RATE,
            "training.warmup_steps": 0,
            "training.lr_schedule": "constant",
            "training.gradient_clip.value": CLIP,
            "training.compile": compiled,
            "precision.mode": "bf16",
            "precision.fp8": fp8,
            "data.num_workers": 2 * cuda,
            "data.pin_memory": cuda,
            "distributed.strategy": "single",
        }
    )


def lockstep(
    work: Workload, device: torch.device, compiled: bool, fp8: str = "none"
) -> Iterator[None]:
    """One step for each `next`."""
    with torch.device("meta"):
        model = work.model()
    trainer = Trainer(model, config=config_of(work, device, compiled, fp8))
    for record in trainer.steps(RandomTokens(work.length, work.args.get("vocab_size", 256))):
        if record.step % EVERY == 0:
            assert float(record.loss) + float(record.grad_norm) > 0
        yield


def fabric(work: Workload, device: torch.device, compiled: bool) -> Iterator[None]:
    """One step for each `next`, by Lightning Fabric, which has to be installed."""
    from lightning.fabric import Fabric

    made = Fabric(
        accelerator="cpu" if device.type == "cpu" else "gpu", devices=1, precision="bf16-mixed"
    )
    torch.manual_seed(0)
    model = work.model()
    plain: Any = model
    runs: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    wrapped, stepped = made.setup(runs, optimizer)
    cuda = device.type == "cuda"
    data = RandomTokens(work.length, work.args.get("vocab_size", 256))
    loader = made.setup_dataloaders(
        DataLoader(data, work.batch, shuffle=True, num_workers=2 * cuda, pin_memory=cuda)
    )
    for step, batch in enumerate(loader, start=1):
        outputs = wrapped(batch["input_ids"])
        with made.autocast():
            loss = plain.loss(outputs, batch) / batch["targets"].numel()
        stepped.zero_grad()
        made.backward(loss)
        norm = made.clip_gradients(wrapped, stepped, max_norm=CLIP, error_if_nonfinite=False)
        stepped.step()
        if step % EVERY == 0:
            assert loss.item() + norm.item() > 0
        yield


def block(steps: Iterator[None], count: int, device: torch.device) -> float:
    """Seconds a step."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        next(steps)
    wait(device)
    return (time.perf_counter() - begin) / count


def peak_of(steps: Iterator[None], device: torch.device) -> float:
    """The most that the allocator gave out in three steps, with everything that the contestant
    holds.
    """
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        next(steps)
    return float(torch.cuda.max_memory_allocated(device))


def predicted(work: Workload, device: torch.device) -> float:
    config = config_of(work, device, compiled=False)
    data = RandomTokens(work.length, work.args.get("vocab_size", 256))
    return float(
        rehearse(Planned(work.model, data[0]), config, resolve(config.distributed, 1)).peak.total
    )


def rows(name: str, work: Workload, device: torch.device, asked: Any) -> list[str]:
    peaks = {}
    contestants = {}
    makes = {"by hand": by_hand, "lockstep": partial(lockstep, fp8=asked.fp8)}
    if find_spec("lightning") is not None:
        makes["fabric"] = fabric
    for title, make in makes.items():
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        contestants[title] = make(work, device, asked.compile)
        block(contestants[title], 5, device)
        peaks[title] = peak_of(contestants[title], device) - held
    taken = [
        {title: block(steps, asked.steps, device) for title, steps in contestants.items()}
        for _ in range(asked.rounds)
    ]
    contestants.clear()
    gc.collect()
    rate, _ = peak_flops(device, "bf16")
    flops = flops_of_a_step(work, device)
    plan = predicted(work, device)
    lines = []
    for title in taken[0]:
        seconds = median(of[title] for of in taken)
        ratio = median(of["by hand"] / of[title] for of in taken)
        lines.append(
            f"| {name} | {title} | {work.batch * work.length / seconds:,.0f} | {ratio:.3f} "
            f"| {flops / seconds / rate:.1%} | {peaks[title] / 1e9:.2f} | {plan / 1e9:.2f} |"
        )
    return lines


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", default=",".join(WORKLOADS))
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--steps", type=int, default=20, help="in a block")
    arguments.add_argument("--fp8", default="none", choices=["none", "linears", "emulated"])
    arguments.add_argument("--no-compile", dest="compile", action="store_false")
    asked = arguments.parse_args()
    device = require(asked.device)
    lines = []
    for name in asked.models.split(","):
        lines += rows(name, (TINY if asked.tiny else WORKLOADS)[name], device, asked)
    text = page(
        "Training on one GPU",
        "python -m benchmarks.gpu.throughput " + " ".join(sys.argv[1:]),
        where(device),
        (
            []
            if find_spec("lightning") is not None
            else ["Lightning is not installed: Fabric has not run."]
        ),
        "| model | loop | tokens/s | of by hand | MFU | peak, GB | planned, GB |",
        lines,
    )
    name = "gpu_throughput.md" if asked.fp8 == "none" else "gpu_throughput_fp8.md"
    tell(text, RESULTS / name if asked.write else None)


if __name__ == "__main__":
    main()
