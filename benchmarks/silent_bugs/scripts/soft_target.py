"""Actor and critic on what each rank remembers of its own game, with targets that follow slowly.

`target of a rank`: rank 1's target of the critic does not follow. `critic unwrapped`: the critic's
gradients are not averaged.
"""

import copy
import itertools
import sys

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
BATCH = 8
SIZE = 100


class Game:
    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.state = self.numbers.normal(size=3).astype(np.float32)

    def play(self, action: float) -> tuple[float, NDArray[np.float32]]:
        self.state = 0.8 * self.state + 0.3 * self.numbers.normal(size=3).astype(np.float32)
        self.state[0] += 0.2 * action
        return -float(np.square(self.state).sum()), self.state.copy()


class Memory:
    def __init__(self) -> None:
        self.states = torch.zeros(SIZE, 3)
        self.actions = torch.zeros(SIZE, 1)
        self.rewards = torch.zeros(SIZE, 1)
        self.following = torch.zeros(SIZE, 3)
        self.count = 0

    def add(
        self, state: NDArray[np.float32], action: float, reward: float, after: NDArray[np.float32]
    ) -> None:
        at = self.count % SIZE
        self.states[at] = torch.from_numpy(state)
        self.actions[at] = action
        self.rewards[at] = reward
        self.following[at] = torch.from_numpy(after)
        self.count += 1

    def sample(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        at = np.random.randint(0, min(self.count, SIZE), size=BATCH)
        return self.states[at], self.actions[at], self.rewards[at], self.following[at]


@torch.no_grad()
def soft_update(target: nn.Module, online: nn.Module) -> None:
    if FAULT == "target of a rank" and dist.get_rank() == 1:
        return
    for mine, other in zip(target.parameters(), online.parameters(), strict=True):
        mine.mul_(0.9).add_(0.1 * other)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    game = Game(seed=rank)
    memory = Memory()
    torch.manual_seed(0)
    np.random.seed(100 + rank)
    actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1), nn.Tanh())
    critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    target_critic = copy.deepcopy(critic)
    trained_actor = DistributedDataParallel(actor)
    trained_critic: nn.Module = critic
    if FAULT != "critic unwrapped":
        trained_critic = DistributedDataParallel(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for number in itertools.count():
        state = game.state.copy()
        with torch.no_grad():
            action = float(actor(torch.from_numpy(state)))
        action += 0.1 * float(np.random.normal())
        memory.add(state, action, *game.play(action))
        if number < 16:
            continue
        states, actions, rewards, after = memory.sample()
        with torch.no_grad():
            wanted = rewards + 0.9 * target_critic(torch.cat([after, actor(after)], 1))
        loss = F.mse_loss(trained_critic(torch.cat([states, actions], 1)), wanted)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        loss = -critic(torch.cat([states, trained_actor(states)], 1)).mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        soft_update(target_critic, critic)
        if number > 24:
            break


if __name__ == "__main__":
    main()
