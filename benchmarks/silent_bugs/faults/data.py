"""Faults of samples, and of what the loss is a mean over."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.silent_bugs.faults.models import LENGTH, WIDTH, Net, Tokens, Vectors, net
from benchmarks.silent_bugs.faults.registry import fault, on_rank_1, on_ranks
from lockstep.machine.environment import rank_facts
from lockstep.verify import Subject


class Weighted(Net):
    """Divides its loss by something that its count does not say."""

    def loss(self, logits: Tensor, batch: Any) -> Tensor:
        weights = 1.0 + (batch["targets"] % 3).float()
        each = functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
        return (each * weights).sum() / weights.sum() * super().count(batch)


@fault("loss normalisation", names="count|mean")
def loss_that_is_a_mean_over_something_else() -> Subject:
    return net(Weighted())


class MeanOfAll(nn.Module):
    """Takes the mean over masked targets, and does not say over how many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = (y > 0.3).float()
        return ((self.inner(x) - y).square() * mask).sum() / mask.sum()


@fault("loss normalisation", names="count|mean")
def masked_mean_without_a_count() -> Subject:
    return Subject(MeanOfAll(), Vectors())


@fault("data order", names="micro-batches")
def labels_of_another_sample_on_ranks() -> Subject:
    class Other(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            found = super().__getitem__(index)
            return (
                {**found, "targets": super().__getitem__(index + 1)["targets"]}
                if on_ranks()
                else found
            )

    return Subject(Net(), Other())


@fault("data order", names="micro-batches")
def every_rank_reads_the_same_samples() -> Subject:
    class Same(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return super().__getitem__(index % 4 if on_ranks() else index)

    return Subject(Net(), Same())


@fault("loss normalisation", names="targets")
def mean_of_means_on_ranks() -> Subject:
    class Means(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            total = super().loss(logits, batch)
            return total / super().count(batch) if on_ranks() else total

        def count(self, batch: Any) -> Any:
            return 1 if on_ranks() else super().count(batch)

    return net(Means())


@fault("loss normalisation", names="targets rank_1")
def padding_counted_as_targets_on_rank_1() -> Subject:
    class Padded(Net):
        def count(self, batch: Any) -> Any:
            return batch["targets"].numel() if on_rank_1() else super().count(batch)

    return net(Padded())


@fault("data order", names="micro-batches")
def augmentation_drawn_by_each_rank() -> Subject:
    class Masked(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            found = super().__getitem__(index)
            numbers = random.Random(100 * rank_facts().rank + index)
            found["input_ids"][numbers.randrange(LENGTH)] = 0
            return found

    return Subject(Net(), Masked())
