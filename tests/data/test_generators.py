"""Generators that a dataset, a collate function or a sampler has of its own: the same numbers on
ranks and workers.
"""

import functools
import random
from importlib import import_module
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler, default_collate

from lockstep.attributes import attributes_of
from lockstep.data.generators import generators_of
from lockstep.errors import UsageError
from lockstep.models.loss_modules import hidden_parameters
from lockstep.parallel.forward_effects.attribute_changes import AttributeChanges
from lockstep.parallel.forward_effects.kept_numbers import members
from tests.data.shared import adopt, everything, plain, share, whole_from

_of_the_module = np.random.default_rng(0)


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


def draw_beside(generator: Any, _index: int) -> float:
    return draw(generator)


class Noisy(Dataset[Any]):
    """Its samples are numbers drawn from a generator of its own."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, draw(self.source)


class FromASlot:
    __slots__ = ("_rng",)

    def __init__(self) -> None:
        self._rng = random.Random(3)

    def __call__(self, _index: int) -> float:
        return self._rng.random()


class Jitter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()

    def forward(self, _index: int) -> float:
        return draw(self.source)


class Calling(Noisy):
    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.transform(index)


class Lazy(Noisy):
    """Makes its generator when the first sample is read, in each worker."""

    made: Any = None

    def __getitem__(self, index: int) -> tuple[int, float]:
        if self.made is None:
            self.made = np.random.default_rng(self.seed)
        return index, draw(self.made)


class PerEpoch(Noisy):
    def set_epoch(self, epoch: int) -> None:
        self.source = np.random.default_rng(epoch)


class OfItsClass(Noisy):
    source = np.random.default_rng(0)


class OfItsModule(Noisy):
    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, through_a_function()


def through_a_function() -> float:
    return draw(_of_the_module)


def closure() -> Any:
    generator = np.random.RandomState(0)
    return lambda _index: draw(generator)


def hugging_face() -> Any:
    generator = np.random.default_rng(0)
    rows = datasets.Dataset.from_dict({"x": list(range(11))})
    return rows.with_transform(lambda batch: {"x": [x + draw(generator) for x in batch["x"]]})


def collate_with(generator: Any, samples: list[Any]) -> Any:
    return default_collate([(sample, draw(generator)) for sample in samples])


MAKERS = {
    "numpy": lambda: Noisy(source=np.random.default_rng(0)),
    "another of numpy": lambda: Noisy(source=np.random.Generator(np.random.MT19937(1))),
    "legacy": lambda: Noisy(source=np.random.RandomState(0)),
    "torch": lambda: Noisy(source=torch.Generator()),
    "python": lambda: Noisy(source=random.Random(0)),
    "of its class": OfItsClass,
    "of its module": OfItsModule,
    "transform": lambda: Calling(transform=nn.Sequential(Jitter())),
    "slot": lambda: Calling(transform=FromASlot()),
    "closure": lambda: Calling(transform=closure()),
    "partial": lambda: Calling(transform=functools.partial(draw_beside, random.Random(0))),
    "lazy": lambda: Lazy(seed=0),
    "of each epoch": lambda: PerEpoch(source=random.Random(0)),
    "subset": lambda: Subset(Noisy(source=np.random.default_rng(0)), list(range(11))),
    "transform of datasets": hugging_face,
    "collate": lambda: functools.partial(collate_with, np.random.default_rng(0)),
}


def read(made: Any, *, workers: int = 0, assign: Any = everything, **options: Any) -> list[Any]:
    given = (
        {"dataset": list(range(11)), "collate_fn": made}
        if isinstance(made, functools.partial)
        else {"dataset": made}
    )
    loader: Any = DataLoader(**given, batch_size=2, shuffle=True, num_workers=workers)
    source = adopt(
        loader,
        batch_size=2,
        global_batch_size=4,
        assign=assign,
        seed=1,
        device="cpu",
        epochs=2,
        **options,
    )
    return plain(list(source))


def numbers(batch: Any) -> list[float]:
    return [round(x % 1, 12) for x in (batch["x"] if isinstance(batch, dict) else batch[1])]


@pytest.mark.parametrize("name", MAKERS)
def test_what_own_generators_give_depends_on_the_sample_alone(name: str) -> None:
    """Each worker has a copy, and a rank's draws are others than one process's."""
    whole = read(MAKERS[name]())
    assert whole_from([read(MAKERS[name](), assign=share(rank, 2)) for rank in range(2)]) == whole
    assert read(MAKERS[name](), start_step=4) == whole[4:]
    if name in ("numpy", "lazy", "collate"):
        assert read(MAKERS[name](), workers=2) == whole
    noise = [number for row in whole for micro in row[5:] for number in numbers(micro[1])]
    assert len(noise) == len(set(noise)) == 22, "each sample has its own in each epoch"


def test_reading_leaves_the_generators_as_they_were() -> None:
    generator = np.random.default_rng(0)
    read(Noisy(source=generator))
    assert draw(generator) == draw(np.random.default_rng(0))


IN_ONE_PROCESS: Any = {
    "batch_size": 2,
    "global_batch_size": 4,
    "assign": everything,
    "seed": 1,
    "device": "cpu",
}


def test_it_is_said_which_generators_are_seeded() -> None:
    source = adopt(Noisy(source=random.Random(0)), **IN_ONE_PROCESS)
    assert (
        source.notice == "generators of the data's own (dataset.source) are seeded for each sample"
    )
    unkeyed = Noisy(source=random.SystemRandom())
    assert "warning: the data draw from dataset.source, which can't be seeded" in (
        adopt(unkeyed, **IN_ONE_PROCESS).notice or ""
    )
    with pytest.raises(UsageError, match="which can't be seeded"):
        adopt(unkeyed, reproducible=True, **IN_ONE_PROCESS)
    assert (
        adopt(
            list(range(4)) and Noisy(x=1, deterministic=True, source=random.Random()),
            **IN_ONE_PROCESS,
        ).notice
        is None
    )


class MadeAnew(Noisy):
    """Its generator is made in each call, where nobody finds it."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), np.random.default_rng().random()])


def test_samples_that_are_others_when_they_are_read_again_are_told_or_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several ranks, and under `reproducible`."""
    with monkeypatch.context() as patched:
        patched.setattr(import_module("lockstep.data.adopt"), "several_ranks", lambda: True)
        next(iter(adopt(MadeAnew(), **IN_ONE_PROCESS)))
    assert "dataset[0] is another when it is read again with the same seeds" in caplog.text
    with pytest.raises(UsageError, match=r"dataset\[0\] is another when it is read again"):
        next(iter(adopt(MadeAnew(), reproducible=True, **IN_ONE_PROCESS)))


def test_generators_are_found_wherever_they_are_and_global_ones_are_not() -> None:
    assert not generators_of(
        {"python": random, "mine": [random._inst, np.random, torch.default_generator]}
    )
    cyclic: dict[str, Any] = {"rng": random.Random(0), "many": list(range(10**6))}
    cyclic["itself"] = cyclic
    assert list(generators_of(cyclic)) == ["rng"]
    of_generators = {"draw": random.Random(0).random, "noise": np.random.default_rng(0).normal}
    assert list(generators_of(of_generators)) == ["draw", "noise"]
    assert not generators_of([random.random, np.random.rand, torch.rand])


def test_a_samplers_own_generator_gives_the_same_order_in_every_pass() -> None:
    """Steps that are taken in two calls, or after a rollback, would leave out samples and take
    others twice.
    """

    def loader() -> Any:
        sampler = WeightedRandomSampler(
            [1.0] * 11, 11, replacement=False, generator=torch.Generator().manual_seed(4)
        )
        return DataLoader(list(range(11)), batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    def rows(data: Any, **options: Any) -> list[Any]:
        return plain(list(adopt(data, epochs=2, **IN_ONE_PROCESS, **options)))

    data = loader()
    whole = rows(loader())
    assert rows(data, stop_step=4) + rows(data, start_step=4) == whole
    first = [number for row in whole[:3] for micro in row[5:] for number in micro[1]]
    expected = [number for batch in loader() for number in batch.tolist()]
    assert first == expected, "the order is that of plain PyTorch"


class Answering:
    """It has no `__dict__`, and answers for what it has not by an error of its own."""

    __slots__ = ("kept", "unset")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: the model is not finished")


def test_what_an_object_raises_when_it_is_asked_for_attributes_is_passed_over() -> None:
    odd = Answering()
    odd.kept = random.Random(3)

    class Holding:
        def __init__(self) -> None:
            self.odd = odd
            self.own = random.Random(4)

    assert set(generators_of(Holding())) == {"own", "odd.kept"}
    assert attributes_of(odd) is None
    assert hidden_parameters(functools.partial(print, odd), ()) == []
    watched = nn.Linear(1, 1)
    watched.odd = odd
    changes = AttributeChanges([watched])
    assert not changes.has_new()
    assert list(members("odd", odd)) == []
