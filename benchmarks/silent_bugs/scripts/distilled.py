"""A student that learns from a frozen teacher and an average of itself, in plain DDP."""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = network(32).eval().requires_grad_(False)
    if FAULT == "other teacher" and rank == 1:
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    student = network(16)
    average = copy.deepcopy(student).requires_grad_(False)
    model = DistributedDataParallel(student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            with torch.no_grad():
                wanted = teacher(inputs).softmax(-1)
                kept = average(inputs).softmax(-1)
            outputs = model(inputs).log_softmax(-1)
            loss = F.kl_div(outputs, wanted, reduction="batchmean")
            loss = loss + 0.1 * F.kl_div(outputs, kept, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), student.parameters(), strict=True):
                    mine.lerp_(theirs, 0.01)


if __name__ == "__main__":
    main()
