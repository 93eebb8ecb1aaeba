"""Policy gradients on recorded states: each rank samples actions of its own, as REINFORCE does."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    torch.manual_seed(5 + dist.get_rank())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    states = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(states)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (seen,) in loader:
            runs = policy.module if FAULT == "beside the wrapper" else policy
            choice = Categorical(logits=runs(seen))
            action = choice.sample()
            reward = (action == seen[:, :3].argmax(1)).float()
            loss = -(choice.log_prob(action) * reward).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
