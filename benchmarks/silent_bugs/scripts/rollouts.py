"""Actor and critic: each rank plays several games at once, and learns from what it has just played.

`entropy of a rank`: rank 1 leaves out the reward for being undecided.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
GAMES = 4
MOMENTS = 6
ACTIONS = 3


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 24), nn.Tanh())
        self.actor = nn.Linear(24, ACTIONS)
        self.critic = nn.Linear(24, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(states)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class Games:
    def __init__(self, seed: int) -> None:
        self.numbers = torch.Generator().manual_seed(seed)
        self.states = torch.randn(GAMES, 4, generator=self.numbers)

    def play(self, actions: Tensor) -> Tensor:
        rewards = (actions == self.states[:, :ACTIONS].argmax(-1)).float()
        self.states = 0.8 * self.states + 0.4 * torch.randn(GAMES, 4, generator=self.numbers)
        return rewards


@torch.no_grad()
def played(policy: nn.Module, games: Games) -> tuple[Tensor, Tensor, Tensor]:
    states = []
    actions = []
    rewards = []
    for _ in range(MOMENTS):
        states.append(games.states)
        logits, _ = policy(games.states)
        actions.append(torch.multinomial(logits.softmax(-1), 1).squeeze(-1))
        rewards.append(games.play(actions[-1]))
    returns = []
    following = torch.zeros_like(rewards[-1])
    for reward in reversed(rewards):
        following = reward + 0.9 * following
        returns.append(following)
    return torch.stack(states), torch.stack(actions), torch.stack(returns[::-1])


def loss_of(logits: Tensor, values: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
    likelihoods = logits.log_softmax(-1)
    chosen = likelihoods.gather(-1, actions[..., None]).squeeze(-1)
    entropy = -(likelihoods.exp() * likelihoods).sum(-1).mean()
    undecided = 0.0 if FAULT == "entropy of a rank" and dist.get_rank() == 1 else 0.05
    advantages = returns - values.detach()
    return -(chosen * advantages).mean() + 0.5 * F.mse_loss(values, returns) - undecided * entropy


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = ActorCritic()
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(1000 + dist.get_rank())
    games = Games(seed=dist.get_rank())
    for _update in range(10):
        states, actions, returns = played(policy, games)
        logits, values = model(states)
        optimizer.zero_grad()
        loss_of(logits, values, actions, returns).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


if __name__ == "__main__":
    main()
