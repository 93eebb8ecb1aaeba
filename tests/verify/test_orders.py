"""A loader's passes are kept to their end, and one that repeats another's order is found."""

import random
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Sampler

from lockstep.verify.script.observed.orders import ObservedOrders

BATCHES = 8


class Shuffled(Sampler[list[int]]):
    """Batches of two, in an order of each pass; `seed` says from what it is drawn."""

    seed = "epoch"

    def __init__(self) -> None:
        self.epoch = 0
        self.draws = 0
        self.drawn = random.Random(7)

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        generator = {
            "epoch": random.Random(self.epoch),
            "constant": random.Random(0),
            "going on": self.drawn,
        }[self.seed]
        order = list(range(BATCHES))
        generator.shuffle(order)
        self.draws += 1
        for number in order:
            yield [2 * number, 2 * number + 1]


class Told(Shuffled):
    """One that can be told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def passes(
    sampler: Shuffled, *, epochs: bool = True, number: int = 2, trained: bool = True
) -> tuple[list[str], list[list[int]]]:
    """Return what is found, and the positions of each pass, of which two batches are read."""
    loader: DataLoader[int] = DataLoader(list(range(2 * BATCHES)), batch_sampler=sampler)  # type: ignore[arg-type]
    found: list[str] = []
    steps = 0
    orders = ObservedOrders(
        lambda _loader: 0,
        lambda: steps,
        lambda: sampler.draws,
        lambda kind, text, _fix, _line: found.append(f"{kind}: {text}"),
    )
    for epoch in range(number):
        if epochs:
            sampler.epoch = epoch
        order = orders.begun(loader, iter(sampler))
        for _ in range(2):
            next(order)
            steps += trained
    kept = orders.complete()[0]
    assert all(each.is_complete for each in kept)
    return found, [each.positions for each in kept]


def test_a_pass_is_read_to_its_end() -> None:
    found, positions = passes(Told())
    assert not found
    assert [sorted(each) for each in positions] == [list(range(2 * BATCHES))] * 2
    assert positions[0] != positions[1]


def test_a_look_at_a_batch_is_not_an_epoch() -> None:
    assert passes(Told(), epochs=False, trained=False) == ([], [])


@pytest.mark.parametrize(
    ("kind", "seed", "epochs", "says"),
    [
        (Told, "epoch", False, "its set_epoch is not called"),
        (Told, "constant", True, "does not depend on the epoch"),
        (Shuffled, "constant", True, "begins with the same seed"),
        (Shuffled, "going on", True, ""),
    ],
)
def test_an_order_that_comes_again_is_found(
    kind: type[Shuffled], seed: str, epochs: bool, says: str
) -> None:
    sampler = kind()
    sampler.seed = seed
    found, _ = passes(sampler, epochs=epochs)
    assert [says in text for text in found] == ([True] if says else [])


def test_epochs_that_have_one_order_by_chance_are_not_found() -> None:
    """Of two batches every other epoch has the order of the one before."""

    class Small(Told):
        def __iter__(self) -> Iterator[list[int]]:
            self.draws += 1
            yield from [[0], [1]] if self.epoch // 2 % 2 else [[1], [0]]

    assert passes(Small())[0] == []


def test_samples_in_order_are_not_shuffled() -> None:
    class InOrder(Told):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[2 * at, 2 * at + 1] for at in range(BATCHES)])

    assert passes(InOrder(), epochs=False)[0] == []


def test_keys_are_not_compared() -> None:
    sampler = Shuffled()
    loader: DataLoader[int] = DataLoader({"a": 1}, batch_sampler=sampler)  # type: ignore[arg-type]
    steps = 0
    orders = ObservedOrders(lambda _: 0, lambda: steps, lambda: 0, lambda *_: None)
    next(orders.begun(loader, iter([["a"], ["b"]])))
    steps = 1
    (kept,) = orders.complete()[0]
    assert not kept.is_complete
