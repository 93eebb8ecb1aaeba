"""Private training: each sample's gradient is clipped, and noise added to the sum of all ranks.

`own noise`: each rank adds noise of its own to the sum that all have.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LARGEST = 1.0


def clipped_sums(net: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, parameters, (x[None],)), y[None])

    parameters = {name: value.detach() for name, value in net.named_parameters()}
    gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, inputs, targets)
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
    factors = (LARGEST / norms).clamp(max=1.0)
    return {name: torch.einsum("n,n...->...", factors, each) for name, each in gradients.items()}


def noisy(total: Tensor, numbers: torch.Generator) -> Tensor:
    return total + 0.1 * LARGEST * torch.randn(total.shape, generator=numbers)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    seed = 7 + (dist.get_rank() if FAULT == "own noise" else 0)
    noise = torch.Generator().manual_seed(seed)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            sums = clipped_sums(net, inputs, targets)
            samples = len(inputs) * dist.get_world_size()
            for name, parameter in net.named_parameters():
                dist.all_reduce(sums[name])
                parameter.grad = noisy(sums[name], noise) / samples
            optimizer.step()


if __name__ == "__main__":
    main()
