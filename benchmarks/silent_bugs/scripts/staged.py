"""A pipeline of one stage a rank, as torch's tutorial writes one, with micro-batches by GPipe.

`divided by stages`: as if ranks were replicas. `other input`: the first stage trains on samples of
its own.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CHUNKS = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for i in range(4)})
    each = len(layers) // world
    for name in list(layers):
        if not rank * each <= int(name) < (rank + 1) * each:
            del layers[name]

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    model = Part()
    stage = PipelineStage(model, rank, world, torch.device("cpu"))

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(outputs, targets)
        return loss / world if FAULT == "divided by stages" else loss

    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=loss_of)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randn(64, 8, generator=numbers)
    )
    for inputs, targets in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        if FAULT == "other input" and rank == 0 and world > 1:
            inputs = inputs.roll(1, 0)
        losses: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        if rank == world - 1:
            schedule.step(*given, target=targets, losses=losses)
        else:
            schedule.step(*given)
        optimizer.step()


if __name__ == "__main__":
    main()
