"""A GAN in plain DDP, as torch's DCGAN example: two networks, a latent drawn by each rank.

`generator unwrapped`: its gradients are not reduced. `same latents`: ranks draw the same.
`unsharded`: ranks read the same real samples. `weighted rank`: rank 1 doubles a loss of its critic.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LATENT = 6


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator: nn.Module = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, 8))
    critic: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    if FAULT != "generator unwrapped":
        generator = DistributedDataParallel(generator)
    critic = DistributedDataParallel(critic)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    if FAULT != "same latents":
        torch.manual_seed(100 + dist.get_rank())
    criterion = nn.BCEWithLogitsLoss()
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    replicas = 1 if FAULT == "unsharded" else dist.get_world_size()
    sampler = DistributedSampler(data, replicas, dist.get_rank() % replicas)
    loader = DataLoader(data, batch_size=4, sampler=sampler)

    def against(outputs: Tensor, label: float) -> Tensor:
        loss: Tensor = criterion(outputs, torch.full_like(outputs, label))
        return loss

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            optimizer_d.zero_grad()
            against(critic(real), 1.0).backward()
            fake = generator(torch.randn(len(real), LATENT))
            weight = 1 + (FAULT == "weighted rank" and dist.get_rank() == 1)
            (weight * against(critic(fake.detach()), 0.0)).backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            against(critic(fake), 1.0).backward()
            optimizer_g.step()


if __name__ == "__main__":
    main()
