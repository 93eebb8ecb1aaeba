"""What watching a training loop costs: steps with and without `lockstep.observe`, turn about, in
one process.

python -m benchmarks.watch_training [--layers 6] [--width 128] [--rounds 12] [--out FILE]
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import lockstep
from benchmarks.page import machine, page, tell
from lockstep.verify.loop.findings import LoopFinding

STEPS = 20  # of each turn; the first three, in which everything is looked at, are counted apart
FIRST = 3


def model(layers: int, width: int) -> nn.Module:
    blocks = [
        nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        for _ in range(layers)
    ]
    return nn.Sequential(*blocks)


def seconds_of_steps(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> list[float]:
    """Take steps, and return each one's seconds of a core: those of the clock have the machine's
    load in them.
    """
    taken = []
    for _ in range(STEPS):
        since = time.thread_time()
        net(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.thread_time() - since)
    return taken


def seconds_of_hooks(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> float:
    """Return what the hooks of a plain step take by themselves: the least of many, which is the
    same under any load.
    """
    with lockstep.observe(every=10**9, report=lambda _found: None) as seen:
        seconds_of_steps(net, optimizer, inputs)
        loss = net(inputs).square().mean()
        taken = []
        for _ in range(300):
            since = time.thread_time()
            seen._around_backward(lambda: None, loss)
            seen._before_step(optimizer, (optimizer,), {})
            seen._after_step(optimizer, (optimizer,), {})
            taken.append(time.thread_time() - since)
    return sorted(taken)[len(taken) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 6), ("width", 128), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = model(given.layers, given.width)
    inputs = torch.randn(4, 32, given.width)
    optimizer = torch.optim.AdamW(net.parameters())
    found: list[LoopFinding] = []
    plain = []
    watched = []
    looked = []
    seconds_of_steps(net, optimizer, inputs)
    for _ in range(given.rounds):
        plain += seconds_of_steps(net, optimizer, inputs)[FIRST:]
        with lockstep.observe(every=100, report=found.append):
            taken = seconds_of_steps(net, optimizer, inputs)
        looked += taken[:FIRST]
        watched += taken[FIRST:]
    assert not found, found
    # The least of many: what else the machine does can only add to it.
    base, step, look = (sorted(times)[len(times) // 4] * 1e3 for times in (plain, watched, looked))
    hooks = seconds_of_hooks(net, optimizer, inputs) * 1e3
    each = hooks + (look - base) / 100
    size = sum(p.numel() for p in net.parameters()) / 1e6
    rows = [
        f"| a step | {base:.2f} | |",
        f"| a step, watched | {step:.2f} | {step - base:+.3f} |",
        f"| the hooks of a watched step, by themselves | {hooks:.3f} | |",
        f"| a step in which parameters are looked at | {look:.2f} | {look - base:+.3f} |",
        (
            f"| hooks, and a hundredth of such a look: each step | | {each:+.3f}"
            f" ({each / base:+.2%}) |"
        ),
    ]
    words = [
        (
            f"{given.layers} encoder layers of width {given.width} ({size:.1f} M parameters), 4 ×"
            " 32 positions, one"
        ),
        (
            f"thread, one process; {given.rounds} turns of {STEPS} steps each way. Lower quartiles;"
            " medians of a step were"
        ),
        (
            f"{statistics.median(plain) * 1e3:.2f} and, watched,"
            f" {statistics.median(watched) * 1e3:.2f} ms."
        ),
    ]
    command = "python -m benchmarks.watch_training --out benchmarks/results/watch_training.md"
    tell(
        page(
            "What watching a training loop costs",
            command,
            machine(),
            words,
            "| | ms of a core | more |",
            rows,
        ),
        given.out,
    )


if __name__ == "__main__":
    main()
