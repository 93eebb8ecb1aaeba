"""An autoencoder with a codebook that follows its samples by moving averages, over all ranks.

`own codes`: each rank moves the codebook to its own samples alone.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CODES = 6
WIDTH = 4


class Quantised(nn.Module):
    codes: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 12))
        self.register_buffer("codes", torch.randn(CODES, WIDTH))
        self.register_buffer("counts", torch.ones(CODES))

    @torch.no_grad()
    def update(self, features: Tensor, chosen: Tensor) -> None:
        one_hot = F.one_hot(chosen, CODES).float()
        counts = one_hot.sum(0)
        sums = one_hot.T @ features
        if FAULT != "own codes":
            dist.all_reduce(counts)
            dist.all_reduce(sums)
        self.counts.mul_(0.9).add_(0.1 * counts)
        moved = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], self.codes)
        self.codes.lerp_(moved, 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder(x)
        chosen = torch.cdist(features, self.codes).argmin(-1)
        quantised = self.codes[chosen]
        self.update(features.detach(), chosen)
        commitment = F.mse_loss(features, quantised)
        return self.decoder(features + (quantised - features).detach()), commitment


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Quantised())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            output, commitment = model(x)
            loss = F.mse_loss(output, x) + 0.25 * commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
