"""WGAN-GP: a critic whose gradient is penalised between real samples and made ones.

`same points`: ranks draw the same points between them. `penalty of a rank`: rank 1 leaves out the
root of the norm.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LATENT = 4


def gradient_penalty(critic: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * made).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    norms = gradient.norm(dim=1)
    if FAULT == "penalty of a rank" and dist.get_rank() == 1:
        norms = norms.square()
    return (norms - 1).square().mean()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, 8))
    critic_net = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))
    critic = DistributedDataParallel(critic_net)
    generator_ddp = DistributedDataParallel(generator)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    of_generator = torch.optim.Adam(generator_ddp.parameters(), lr=1e-3, betas=(0.0, 0.9))
    if FAULT != "same points":
        torch.manual_seed(70 + dist.get_rank())
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (real,) in enumerate(loader):
            with torch.no_grad():
                made = generator(torch.randn(len(real), LATENT))
            loss = critic(made).mean() - critic(real).mean()
            loss = loss + 10 * gradient_penalty(critic_net, real, made)
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            if number % 2:
                loss = -critic_net(generator_ddp(torch.randn(len(real), LATENT))).mean()
                of_generator.zero_grad()
                loss.backward()
                of_generator.step()


if __name__ == "__main__":
    main()
