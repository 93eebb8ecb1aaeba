"""A loop of Accelerate as its documentation writes it, with dropout and masks of unequal lengths;
`right`: mended.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORDS = 50
LENGTH = 12
SAMPLES = 96
IGNORED = -100


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, WORDS)

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        logits = self.head(self.dropout(self.embedding(inputs)))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction=reduction
        )


def main(right: bool) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=numbers)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=numbers)
    targets = torch.where(torch.arange(LENGTH) < lengths, inputs.roll(-1, 1), IGNORED)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if right:
        set_seed(42, device_specific=True)
    for batch, wanted in loader:
        with accelerator.accumulate(model):
            if right:
                count = accelerator.gather((wanted != IGNORED).sum()).sum()
                loss = model(batch, wanted, "sum") * accelerator.num_processes / count
            else:
                loss = model(batch, wanted)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main("right" in sys.argv)
