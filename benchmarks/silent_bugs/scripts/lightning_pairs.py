"""Lightning with pairs: a rank's own features are compared with the other views of all ranks.

`no gradient`: these are gathered without the gradients that come back to them.
"""

import os
import sys

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Pairs(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))

    def keys_of_all(self, keys: Tensor) -> Tensor:
        gathered = self.all_gather(keys, sync_grads=FAULT != "no gradient")
        assert isinstance(gathered, Tensor)
        return gathered.reshape(-1, keys.shape[-1])

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        queries, keys = F.normalize(self.body(torch.cat(batch)), dim=-1).chunk(2)
        similarity = queries @ self.keys_of_all(keys).T / 0.3
        positives = torch.arange(len(queries)) + self.global_rank * len(queries)
        return F.cross_entropy(similarity, positives)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    lightning.seed_everything(0)
    numbers = torch.Generator().manual_seed(1)
    first = torch.randn(96, 8, generator=numbers)
    data = TensorDataset(first, first + 0.2 * torch.randn(96, 8, generator=numbers))
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
    trainer.fit(Pairs(), DataLoader(data, batch_size=4, shuffle=True, drop_last=True))


if __name__ == "__main__":
    main()
