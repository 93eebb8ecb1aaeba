"""A LightningModule, trained with DDP on as many ranks as the first argument says; `unsharded`:
without its sampler.
"""

import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], _number: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(ranks: int, faults: list[str]) -> None:
    L.seed_everything(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        gradient_clip_val=0.1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler="unsharded" not in faults,
    )
    trainer.fit(Module(), DataLoader(data, batch_size=4, shuffle="unsharded" not in faults))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
