"""MoCo: a momentum encoder inside of the model fills a queue of keys that serve as negatives.

`own keys`: each rank puts its own keys into the queue, and not those of all.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))


def of_all_ranks(keys: Tensor) -> Tensor:
    parts = [torch.ones_like(keys) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, keys)
    return torch.cat(parts)


class MoCo(nn.Module):
    queue: Tensor
    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q = encoder()
        self.encoder_k = encoder().requires_grad_(False)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True)
        for query, key in pairs:
            key.mul_(0.9).add_(query, alpha=0.1)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        if FAULT != "own keys":
            keys = of_all_ranks(keys)
        begin = int(self.position)
        self.queue[:, begin : begin + len(keys)] = keys.T
        self.position[0] = (begin + len(keys)) % self.queue.shape[1]

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        queries = F.normalize(self.encoder_q(first), dim=1)
        with torch.no_grad():
            self.follow()
            keys = F.normalize(self.encoder_k(second), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone()], dim=1) / 0.2
        self.enqueue(keys)
        return logits


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.samples = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        return sample + 0.1 * torch.randn(12), sample + 0.1 * torch.randn(12)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(MoCo(), broadcast_buffers=FAULT != "own keys")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    data = TwoViews()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for first, second in loader:
            logits = model(first, second)
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
