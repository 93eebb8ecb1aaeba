"""Lightning with optimization by hand: accumulation, clipping and a schedule in training_step.

`undivided`: the losses of micro-batches are not divided by their number.
"""

import os
import sys

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ACCUMULATED = 2


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        inputs, targets = batch
        loss = F.cross_entropy(self.body(inputs), targets)
        if FAULT != "undivided":
            loss = loss / ACCUMULATED
        self.manual_backward(loss)
        if (number + 1) % ACCUMULATED == 0:
            optimizer = self.optimizers()
            assert isinstance(optimizer, lightning.pytorch.core.optimizer.LightningOptimizer)
            self.clip_gradients(optimizer, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    lightning.seed_everything(0)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 8, generator=numbers), torch.randint(0, 4, (96,), generator=numbers)
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=4, shuffle=True))


if __name__ == "__main__":
    main()
