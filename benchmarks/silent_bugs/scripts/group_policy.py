"""GRPO: each prompt gets a group of completions, whose rewards are compared within the group.

`spread of the batch`: advantages are divided by the deviation over all rewards of a rank's batch.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 10
GROUP = 4
NEW = 5


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.cell = nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.words(words))[0])
        return logits


@torch.no_grad()
def completed(policy: nn.Module, prompts: Tensor) -> Tensor:
    words = prompts.repeat_interleave(GROUP, dim=0)
    for _ in range(NEW):
        chances = policy(words)[:, -1].softmax(-1)
        words = torch.cat([words, torch.multinomial(chances, 1)], dim=1)
    return words


def reward(words: Tensor) -> Tensor:
    new = words[:, -NEW:]
    return (new == words[:, :1]).float().sum(-1) + 0.1 * (new > WORDS // 2).float().sum(-1)


def advantages(rewards: Tensor) -> Tensor:
    groups = rewards.view(-1, GROUP)
    spread = groups.std(dim=1, keepdim=True)
    if FAULT == "spread of the batch":
        spread = rewards.std()
    return ((groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-2)).flatten()


def log_likelihood(policy: nn.Module, words: Tensor) -> Tensor:
    logits = policy(words[:, :-1]).log_softmax(-1)
    each = logits.gather(-1, words[:, 1:, None]).squeeze(-1)
    return each[:, -NEW:]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = torch.randint(0, WORDS, (64, 3), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(prompts)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(1000 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            words = completed(policy, batch)
            advantage = advantages(reward(words))[:, None]
            mine = log_likelihood(model, words)
            with torch.no_grad():
                others = log_likelihood(reference, words)
            ratio = (mine - mine.detach()).exp()
            divergence = (others - mine).exp() - (others - mine) - 1
            loss = -(ratio * advantage).mean() + 0.04 * divergence.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
