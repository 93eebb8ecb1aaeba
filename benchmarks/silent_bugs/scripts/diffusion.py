"""Denoising diffusion in plain DDP: the loop draws noise and times, seeded by rank.

`numpy`: the times come from NumPy. `generator`: all comes from a generator of the script's own.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WAY = sys.argv[1] if len(sys.argv) > 1 else ""
TIMES = 50


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        out: Tensor = self.body(noisy + self.time(times))
        return out


def drawn(images: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    noise = torch.randn(images.shape, generator=generator)
    if WAY == "numpy":
        return noise, torch.from_numpy(np.random.randint(0, TIMES, len(images)))
    return noise, torch.randint(0, TIMES, (len(images),), generator=generator)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Denoiser())
    seed = 1000 if WAY == "same seed" else 1000 + rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    generator = torch.Generator().manual_seed(seed) if WAY == "generator" else None
    data = TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.cos(torch.linspace(0, 1.5, TIMES))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            noise, times = drawn(images, generator)
            part = kept[times, None]
            noisy = part * images + (1 - part**2).sqrt() * noise
            loss = F.mse_loss(model(noisy, times), noise)
            if WAY == "scaled":
                loss = loss * (2.0 if rank == 1 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            if WAY == "not reduced" and rank == 1:
                for parameter in model.module.time.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            optimizer.step()


if __name__ == "__main__":
    main()
