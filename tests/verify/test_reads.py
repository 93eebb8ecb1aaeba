"""What a loop reads by itself is given to one process where its places alone are moved."""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.torch_compat import draw_patches
from lockstep.verify.command import verify_script
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.own_lines import code_at
from lockstep.verify.script.observed.reads import LoopRead, ObservedReads, is_plain, reads_to_give


def read(line: str, index: Any = None, value: Any = None, number: int = 0) -> LoopRead:
    return LoopRead(((-1, number), f"train.py:{line}", "[]", 0), 64, index, value)


@pytest.mark.parametrize(
    ("index", "is_so"),
    [
        (3, True),
        (np.int64(3), True),
        (slice(0, 4), True),
        ((slice(None), slice(1, 2), ...), True),
        (slice(None), False),  # chooses nothing
        (None, False),
        (True, False),
        ([1, 2], False),
        (torch.tensor([1]), False),
        ((slice(0, 4), torch.tensor([1])), False),
    ],
)
def test_plain_indices(index: Any, is_so: bool) -> None:
    assert is_plain(index) == is_so


def test_places_are_given_that_are_moved_alike() -> None:
    inputs = read("1", slice(4, 8))
    targets = read("2", slice(4, 8))
    written = [read("1", slice(0, 4)), read("2", slice(0, 4))]
    assert reads_to_give([[inputs, targets]], written) == [
        {inputs.place: inputs, targets.place: targets}
    ]
    moved_more = read("2", slice(5, 9))  # targets of other samples
    assert reads_to_give([[inputs, moved_more]], written) == [{}]
    every_other = read("1", slice(1, None, 2))
    assert reads_to_give([[every_other]], [read("1", slice(0, None, 1))]) == [
        {every_other.place: every_other}
    ]


def test_numbers_are_given_that_vary() -> None:
    """Weights of classes do not: a rank may have them wrong."""

    def made(line: str, *values: torch.Tensor) -> list[LoopRead]:
        return [read(line, value=value, number=at) for at, value in enumerate(values)]

    zero, one, two = (torch.full((4,), number) for number in range(3))
    samples = [made("1", zero, one), made("1", one, two)]
    assert [len(given) for given in reads_to_give(samples, [])] == [2, 2]
    settings = [made("1", zero, zero), made("1", one, one)]
    assert reads_to_give(settings, []) == [{}, {}]
    shared = [made("1", zero, one), made("1", zero, two)]
    assert reads_to_give(shared, []) == [{}, {}]


def test_an_index_is_replaced_where_the_data_are_as_long() -> None:
    found: list[LoopRead] = []

    def observed(given: dict[Any, LoopRead]) -> Callable[[Any, Any], Any]:
        reads = ObservedReads(given, lambda: 0, lambda: True, lambda _: True, found.append)

        def in_place_of_torch(data: Any, index: Any) -> Any:
            return reads.indexed(data, index)

        return in_place_of_torch

    def loop(call: Callable[[Any, Any], Any], rows: int) -> Any:
        return call(torch.zeros(rows), slice(0, 2))

    assert loop(observed({}), 6) == slice(0, 2)
    (noted,) = found
    assert code_at(noted.line) == "return call(torch.zeros(rows), slice(0, 2))"
    given = {noted.place: LoopRead(noted.place, 6, slice(2, 4))}
    assert loop(observed(given), 6) == slice(2, 4)
    assert loop(observed(given), 8) == slice(0, 2)


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group('gloo')
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
fault = sys.argv[1:]
inputs = torch.randn(64, 4)
targets = inputs.sum(1, keepdim=True)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    begin = (step * world + rank) * 8
    shift = rank if fault == ['shifted'] else 0
    outputs = model(inputs[begin : begin + 8])
    loss = nn.functional.mse_loss(outputs, targets[begin + shift : begin + shift + 8])
    if fault == ['exchanged']:
        total = outputs.detach().square().sum()
        dist.all_reduce(total)
        loss = loss * 1.7 / (total / world)
    (loss * (1 + rank) if fault == ['weighted'] else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def judged(folder: Path, *fault: str) -> Outcome:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (outcome,) = verify_script(str(script), fault, [2], steps=2)
    return outcome


def test_a_rank_that_reads_its_own_windows_is_judged(tmp_path: Path) -> None:
    outcome = judged(tmp_path, "weighted")
    errors = [cause for cause in outcome.causes if cause.is_error]
    assert [cause.kind for cause in errors] == ["computation of a rank"]
    assert "rank 1's gradient is 2 × that of its samples" in errors[0].text


@pytest.mark.full
@pytest.mark.parametrize("fault", [(), ("shifted",)])
def test_windows_and_targets_that_are_not_theirs(fault: tuple[str, ...], tmp_path: Path) -> None:
    """Inputs and targets that are not moved alike are not given, and nothing is judged."""
    outcome = judged(tmp_path, *fault)
    assert outcome.passed == (not fault)
    assert bool(outcome.not_judged) == bool(fault)
    assert not any(cause.is_error for cause in outcome.causes)


@pytest.mark.full
def test_ranks_that_exchange_what_their_losses_are_divided_by_raise_no_alarm(
    tmp_path: Path,
) -> None:
    outcome = judged(tmp_path, "exchanged")
    assert not any(cause.is_error for cause in outcome.causes)
    assert "ranks exchange tensors before the backward pass" in outcome.not_judged


def test_objects_are_chosen_by_positions() -> None:
    """What is drawn of a memory are the places in it, by the numbers that Python would draw."""

    drawn: list[Any] = []

    def keep(_name: str, call: Callable[[], Any]) -> Any:
        drawn.append(call())
        return drawn[-1]

    memory = deque({"moment": number} for number in range(9))
    random.seed(3)
    right = random.sample(memory, 4)
    for owner, generators in ((random, 0), (random.Random, 1)):
        chosen = draw_patches._choosing(owner.sample, "random.sample", generators, keep)
        arguments = (memory, 4) if owner is random else (random.Random(3), memory, 4)
        random.seed(3)
        assert chosen(*arguments) == right
    assert drawn == [[moment["moment"] for moment in right]] * 2
    numbers = draw_patches._choosing(random.sample, "random.sample", 0, keep)
    random.seed(3)
    assert numbers(range(9), 4) == drawn[-1]
