"""A plain DDP loop with what torch offers around it: a sharded optimizer, communication hooks.

The first argument says which: `zero`, `zero scaled` (a rank's loss is), `fp16` or `powersgd`.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WAY = sys.argv[1]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if WAY.startswith("zero"):
        return ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
        )
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )
    model = DistributedDataParallel(net)
    if WAY == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if WAY == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = make_optimizer(model)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 16, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            if WAY.endswith("scaled") and dist.get_rank() == 1:
                loss = loss * 3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
