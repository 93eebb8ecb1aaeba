"""The loop of pytorch/examples' distributed/minGPT-ddp: dropout, clipping, AdamW, a GPT
of its own.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import WORDS


class GPT(nn.Module):
    def __init__(self, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(
                    width, 2, 64, dropout=0.1, batch_first=True, norm_first=True
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


init_process_group("gloo")
ids = torch.randint(0, WORDS, (128, 17), generator=torch.Generator().manual_seed(1))
data = TensorDataset(ids[:, :-1], ids[:, 1:])
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
model.train()
for inputs, targets in loader:
    loss = model(inputs, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
