"""Loops of plain PyTorch over one model that is cut: by `parallelize_module`, by a pipeline, or by
hand.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 16


def samples() -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(64, WIDTH, generator=numbers), torch.randn(64, WIDTH, generator=numbers)
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Sum(torch.autograd.Function):
    """Sums over ranks in the forward pass, and passes the gradient on."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Copy(torch.autograd.Function):
    """Passes on, and sums gradients over ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class CutByHand(nn.Module):
    """A block of which each rank holds some columns of `up` and rows of `down`."""

    def __init__(self, forget: bool) -> None:
        super().__init__()
        rank = dist.get_rank()
        world = dist.get_world_size()
        whole = Block()
        self.norm = whole.norm
        self.forget = forget
        self.up = nn.Linear(WIDTH, 32 // world)
        self.down = nn.Linear(32 // world, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight.chunk(world)[rank])
            self.up.bias.copy_(whole.up.bias.chunk(world)[rank])
            self.down.weight.copy_(whole.down.weight.chunk(world, 1)[rank])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y if self.forget else Copy.apply(y)  # type: ignore[no-untyped-call]
        z: Tensor = x + Sum.apply(self.down(nn.functional.gelu(self.up(y))))  # type: ignore[no-untyped-call]
        return z


def main(kind: str, fault: str = "") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    apart = 1
    schedule = None
    if kind == "by hand":
        model = nn.Sequential(CutByHand(fault == "forget"), Block())
    elif kind == "pipeline":
        if world > 1:
            model = _stage(model, rank)
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        scale = 2 if fault == "scale" and world > 1 else 1
        schedule = ScheduleGPipe(
            stage, 2, loss_fn=lambda y, t: scale * nn.functional.mse_loss(y, t)
        )
    else:
        cut = 2 if world > 1 else 1
        apart = world // cut
        mesh = init_device_mesh("cpu", (apart, cut), mesh_dim_names=("dp", "tp"))
        for block in model:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if kind == "fsdp and tensor":
            for block in model:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
    data = samples()
    sampler = DistributedSampler(
        data, num_replicas=apart, rank=rank * apart // world, shuffle=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
        if schedule is not None:
            last = {"target": targets} if rank == world - 1 else {}
            schedule.step(*[inputs][rank:], **last)
        else:
            nn.functional.mse_loss(model(inputs), targets).backward()
        if fault == "norm" and rank == 1:
            model[1].norm.weight.grad *= 2
        optimizer.step()
        optimizer.zero_grad()


def _stage(model: nn.Sequential, rank: int) -> nn.Sequential:
    stage = nn.Sequential()
    stage.add_module(str(rank), model[rank])
    return stage


if __name__ == "__main__":
    main(*sys.argv[1:])
