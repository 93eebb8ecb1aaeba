"""LoRA by hand over a frozen base, as peft does it, in plain DDP."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


def main() -> None:
    dist.init_process_group("gloo")
    if FAULT == "other adapters":
        torch.manual_seed(dist.get_rank())
    else:
        torch.manual_seed(0)
    net = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.GELU(), LoRA(nn.Linear(16, 4)))
    model = net if FAULT == "other adapters" else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            if FAULT == "other adapters":
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
