"""`lockstep/torch_compat/script_patches.py`: calls of a script are seen, in a process
of its own.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_value_
from torch.utils.data import DataLoader, IterableDataset

from lockstep.torch_compat import draw_patches, script_patches
from tests.ranks import run_ranks


def test_backward_clipping_and_loaders_are_seen() -> None:
    # not in a fork of this process, in which torch may have run backward passes in threads
    (found,) = run_ranks(observed, 1)
    assert found == [
        ("backward", 3.0),
        ("clip", 1),
        ("clip", 1),
        ("made", 2),
        [[0, 1], [2]],
        ("made", 2),
    ]


def observed() -> list[Any]:
    found: list[Any] = []

    def backward(call: Any, loss: Any) -> Any:
        found.append(("backward", float(loss)))
        return call()

    def clipping(call: Any, parameters: Any) -> Any:
        found.append(("clip", len(parameters)))
        return call()

    script_patches.patch_backward(backward)
    script_patches.patch_clipping(clipping)
    script_patches.patch_loaders(
        lambda given: given.update(batch_size=2),
        lambda loader: found.append(("made", loader.batch_size)),
    )

    def order(_loader: Any, positions: Any) -> Any:
        found.append(list(positions))
        return iter(found[-1])

    script_patches.patch_orders(order)
    model = torch.nn.Linear(1, 1, bias=False)
    (model.weight.sum() * 0 + 3).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert clip_grad_value_ is not torch.nn.utils.clip_grad_value_
    torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=1.0)
    assert len(next(iter(DataLoader([1, 2, 3], 1)))) == 2  # type: ignore[arg-type]
    next(iter(DataLoader(Stream())))  # has no positions
    return found


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_modules_modes_seeds_and_schedules_are_seen_and_put_back() -> None:
    found: list[Any] = []
    undo = [
        script_patches.patch_modules(lambda module: found.append(type(module).__name__)),
        script_patches.patch_modes(lambda module: found.append(("eval", type(module).__name__))),
        draw_patches.patch_seeds(found.append),
        script_patches.patch_schedules(lambda schedule: found.append(schedule.last_epoch)),
    ]
    try:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        model.eval().train()
        torch.manual_seed(3)
        random.seed()
        np.random.seed(seed=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        schedule.step()
    finally:
        for one in undo:
            one()
    torch.manual_seed(5)
    # the parts of a module that is put into evaluation mode are not reported by themselves
    expected = ["Linear", "Sequential", ("eval", "Sequential"), (3,), (), (4,), 0, 1]
    assert found == expected


def test_what_is_looked_at_for_a_plateau() -> None:
    (found,) = run_ranks(looked_for, 1)
    assert found == [0.5, 0.25]


def looked_for() -> list[float]:
    found: list[float] = []
    script_patches.patch_plateaus(found.append)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    schedule.step(0.5)
    schedule.step(torch.tensor(0.25))  # type: ignore[arg-type]
    return found
