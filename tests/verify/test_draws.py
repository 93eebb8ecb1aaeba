"""Random numbers of a loop are joined as the samples of ranks are, and compared over ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.verify.script.observed.draws import LoopDraw, drawn_alike, drawn_apart, join


def draw(value: Any, name: str = "torch.randn", number: int = 0) -> LoopDraw:
    return LoopDraw((0, 0), "train.py:40", name, number, value, True)


def test_rows_of_ranks_are_joined_in_the_order_of_their_samples() -> None:
    ranks = [torch.randn(2, 3), torch.randn(2, 3)]
    joined = join([draw(each) for each in ranks], (4, 3), grows=False)
    assert torch.equal(joined, torch.cat(ranks))
    arrays = [np.arange(2.0), np.arange(3.0)]
    joined = join([draw(each, "numpy.random.rand") for each in arrays], (5,), grows=False)
    assert joined.tolist() == [0, 1, 0, 1, 2]


def test_each_permutation_stays_within_its_samples() -> None:
    ranks = [torch.tensor([1, 0]), torch.tensor([2, 0, 1])]
    joined = join([draw(each, "torch.randperm") for each in ranks], (5,), grows=False)
    assert joined.tolist() == [1, 0, 4, 2, 3]
    lists = [[1, 0], [0, 1]]
    joined = join([draw(each, "random.shuffle") for each in lists], (4,), grows=False)
    assert joined == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("values", "shape", "grows", "right"),
    [
        ([0.3, 0.3], (), False, 0.3),  # a number that ranks share
        ([0.3, 0.4], (), False, None),  # one of each rank, for a whole batch
        ([[1, 2], [1, 2]], (2,), False, [1, 2]),
        ([[1, 2], [3, 4]], (2,), False, None),
        ([[1, 2], [3, 4]], (2,), True, [1, 2, 3, 4]),  # positions of samples that it draws itself
        ([[1, 2], [3, 4]], (3,), False, None),
    ],
)
def test_what_does_not_fit_is_not_joined(
    values: list[Any], shape: tuple[int, ...], grows: bool, right: Any
) -> None:
    assert join([draw(value) for value in values], shape, grows=grows) == right


def test_rows_that_all_ranks_draw_alike_are_found() -> None:
    mine = [draw(torch.arange(8.0) + number, number=number) for number in range(2)]
    other = [draw(torch.arange(8.0) - number, number=number) for number in range(2)]
    rows = {(0, 0): [8]}  # of the batch whose samples differ
    assert drawn_alike([mine, mine], rows) == ["torch.randn at train.py:40"]
    assert drawn_alike([mine, other], rows) == []
    assert drawn_alike([mine, mine], {(0, 0): [4]}) == []  # of the whole batch: may be shared
    for_gradients = [replace(each, after=True) for each in mine]
    assert drawn_alike([for_gradients, for_gradients], rows) == []
    of_two = [*mine, draw(torch.ones(3), number=2)]  # for two parameters
    assert drawn_alike([of_two, of_two], rows, [(8,), (3,)]) == []
    assert drawn_alike([of_two, of_two], rows, [(8,)]) == ["torch.randn at train.py:40"]
    data = [replace(each, batch=(-1, 0)) for each in mine]  # made before any batch is read
    assert drawn_alike([data, data], rows) == []
    assert drawn_apart([mine, other]) == ["torch.randn at train.py:40"]
    assert drawn_apart([mine, mine]) == []
