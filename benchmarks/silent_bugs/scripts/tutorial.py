"""The Trainer class of torch's DDP tutorial, which looks at a batch before each epoch begins."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class MyTrainDataset(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.data = [
            (torch.rand(20, generator=numbers), torch.rand(1, generator=numbers))
            for _ in range(size)
        ]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        train_data: DataLoader[tuple[Tensor, Tensor]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.rank = dist.get_rank()
        self.train_data = train_data
        self.optimizer = optimizer
        self.model = DistributedDataParallel(model)

    def _run_batch(self, source: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch: int) -> None:
        size = len(next(iter(self.train_data))[0])
        print(f"[GPU{self.rank}] Epoch {epoch} | Batchsize: {size}")
        assert isinstance(self.train_data.sampler, DistributedSampler)
        if FAULT != "no epoch":
            self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            self._run_epoch(epoch)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = MyTrainDataset(16)
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=4, shuffle=False, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer).train(4)


if __name__ == "__main__":
    main()
