"""What the author of an addition forgets is told in one error, with the line to write."""

import pytest
import torch
from torch import nn

from lockstep.checkpoint.storage import check_storage
from lockstep.config import ObjectSpec
from lockstep.errors import RunError, UsageError
from lockstep.models.protocol import objective_of
from lockstep.optim import Schedule, check_optimizer, check_schedule
from lockstep.parallel.initial import FirstValues, materialise, to_empty

HERE = "tests.seams.test_mistakes"


class NoStorage:
    pass


class NoRate(torch.optim.SGD):
    def __init__(self, params: object) -> None:
        pass


def one(updates: int) -> float:
    return 1.0


def nothing(updates: int, schedule: Schedule) -> None:
    pass


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        nn.init.normal_(self.embed.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).sum()  # type: ignore[no-any-return]


def test_each_mistake_is_told_with_what_to_write() -> None:
    with pytest.raises(UsageError, match="NoStorage is a class which is not a storage"):
        check_storage(ObjectSpec(name=f"{HERE}:NoStorage"))
    with pytest.raises(UsageError, match=r"is not a subclass of torch\.optim\.Optimizer"):
        check_optimizer(f"{HERE}:NoStorage", {})
    with pytest.raises(UsageError, match="NoRate takes no argument 'lr'"):
        check_optimizer(f"{HERE}:NoRate", {})
    with pytest.raises(UsageError, match=r"can't be called with \(updates, schedule\)"):
        check_schedule(Schedule(f"{HERE}:one", 10))
    with pytest.raises(UsageError, match="returned None after 0 updates"):
        check_schedule(Schedule(f"{HERE}:nothing", 10))
    with pytest.raises(RunError, match="returned None after 3 updates"):
        Schedule(f"{HERE}:nothing", 10).factor(3)
    batch = {"input_ids": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(
        UsageError, match="forward of the model has no argument named like a key of the batch"
    ):
        objective_of(Tied(), nn.L1Loss()).of(Tied(), batch)


def test_parameters_that_are_tied_by_assignment_stay_one() -> None:
    with torch.device("meta"):
        model = Tied()
    first = FirstValues(model, 1)
    to_empty(model, torch.device("cpu"))
    assert model.head.weight is model.embed.weight
    materialise(model, first)
