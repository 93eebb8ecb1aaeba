"""Small models and data in which faults are planted, and what plants one in a trainer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from lockstep.trainer import Trainer
from lockstep.verify import Subject

VOCAB = 31
LENGTH = 8
WIDTH = 16


class Tokens(Dataset[dict[str, Tensor]]):
    """Samples in which up to four targets do not count."""

    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        targets = ids[1:].clone()
        targets[: index % 5] = -100
        return {"input_ids": ids[:-1], "targets": targets}


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of vectors."""

    deterministic = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x, torch.tanh(x.roll(1)) + 0.1 * torch.randn(WIDTH, generator=generator)


class Block(nn.Module):
    """A layer of a small language model, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return x + y.cumsum(1) / LENGTH


class Net(nn.Module):
    """A small language model."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch["input_ids"],)

    def positions(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(self.positions(ids))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, logits: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )

    def count(self, batch: Any) -> Any:
        return (batch["targets"] != -100).sum()


class Chaos(nn.Module):
    """Sixty steps of a map, each of which magnifies a difference."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = torch.sin(3 * self.inner(x))
        y: Tensor = self.head(x)
        return y


class Stem(nn.Module):
    """Token and position embeddings."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.embed = model.embed
        self.place = model.place

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        return x


class Chain(Net):
    """A model that is its segments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem(self)
        del self.embed, self.place

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def segments(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("stem", self.stem), *blocks, ("head", self.head)]


def net(
    model: nn.Module | None = None, prepare: Callable[[Trainer], None] = lambda _: None
) -> Subject:
    return Subject(Net() if model is None else model, Tokens(), prepare=prepare)


def vectors(model: nn.Module, **rest: Any) -> Subject:
    return Subject(model, Vectors(), **{"loss_fn": nn.MSELoss(), **rest})


class Taught(nn.Module):
    """A student, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.student(x), self.teacher(x) + y)


def follow_student(trainer: Trainer) -> None:
    named = trainer.placed.parameters

    def follow(_updates: int) -> None:
        for name in ("weight", "bias"):
            named[f"teacher.{name}"].mul_(0.9).add_(0.1 * named[f"student.{name}"])

    trainer.step.after_update.append(follow)


def after_reduction(change: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    """Change gradients once they are reduced."""

    def prepare(trainer: Trainer) -> None:
        trainer.placed.finishers.append(lambda: change(trainer))

    return prepare


def gradient(trainer: Trainer, name: str) -> Tensor:
    found = trainer.placed.parameters[name].grad
    assert found is not None
    return found
