"""SwAV: a view's codes are predicted from the other view.

By Sinkhorn's iterations the codes of all ranks' samples together use prototypes equally often.

`own clusters`: the iterations go over each rank's samples alone.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
PROTOTYPES = 5


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
        self.prototypes = nn.Linear(8, PROTOTYPES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.prototypes(F.normalize(self.body(images), dim=-1))
        return scores


def over_ranks(values: Tensor) -> Tensor:
    if FAULT != "own clusters":
        dist.all_reduce(values)
    return values


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    codes = (scores / 0.25).exp().T
    samples = over_ranks(torch.tensor(float(codes.shape[1])))
    codes = codes / over_ranks(codes.sum())
    for _ in range(3):
        codes = codes / over_ranks(codes.sum(dim=1, keepdim=True)) / PROTOTYPES
        codes = codes / codes.sum(dim=0, keepdim=True) / samples
    return (codes * samples).T


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(1000 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            views = [images + 0.2 * torch.randn_like(images) for _ in range(2)]
            first, second = model(torch.cat(views)).chunk(2)
            loss = F.cross_entropy(first / 0.5, sinkhorn(second))
            loss = loss + F.cross_entropy(second / 0.5, sinkhorn(first))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
