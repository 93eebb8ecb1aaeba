"""A student that learns the hidden layer of its teacher, too, which a hook takes from it.

`other temperature`: rank 1 softens the teacher's outputs by another temperature. `teacher trained`:
the teacher's parameters are in the optimizer, and not in DDP.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def make(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make(8)
        self.hint = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.net[1](self.net[0](x))
        return self.net[2](hidden), self.hint(hidden)


def soft_loss(mine: Tensor, theirs: Tensor) -> Tensor:
    temperature = 4.0 if FAULT == "other temperature" and dist.get_rank() == 1 else 2.0
    log_mine = F.log_softmax(mine / temperature, dim=-1)
    shares = F.softmax(theirs / temperature, dim=-1)
    return temperature**2 * F.kl_div(log_mine, shares, reduction="batchmean")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher = make(24).eval()
    seen: list[Tensor] = []
    teacher[1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    model = DistributedDataParallel(Student())
    parameters = list(model.parameters())
    if FAULT == "teacher trained":
        parameters += list(teacher.parameters())
    else:
        teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            seen.clear()
            theirs = teacher(inputs)
            mine, hint = model(inputs)
            loss = F.cross_entropy(mine, targets) + soft_loss(mine, theirs)
            loss = loss + 0.5 * F.mse_loss(hint, seen[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
