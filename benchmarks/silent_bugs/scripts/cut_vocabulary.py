"""A vocabulary cut over ranks, and a cross entropy over its parts, as Megatron-LM has them.

`own total`: each rank normalises by the words that it holds.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 24
WIDTH = 12


class AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class CutHead(nn.Module):
    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        parts = full.weight.detach().chunk(dist.get_world_size())
        self.weight = nn.Parameter(parts[dist.get_rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        return Copied.apply(x) @ self.weight.T  # type: ignore[no-any-return, no-untyped-call]


def cut_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    begin = dist.get_rank() * logits.shape[-1]
    largest = logits.detach().max(-1).values
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[:, None]
    total = logits.exp().sum(-1)
    if FAULT != "own total":
        total = AddedUp.apply(total)  # type: ignore[no-untyped-call]
    here = (targets >= begin) & (targets < begin + logits.shape[-1])
    at = (targets - begin).clamp(0, logits.shape[-1] - 1)
    own = logits.gather(1, at[:, None]).squeeze(1) * here
    wanted = AddedUp.apply(own)  # type: ignore[no-untyped-call]
    return (total.log() - wanted).mean()  # type: ignore[no-any-return]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(body, CutHead(nn.Linear(WIDTH, WORDS, bias=False)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 6, generator=numbers), torch.randint(0, WORDS, (64,), generator=numbers)
    )
    order = torch.Generator().manual_seed(2)
    for _ in range(2):
        for inputs, targets in DataLoader(data, batch_size=8, shuffle=True, generator=order):
            loss = cut_cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
