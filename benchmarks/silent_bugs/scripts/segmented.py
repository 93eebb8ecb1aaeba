"""Segmentation with pixels that are ignored, under FSDP1 as older examples wrap a model.

The loss is divided by the pixels of all ranks. `own pixels`: by a rank's own. `plain clipping`: by
torch.nn.utils, which sees a rank's shards alone.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 3
IGNORED = 255


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 3, padding=1)
    )
    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    masks = torch.randint(0, CLASSES, (48, 6, 6), generator=numbers)
    ignored = torch.rand(48, 6, 6, generator=numbers) < torch.rand(48, 1, 1, generator=numbers)
    data = TensorDataset(
        torch.randn(48, 3, 6, 6, generator=numbers), masks.masked_fill(ignored, IGNORED)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            outputs = model(images)
            count = (targets != IGNORED).sum().float()
            if FAULT != "own pixels":
                dist.all_reduce(count)
                count /= world
            loss = F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum") / count
            loss.backward()
            if FAULT == "plain clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
