"""The loop of pytorch/examples' distributed/ddp-tutorial-series: a Trainer class around
DistributedDataParallel.
"""

import sys
from pathlib import Path

import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import images

init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = images()
loader = DataLoader(
    data, batch_size=8, pin_memory=False, shuffle=False, sampler=DistributedSampler(data)
)
model = DistributedDataParallel(model)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    for pixels, classes in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), classes).backward()
        optimizer.step()
