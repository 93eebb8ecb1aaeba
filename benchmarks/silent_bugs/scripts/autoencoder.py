"""A variational autoencoder whose forward pass draws its noise, seeded by rank.

`same noise`: ranks are seeded alike. `own warm-up`: rank 1 counts its samples, not those of all
ranks, for the weight of the divergence.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WARM_UP = 64


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(latent), mean, log_variance


def divergence_weight(seen: int) -> float:
    if FAULT == "own warm-up" and dist.get_rank() == 1:
        seen //= dist.get_world_size()
    return min(1.0, seen / WARM_UP)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Autoencoder())
    if FAULT != "same noise":
        torch.manual_seed(1000 + dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.rand(64, 12, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    seen = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            seen += len(images) * dist.get_world_size()
            outputs, mean, log_variance = model(images)
            error = F.binary_cross_entropy_with_logits(outputs, images, reduction="none")
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
            weight = divergence_weight(seen)
            loss = error.sum(-1).mean() + weight * divergence.sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
