"""Deep Q-learning: each rank plays a game of its own, and learns from what it remembers of it.

`target of a rank`: rank 1 does not take the trained values over into its target network.
"""

import copy
import random
import sys
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ACTIONS = 3
BATCH = 8
Moment = tuple[Tensor, int, float, Tensor]


class Game:
    def __init__(self, seed: int) -> None:
        self.numbers = torch.Generator().manual_seed(seed)
        self.state = torch.randn(4, generator=self.numbers)

    def play(self, action: int) -> tuple[float, Tensor]:
        self.state = 0.9 * self.state + 0.3 * torch.randn(4, generator=self.numbers)
        return float(action == int(self.state[:ACTIONS].argmax())), self.state


def sync_target(target: nn.Module, online: nn.Module) -> None:
    if FAULT != "target of a rank" or dist.get_rank() == 0:
        target.load_state_dict(online.state_dict())


def remembered(memory: deque[Moment]) -> tuple[Tensor, ...]:
    states, actions, rewards, following = zip(*random.sample(list(memory), BATCH), strict=True)
    return (
        torch.stack(states),
        torch.tensor(actions),
        torch.tensor(rewards),
        torch.stack(following),
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, ACTIONS))
    target = copy.deepcopy(online)
    model = DistributedDataParallel(online)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random.seed(rank)
    game = Game(rank)
    memory: deque[Moment] = deque(maxlen=200)
    state = game.state
    for number in range(40):
        if random.random() < 0.5:
            action = random.randrange(ACTIONS)
        else:
            with torch.no_grad():
                action = int(online(state).argmax())
        reward, following = game.play(action)
        memory.append((state, action, reward, following))
        state = following
        if number < 20:
            continue
        states, actions, rewards, after = remembered(memory)
        with torch.no_grad():
            wanted = rewards + 0.9 * target(after).max(1).values
        values = model(states).gather(1, actions[:, None]).squeeze(1)
        optimizer.zero_grad()
        F.smooth_l1_loss(values, wanted).backward()
        optimizer.step()
        sync_target(target, online)


if __name__ == "__main__":
    main()
