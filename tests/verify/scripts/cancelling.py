"""A sound loop whose first step makes updates of rounding; `uneven`: in the second, ranks have
unequal targets.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(64))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        # The inputs of the first step cancel, and with them the gradient of `level`; Adam's update
        # of it is whole.
        return self.bias + (inputs * self.level).sum(1, keepdim=True).tanh() * torch.arange(4)


def main(faults: list[str]) -> None:
    dist.init_process_group("gloo")
    numbers = torch.Generator().manual_seed(1)
    half = torch.randn(8, 64, generator=numbers)
    rest = torch.randn(16, 64, generator=numbers)
    inputs = torch.cat([half, -half, rest])
    targets = torch.randint(0, 4, (32,), generator=numbers)
    targets[:16] = targets[:8].repeat(2)
    if "uneven" in faults:
        targets[16::4] = -100
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    samples = TensorDataset(inputs, targets)
    loader = DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples, shuffle=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch, labels in loader:
        nn.functional.cross_entropy(model(batch), labels, ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1:])
