"""A feed-forward network under tensor parallel, as torch's tutorial cuts it, with a DataLoader.

Ranks that share a model read the same samples; `sharded loader`: each reads others.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(self.relu(self.net1(x)))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    model = parallelize_module(ToyModel(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 10, generator=numbers), torch.randn(64, 5, generator=numbers)
    )
    sampler = DistributedSampler(data, shuffle=False) if FAULT == "sharded loader" else None
    for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
