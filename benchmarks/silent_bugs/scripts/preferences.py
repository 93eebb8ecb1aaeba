"""Direct preference optimisation in plain DDP: pairs of answers, a frozen reference model.

Each answer's log-probability is a sum over its own tokens, so the mean over pairs is right.
`mean of tokens`: a supervised loss is added, whose mean is over a rank's own tokens.
`other reference`: rank 1's reference model is another one.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 24
IGNORED = -100


class Pairs(Dataset[dict[str, list[int]]]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        lengths = torch.randint(3, 9, (64, 2), generator=numbers).tolist()
        self.pairs = [
            [torch.randint(1, WORDS, (length,), generator=numbers).tolist() for length in pair]
            for pair in lengths
        ]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        chosen, rejected = self.pairs[index]
        return {"chosen": chosen, "rejected": rejected}


def collate(samples: list[dict[str, list[int]]]) -> Tensor:
    answers = [sample["chosen"] for sample in samples] + [sample["rejected"] for sample in samples]
    return nn.utils.rnn.pad_sequence([torch.tensor(words) for words in answers], batch_first=True)


def log_probabilities(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1]).log_softmax(-1)
    picked = logits.gather(2, words[:, 1:, None])[..., 0]
    return (picked * (words[:, 1:] != 0)).sum(-1)


def preference_loss(ours: Tensor, theirs: Tensor) -> Tensor:
    chosen, rejected = (ours - theirs).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, WORDS))
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    if FAULT == "other reference" and dist.get_rank() == 1:
        reference[0].weight.data.mul_(0.5)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Pairs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for words in loader:
            with torch.no_grad():
                theirs = log_probabilities(reference, words)
            ours = log_probabilities(model, words)
            loss = preference_loss(ours, theirs)
            if FAULT == "mean of tokens":
                tokens = (words[: len(words) // 2, 1:] != 0).sum()
                loss = loss - ours.chunk(2)[0].sum() / tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
