"""A LightningModule as Lightning's examples have it."""

import sys
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import classifier, images


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def training_step(self, batch: list[Tensor], _number: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


L.seed_everything(0)
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(sys.argv[1]),
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(images(), batch_size=8, shuffle=True))
