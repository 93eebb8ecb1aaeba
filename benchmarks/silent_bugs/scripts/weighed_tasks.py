"""Two tasks that are weighed by uncertainties which are learnt, too, within the wrapped model.

`beside the model`: the uncertainties are parameters of a loss that is not wrapped.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Uncertainties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, losses: Tensor) -> Tensor:
        return (losses * (-self.logs).exp() + self.logs).sum()


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.Tanh())
        self.depth = nn.Linear(24, 1)
        self.classes = nn.Linear(24, 4)
        self.weighed = None if FAULT == "beside the model" else Uncertainties()

    def forward(self, x: Tensor, depth: Tensor, classes: Tensor) -> Tensor:
        hidden = self.body(x)
        losses = torch.stack(
            [
                F.mse_loss(self.depth(hidden), depth),
                F.cross_entropy(self.classes(hidden), classes),
            ]
        )
        return losses if self.weighed is None else self.weighed(losses)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Tasks())
    parameters = list(model.parameters())
    weighed = Uncertainties() if FAULT == "beside the model" else nn.Identity()
    parameters += list(weighed.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers),
        torch.randn(64, 1, generator=numbers),
        torch.randint(0, 4, (64,), generator=numbers),
    )
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, depth, classes in DataLoader(data, batch_size=4, sampler=sampler):
            loss = weighed(model(x, depth, classes))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
