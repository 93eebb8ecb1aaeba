"""nanoGPT's loop: crops of a memory map at random places, by a seed for each rank, accumulated.

`same seed`: all ranks have one seed. `never synchronised`: no micro-batch is the one that reduces.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 24
BATCH = 4
LENGTH = 8
ACCUMULATED = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.cell = nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.cell(self.words(words))[0])
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def prepared() -> Path:
    path = Path(tempfile.mkdtemp()) / "train.bin"
    np.random.default_rng(1).integers(0, WORDS, 4000).astype(np.uint16).tofile(path)
    return path


def get_batch(path: Path) -> tuple[Tensor, Tensor]:
    data = np.memmap(path, dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - LENGTH, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in at])
    return x, y


def main() -> None:
    dist.init_process_group("gloo")
    seed_offset = 0 if FAULT == "same seed" else dist.get_rank()
    torch.manual_seed(1337 + seed_offset)
    path = prepared()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    x, y = get_batch(path)
    for _step in range(8):
        for micro_step in range(ACCUMULATED):
            last = micro_step == ACCUMULATED - 1
            model.require_backward_grad_sync = last and FAULT != "never synchronised"
            _, loss = model(x, y)
            loss = loss / ACCUMULATED
            x, y = get_batch(path)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
