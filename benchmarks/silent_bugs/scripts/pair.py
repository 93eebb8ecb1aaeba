"""A classifier whose arguments say how it is written, or what is other training.

The same training: `manual loss`, `renamed`, `accumulated`, `one by one`, `recomputed`, `compiled`,
`sharded`, `workers`, `by hand`, `unfused mean`. Other training: all other ways below.
"""

import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WAYS = set(sys.argv[1:])
CLASSES = 4


def activation() -> nn.Module:
    return nn.GELU(approximate="tanh" if "other activation" in WAYS else "none")


def network() -> nn.Module:
    dropout = 0.3 if "dropout" in WAYS else 0.1
    layers = [
        ("into", nn.Linear(12, 16)),
        ("norm", nn.LayerNorm(16)),
        ("act", activation()),
        ("drop", nn.Dropout(dropout)),
        ("out", nn.Linear(16, CLASSES)),
    ]
    if "renamed" in WAYS:
        body = nn.Sequential(*(layer for _, layer in layers[:-1]))
        return nn.Sequential(OrderedDict(features=body, classifier=layers[-1][1]))
    return nn.Sequential(OrderedDict(layers))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    if "manual loss" in WAYS:
        return -outputs.log_softmax(-1).gather(1, targets[:, None]).mean()
    if "unfused mean" in WAYS:
        return F.cross_entropy(outputs, targets, reduction="none").sum() / len(targets)
    return F.cross_entropy(outputs, targets, label_smoothing=0.1 if "smoothed" in WAYS else 0.0)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    if "other optimizer" in WAYS:
        return torch.optim.NAdam(model.parameters(), lr=1e-2, weight_decay=0.01)
    rate = 2e-2 if "rate" in WAYS else 1e-2
    decay = 0.0 if "no decay" in WAYS else 0.01
    foreach = "one by one" not in WAYS
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, foreach=foreach)


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(1 if "first values" in WAYS else 0)
    net = network()
    if "frozen" in WAYS:
        net.out.bias.requires_grad_(False)
    model = net
    if "sharded" in WAYS:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif "by hand" not in WAYS:
        model = DistributedDataParallel(net)
    if "compiled" in WAYS:
        model = torch.compile(model, backend="aot_eager")
    optimizer = optimizer_of(model)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 12, generator=numbers), torch.randint(0, CLASSES, (96,), generator=numbers)
    )
    sampler = DistributedSampler(data, seed=5 if "order" in WAYS else 0)
    parts = 2 if "accumulated" in WAYS else 1
    workers = 2 if "workers" in WAYS else 0
    loader = DataLoader(data, batch_size=8 // parts, sampler=sampler, num_workers=workers)
    torch.manual_seed(7 + dist.get_rank())
    noise = torch.Generator().manual_seed(3 if "noise" in WAYS else 2)
    for number, (inputs, targets) in enumerate(loader, start=1):
        inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=noise)
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in WAYS):
            if "recomputed" in WAYS:
                outputs = checkpoint(model, inputs, use_reentrant=False)
            else:
                outputs = model(inputs)
            loss = loss_of(outputs, targets)
        if "undivided" not in WAYS:
            loss = loss / parts
        loss.backward()
        if number % parts:
            continue
        if "by hand" in WAYS:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        if "clipped" in WAYS:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
