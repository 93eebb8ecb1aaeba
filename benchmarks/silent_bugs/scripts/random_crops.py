"""A language model on random crops of one long text, read without a loader, as nanoGPT reads.

`sum of tokens`: the loss is summed. `same seed`: all ranks draw the same crops.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 24
LENGTH = 8
BATCH = 8  # of all ranks


def get_batch(text: Tensor, size: int) -> tuple[Tensor, Tensor]:
    begins = torch.randint(len(text) - LENGTH, (size,))
    inputs = torch.stack([text[i : i + LENGTH] for i in begins])
    targets = torch.stack([text[i + 1 : i + 1 + LENGTH] for i in begins])
    return inputs, targets


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    net = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, WORDS))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    text = torch.randint(0, WORDS, (400,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1337 if FAULT == "same seed" else 1337 + rank)
    for _step in range(10):
        inputs, targets = get_batch(text, BATCH // dist.get_world_size())
        logits = model(inputs)
        reduction = "sum" if FAULT == "sum of tokens" else "mean"
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
