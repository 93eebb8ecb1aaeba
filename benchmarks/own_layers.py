"""A step of a user's own data set and layers: by hand, under Fabric, and under Lockstep.

`benchmarks.overhead` measures the cases beside those of `benchmarks.contestants`. Nothing is marked
here for any framework: the data set may draw random numbers for all that Lockstep knows, the model
is a plain `nn.Sequential`, the loss function stands apart, and the optimizer has its defaults.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gate import Gate

RATE = 1e-4
SAMPLES = 10_000_000
STEPS = 1_000_000


class OneSample(Dataset[tuple[Tensor, Tensor]]):
    """The same sample again and again, which costs nothing to read."""

    def __init__(self, sample: Tensor) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.sample, self.sample


class Block(nn.Module):
    """A layer of a transformer: x [B, T, width] → [B, T, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


def linears(depth: int) -> tuple[nn.Module, OneSample]:
    """Return many layers that take a few µs each, and data for them."""
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)]), OneSample(torch.randn(8))


def blocks(depth: int) -> tuple[nn.Module, OneSample]:
    """Return a small transformer, and data for it."""
    return nn.Sequential(*[Block(64) for _ in range(depth)]), OneSample(torch.randn(32, 64))


class Case(NamedTuple):
    """A model and its steps; `block` and `rounds` as in `benchmarks.contestants.Size`."""

    make: Callable[[int], tuple[nn.Module, OneSample]]
    depth: int
    batch: int  # samples of a micro-batch
    micro_batches: int  # of a step
    block: int
    rounds: int = 20


CASES = {
    "linears50": Case(linears, 50, 8, 1, 40),
    "linears50x8": Case(linears, 50, 8, 8, 10),
    "blocks4": Case(blocks, 4, 4, 1, 30),
    "blocks4x8": Case(blocks, 4, 4, 8, 6),
    "blocks12x8": Case(blocks, 12, 4, 8, 3),
}


def hand_written(case: Case, gate: Callable[[], Any]) -> None:
    """The loop of PyTorch's tutorials."""
    model, data = case.make(case.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loss_fn = nn.MSELoss()
    batches = iter(DataLoader(data, batch_size=case.batch))
    while True:
        gate()
        optimizer.zero_grad()
        for _ in range(case.micro_batches):
            x, y = next(batches)
            (loss_fn(model(x), y) / case.micro_batches).backward()
        optimizer.step()


def fabric(case: Case, gate: Callable[[], Any]) -> None:
    from lightning.fabric import Fabric

    runs = Fabric(accelerator="cpu", devices=1)
    made, data = case.make(case.depth)
    model, optimizer = runs.setup(made, torch.optim.AdamW(made.parameters(), lr=RATE))
    loss_fn = nn.MSELoss()
    batches = iter(runs.setup_dataloaders(DataLoader(data, batch_size=case.batch)))
    while True:
        gate()
        optimizer.zero_grad()
        for number in range(1, case.micro_batches + 1):
            x, y = next(batches)
            with runs.no_backward_sync(model, enabled=number < case.micro_batches):
                runs.backward(loss_fn(model(x), y) / case.micro_batches)
        optimizer.step()


def lockstep(case: Case, gate: Callable[[], Any]) -> None:
    from lockstep import Trainer

    model, data = case.make(case.depth)
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=RATE),
        nn.MSELoss(),
        global_batch_size=case.batch * case.micro_batches,
        max_steps=STEPS,
    )
    for _ in trainer.steps(DataLoader(data, batch_size=case.batch)):
        gate()


CONTESTANTS: dict[str, Callable[[Case, Callable[[], Any]], None]] = {
    "hand-written": hand_written,
    "lockstep": lockstep,
    "fabric": fabric,
}


def run(name: str, case: Case) -> None:
    """Train for ever, and wait at a gate before each block of steps, which may end the process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    CONTESTANTS[name](case, Gate(case.block))
