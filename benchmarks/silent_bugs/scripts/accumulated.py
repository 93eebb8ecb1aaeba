"""A loop with accumulation whose model returns its loss, as those of transformers do.

`undivided`: nothing divides the micro-batches' mean losses. `own mean`: the loss is a mean of the
script's own.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WAYS = sys.argv[1:]
ACCUMULATE = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(F.gelu(self.body(inputs)))
        if "own mean" in WAYS:
            picked = logits.log_softmax(-1).gather(1, labels[:, None])
            return {"loss": 1.0 * -picked.sum() / len(labels), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 8, generator=numbers), torch.randint(0, 4, (96,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        for number, (inputs, labels) in enumerate(loader, start=1):
            loss = model(inputs, labels)["loss"]
            if "undivided" not in WAYS:
                loss = loss / ACCUMULATE
            loss.backward()
            if number % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
