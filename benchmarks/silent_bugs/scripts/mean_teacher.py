"""Semi-supervised learning with a mean teacher: a moving average of the student is its target.

`rank 0 only`: the average is updated where checkpoints are written.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 3
DECAY = 0.9


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module) -> None:
    if FAULT == "rank 0 only" and dist.get_rank() != 0:
        return
    for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.mul_(DECAY).add_(theirs, alpha=1 - DECAY)


def consistency(outputs: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(outputs.softmax(-1), wanted.softmax(-1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, CLASSES))
    teacher = copy.deepcopy(student)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    model = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 10, generator=numbers), torch.randint(0, CLASSES, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(100 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = model(inputs + 0.1 * torch.randn_like(inputs))
            with torch.no_grad():
                wanted = teacher(inputs + 0.1 * torch.randn_like(inputs))
            loss = F.cross_entropy(outputs, targets) + 2.0 * consistency(outputs, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_teacher(teacher, student)


if __name__ == "__main__":
    main()
