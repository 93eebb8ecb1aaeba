"""Data that never draw are not seeded on and on; what begins to draw late gets its seeds."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.reader import Reader, ReadFailure, ReadRequest
from lockstep.host_draws import have_moved, host_generators, restore_host_generators

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.rand()),
    "normal": lambda: float(np.random.randn()),
    "torch": lambda: torch.rand(()).item(),
    "seeds": lambda: random.seed(5) or random.random(),  # type: ignore[func-returns-value]
}
LATE = 5  # the first sample that draws


class Data(Dataset[Tensor]):
    """Some samples draw; those above `fails` raise after it."""

    def __init__(self, draw: Callable[[], float], since: int = LATE, fails: int = 99) -> None:
        self._draw = draw
        self._since = since
        self._fails = fails
        self.read: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        drawn = self._draw() if index >= self._since else 0.0
        if index >= self._fails and drawn < 2.0:
            raise ValueError(f"{drawn}")
        return torch.tensor([index, drawn], dtype=torch.float64)


def noisy(samples: list[Tensor]) -> Tensor:
    """Draw for micro-batches that have sample 8."""
    noise = np.random.randn() if any(sample[0] == 8 for sample in samples) else 0.0
    return torch.stack(samples) + noise


def outer() -> tuple[Any, ...]:
    """What a caller's loop would draw next."""
    return random.random(), np.random.randn(), torch.rand(()).item()


def batches(data: Data, collate: Any = None, *, always: bool = False) -> list[Any]:
    """Two epochs of micro-batches of three, with draws of the caller's between them."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    reader = Reader(data, collate, 7, 0)
    found: list[Any] = []
    for step in range(8):
        if always:
            reader._drew_on_host = True
        indices = [3 * (step % 4) + k for k in range(3)]
        found += [reader[ReadRequest(step, step // 4, 0, indices)], outer()]
    return found


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("collate", [None, noisy], ids=["plain", "noisy"])
@pytest.mark.parametrize("since", [0, LATE, 99])
@pytest.mark.parametrize("name", DRAWS)
def test_every_sample_draws_what_it_would_with_seeds_for_all(
    name: str, since: int, collate: Any
) -> None:
    expected = batches(Data(DRAWS[name], since), collate, always=True)
    found = batches(Data(DRAWS[name], since), collate)
    assert all(equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_sample_that_draws_before_it_fails_fails_with_its_seeds() -> None:
    expected, found = (
        batches(Data(random.random, fails=10), always=always)[6] for always in (True, False)
    )
    assert isinstance(found, ReadFailure)
    assert isinstance(expected, ReadFailure)
    assert (found.what, found.why) == (expected.what, expected.why)


def test_only_the_micro_batch_that_draws_first_is_read_again() -> None:
    data = Data(random.random)
    batches(data)
    assert data.read == [0, 1, 2, 3, 4, 5, 3, 4, 5, *range(6, 12), *range(12)]


def test_data_that_never_draw_are_seeded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    python = random.seed
    monkeypatch.setattr(random, "seed", lambda key: (seeds.append(key), python(key)))
    batches(Data(random.random, since=99))
    assert len(seeds) == 1 + 4  # the caller's, and three samples and a collation


def test_data_that_draw_from_torch_alone_are_read_once() -> None:
    data = Data(DRAWS["torch"], since=0)
    batches(data)
    assert data.read == [*range(12), *range(12)]


@pytest.mark.parametrize("name", [name for name in DRAWS if name != "torch"])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_draw_moves_the_generators_and_is_undone(name: str, kept: int) -> None:
    """`kept`: a normal variate of NumPy's waits for the next call."""
    random.seed(1)
    np.random.seed(1)
    for _ in range(kept):
        np.random.randn()
    before = host_generators()
    assert not have_moved(before)
    assert host_generators()[1] is before[1]
    DRAWS[name]()
    assert have_moved(before)
    restore_host_generators(before)
    found = outer()[:2]
    restore_host_generators(before)
    assert found == outer()[:2]


def test_another_generator_under_numpys_functions_counts_as_one_that_is_used() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert have_moved(host_generators())
        expected = batches_of_another(always=True)
        assert expected == batches_of_another(always=False)
    finally:
        np.random.set_bit_generator(usual)


def batches_of_another(*, always: bool) -> list[float]:
    np.random.set_bit_generator(np.random.PCG64(1))
    reader = Reader(Data(random.random), None, 7, 0)
    reader._drew_on_host = always or None
    return [reader[ReadRequest(step, 0, 0, [step])][0, 1].item() for step in range(12)]
