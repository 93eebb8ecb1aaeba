"""Two heads on one body, of which a batch trains one or both, with find_unused_parameters.

`head of a rank`: rank 1 never trains the second head. `no optimizer`: the second head is not in the
optimizer. `twice`: the body's gradient is doubled by a hook on rank 1.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.first = nn.Linear(16, 1)
        self.second = nn.Linear(16, 1)

    def forward(self, inputs: Tensor, *, both: bool) -> tuple[Tensor, Tensor | None]:
        hidden = self.body(inputs)
        return self.first(hidden), self.second(hidden) if both else None


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = TwoTasks()
    if FAULT == "twice" and rank == 1:
        net.body[0].weight.register_hook(lambda gradient: gradient * 2)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    heads = [net.first] if FAULT == "no optimizer" else [net.first, net.second]
    parameters = [*net.body.parameters(), *(p for head in heads for p in head.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randn(64, 2, generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            both = number % 2 == 0 and not (FAULT == "head of a rank" and rank == 1)
            one, other = model(inputs, both=both)
            loss = nn.functional.mse_loss(one[:, 0], targets[:, 0])
            if other is not None:
                loss = loss + nn.functional.mse_loss(other[:, 0], targets[:, 1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
