"""The module in which positions of a sequence meet is the earliest of all ranks."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lockstep.parallel.context.attention import SequenceCut
from lockstep.randomness import RandomState
from lockstep.verify.modes import CompleteSequences
from tests.ranks import run_ranks

LENGTH = 3  # of each rank's part: two ranks get one chunk each, and rank 0's begins the sequence


class Shift(nn.Module):
    """Adds the position before to each: on a part that begins the sequence nothing is missing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def found_module(names: list[str]) -> str:
    """What a rank is told of a model whose modules are named so."""
    modules = {"shift": Shift(), "linear": nn.Linear(4, 4), "mean": Mean()}
    torch.manual_seed(0)
    nn.init.normal_(modules["linear"].weight)
    model = nn.Sequential(*(modules[name] for name in names))
    context = SequenceCut(torch.distributed.group.WORLD, None)
    random_state = RandomState(0, torch.device("cpu"))
    placed = SimpleNamespace(context=context, parts=[model], random_state=random_state)
    trainer = SimpleNamespace(placed=placed)
    complete = CompleteSequences(trainer, {id(module): name for name, module in modules.items()})
    model(context.part(torch.randn(2, 2 * LENGTH, 4)))
    return complete.module


def found_modules() -> list[str]:
    return [found_module(names) for names in (["linear", "shift", "mean"], ["mean"], ["linear"])]


def test_the_first_module_that_deviates_on_any_rank_is_named() -> None:
    """Rank 0 computes the shift rightly, and sees that the mean is wrong, which comes later."""
    assert run_ranks(found_modules, 2) == [["shift", "mean", ""]] * 2
