"""Meta-learning as MAML: an inner step on the support set, the outer gradient averaged by hand.

`summed`: the gradients of tasks are summed over ranks. `first order`: on rank 1 the outer gradient
does not go through the inner step.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
INNER_RATE = 0.05


def adapted(net: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    parameters = dict(net.named_parameters())
    loss = F.mse_loss(functional_call(net, parameters, (inputs,)), targets)
    goes_through = not (FAULT == "first order" and dist.get_rank() == 1)
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=goes_through)
    return {
        name: value - INNER_RATE * gradient
        for (name, value), gradient in zip(parameters.items(), gradients, strict=True)
    }


def reduce_gradients(net: nn.Module) -> None:
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        if FAULT != "summed" and parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    points = 6 * torch.rand(48, 10, 1, generator=numbers) - 3
    phases = 3 * torch.rand(48, 1, 1, generator=numbers)
    tasks = TensorDataset(points, (points + phases).sin())
    sampler = DistributedSampler(tasks)
    loader = DataLoader(tasks, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            losses = []
            for x, y in zip(inputs, targets, strict=True):
                weights = adapted(net, x[:5], y[:5])
                losses.append(F.mse_loss(functional_call(net, weights, (x[5:],)), y[5:]))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            reduce_gradients(net)
            optimizer.step()


if __name__ == "__main__":
    main()
