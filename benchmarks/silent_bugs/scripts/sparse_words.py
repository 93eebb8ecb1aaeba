"""Words in their context, as word2vec: sparse gradients of embeddings, and negatives drawn by rank.

`same negatives`: ranks draw the same negatives for other samples.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 50
NEGATIVES = 5


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.contexts = nn.Embedding(WORDS, 8, sparse=True)

    def forward(self, centres: Tensor, contexts: Tensor, negatives: Tensor) -> Tensor:
        centre = self.words(centres)
        right = (centre * self.contexts(contexts)).sum(-1)
        wrong = (self.contexts(negatives) @ centre[..., None]).squeeze(-1)
        loss: Tensor = -(F.logsigmoid(right) + F.logsigmoid(-wrong).sum(-1)).mean()
        return loss


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(SkipGram())
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    if FAULT != "same negatives":
        torch.manual_seed(30 + dist.get_rank())
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randint(0, WORDS, (128,), generator=numbers),
        torch.randint(0, WORDS, (128,), generator=numbers),
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for centres, contexts in loader:
            negatives = torch.randint(0, WORDS, (len(centres), NEGATIVES))
            loss = model(centres, contexts, negatives)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
