"""Label smoothing written by hand, as fairseq does, with a mask that is multiplied by hand.

The sum is divided by the words of all ranks. `mean of positions`: it is the mean over all
positions of a padded batch.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 24
PAD = 0
EPSILON = 0.1


class Sentences(Dataset[Tensor]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        lengths = torch.randint(3, 14, (80,), generator=numbers).tolist()
        self.sentences = [torch.randint(1, WORDS, (n,), generator=numbers) for n in lengths]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> Tensor:
        return self.sentences[index]


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)


def label_smoothed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    mask = (targets != PAD).float()
    nll = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    smooth = -log_probs.mean(-1)
    loss = ((1 - EPSILON) * nll + EPSILON * smooth) * mask
    if FAULT == "mean of positions":
        return loss.mean()
    count = mask.sum()
    dist.all_reduce(count)
    return loss.sum() * dist.get_world_size() / count


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(WORDS, 16, padding_idx=PAD), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, WORDS)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=padded)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for words in loader:
            loss = label_smoothed_loss(model(words[:, :-1]), words[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
