"""A LightningModule with validation, with the Trainer's defaults: it begins with a sanity check."""

import os
import sys

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        inputs, targets = batch
        outputs = self(inputs)
        if FAULT == "detached":
            outputs = self.head(self.body(inputs).detach())
        loss = nn.functional.cross_entropy(outputs, targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _index: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def samples(number: int, seed: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 8, generator=numbers)
    return TensorDataset(inputs, torch.randint(0, 4, (number,), generator=numbers))


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        use_distributed_sampler=FAULT != "unsharded",
        logger=False,
        enable_checkpointing=False,
    )
    training = DataLoader(samples(64, 1), batch_size=4, shuffle=True)
    trainer.fit(Classifier(), training, DataLoader(samples(16, 2), batch_size=4))


if __name__ == "__main__":
    main()
