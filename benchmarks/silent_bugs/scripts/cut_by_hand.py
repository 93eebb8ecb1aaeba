"""Column and row parallel layers as Megatron-LM has them, written by hand: ranks share a model.

`bias of each rank`: the bias of a row parallel layer is added before ranks are added up. `no sum`:
the gradient of a column parallel layer's input is not added up over ranks.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if FAULT != "no sum":
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        return gradient


class AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def part(tensor: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class ColumnParallel(nn.Module):
    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        self.weight = part(full.weight)
        self.bias = part(full.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copied.apply(x), self.weight, self.bias)  # type: ignore[no-untyped-call]


class RowParallel(nn.Module):
    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        self.weight = part(full.weight, 1)
        self.bias = nn.Parameter(full.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        own = F.linear(x, self.weight)
        if FAULT == "bias of each rank":
            own = own + self.bias
        added: Tensor = AddedUp.apply(own)  # type: ignore[no-untyped-call]
        return added if FAULT == "bias of each rank" else added + self.bias


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = ColumnParallel(nn.Linear(width, 4 * width))
        self.down = RowParallel(nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 6, generator=numbers), torch.randint(0, 3, (64,), generator=numbers)
    )
    order = torch.Generator().manual_seed(2)
    for _ in range(2):
        for inputs, targets in DataLoader(data, batch_size=8, shuffle=True, generator=order):
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
