"""Contrastive learning of two towers as CLIP: negatives are gathered from all ranks.

Gradients pass through torch.distributed.nn's all_gather. `own negatives`: nothing is gathered.
`no gradient`: what is gathered has none, and each rank's own takes its place again, without the
factor that makes up for the mean over ranks.
"""

import math
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(12, 8)
        self.text = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.image(images), dim=-1)
        return image, F.normalize(self.text(texts), dim=-1), self.scale.exp()


def gathered(features: Tensor) -> Tensor:
    if FAULT == "own negatives":
        return features
    if FAULT == "no gradient":
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.detach())
        parts[dist.get_rank()] = features
        return torch.cat(parts)
    return torch.cat(list(torch.distributed.nn.all_gather(features)))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 12, generator=numbers), torch.randn(64, 6, generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            image, text, scale = model(images, texts)
            logits = scale * gathered(image) @ gathered(text).T
            labels = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
