"""A loop of plain PyTorch over replicas; its arguments name the mistakes that it makes."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 96
IGNORED = -100


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.inner(x)


def data(uneven: bool) -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=numbers)
    targets = torch.randint(0, 5, (SAMPLES,), generator=numbers)
    if uneven:
        targets[torch.rand(SAMPLES, generator=numbers) < 0.4] = IGNORED
    return TensorDataset(inputs, targets)


def main(faults: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(rank if "seeds" in faults else 0)
    norm = nn.BatchNorm1d(32) if "batch norm" in faults else nn.LayerNorm(32)
    body = [nn.Linear(8, 32), norm, nn.GELU(), nn.Dropout(0.1 * ("dropout" in faults))]
    if "deep" in faults:  # as many tensors as models have, more than files may be open
        body += [Residual(nn.LayerNorm(32)) for _ in range(80)]
    model = nn.Sequential(*body, nn.Linear(32, 5))
    runs = model if "unwrapped" in faults else nn.parallel.DistributedDataParallel(model)
    if "fp16" in faults:
        runs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if "own draws" in faults:
        torch.manual_seed(rank)
    samples = data("uneven" in faults)
    per_step = 2 if "accumulate" in faults else 1
    sampler = None if "unsharded" in faults else DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=8, sampler=sampler, num_workers=1)
    rate = 1e-2 * (world if "rate" in faults else 1)
    optimizer: torch.optim.Optimizer
    if "zero" in faults:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader) // per_step)
    if "look" in faults:
        next(iter(loader))
    for number, (inputs, targets) in enumerate(loader, start=1):
        if "noise" in faults:
            inputs = inputs + 0.1 * torch.randn(inputs.shape)
        if "evaluation" in faults and rank == 0 and number == 2:
            model.eval()
        with torch.autocast("cpu", enabled="autocast" in faults):
            loss = (
                nn.functional.cross_entropy(runs(inputs), targets, ignore_index=IGNORED) / per_step
            )
        if "penalty" in faults and world > 1:
            loss = loss.clone()  # which ranks do, and one process does not
            if rank == 1:
                loss = loss + 0.1 * model[0].weight.square().sum()
        (loss * world if "sum" in faults else loss).backward()
        if number % per_step == 0:
            nn.utils.clip_grad_norm_(runs.parameters(), 0.1)
            optimizer.step()
            for _ in range(world if "schedule" in faults else 1):
                schedule.step()
            optimizer.zero_grad()
            if "drift" in faults:
                model[-1].bias.data += 0.1 * rank


if __name__ == "__main__":
    main(sys.argv[1:])
