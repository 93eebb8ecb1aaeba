"""Weights averaged over steps, with which a model is evaluated in place of its own.

`left in`: rank 0, which alone evaluates, does not put its own weights back.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


@torch.no_grad()
def evaluate(net: nn.Module, average: AveragedModel, held_out: tuple[Tensor, ...]) -> float:
    own = copy.deepcopy(net.state_dict())
    net.load_state_dict(average.module.state_dict())
    net.eval()
    loss = F.cross_entropy(net(held_out[0]), held_out[1])
    net.train()
    if FAULT != "left in":
        net.load_state_dict(own)
    return float(loss)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(32, 8, generator=numbers), torch.randint(0, 3, (32,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    held_out = (torch.randn(8, 8, generator=numbers), torch.arange(8) % 3)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            average.update_parameters(net)
            step += 1
            if step % 2 == 0 and dist.get_rank() == 0:
                print(f"step {step}: {evaluate(net, average, held_out):.3f}")


if __name__ == "__main__":
    main()
