"""What runs on each rank in `test_ranks.py`."""

import functools
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

from lockstep import Trainer
from lockstep.data import DistributedSampler
from lockstep.errors import UsageError
from tests.data.shared import adopt, plain, share


class Stream(IterableDataset[torch.Tensor]):
    """Rank 0 reads 3 samples, rank 1 reads 9."""

    rank_sharded = True

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = dist.get_rank()
        yield from (torch.tensor(100 * rank + k) for k in range(3 + 6 * rank))


def all_cases() -> dict[str, Any]:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    source = adopt(
        Stream(),
        batch_size=2,
        global_batch_size=4,
        assign=share(rank, ranks),
        epochs=2,
        seed=1,
        device="cpu",
    )
    return {
        "rows": plain(list(source)),
        "notice": source.notice,
        "places": list(DistributedSampler(7, shuffle=False)),
    }


class Rows(Dataset[Any]):
    """Whole numbers with labels; a transform of a row."""

    def __init__(self, numbers: Any, transform: Any = None) -> None:
        self.numbers = list(numbers)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        row = torch.full((3,), float(self.numbers[index])), self.numbers[index] % 5
        return row if self.transform is None else self.transform(row)


class Told(IterableDataset[Any]):
    """The rows of a dataset, one after the other."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


class OfARank(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 24, 2))


def own(data: Any) -> Any:
    data.rank_sharded = True
    return data


def hidden_noise(row: Any) -> Any:
    return row[0] + np.random.default_rng().random(3), row[1]


def augmented(row: Any) -> Any:
    return row[0] + (torch.rand(3) + random.random() + np.random.rand()) / 4, row[1]


def by_another_processor(row: Any) -> Any:
    return row[0] * (1 + 1e-6 * dist.get_rank()), row[1]


def without_evidence(_row: Any) -> Any:
    return complex


def given_data() -> dict[str, Any]:
    """Data as a user's program hands them over on each rank, by what is to come of them."""
    rank = dist.get_rank()
    rows = Rows(range(24))
    mine = range(rank, 24, 2)
    table = datasets.Dataset.from_dict({"x": list(range(24))})
    whole = {
        "plain": rows,
        "augmented": Rows(range(24), augmented),
        "a generator seeded by rank": Rows(
            range(24), functools.partial(own_noise, np.random.default_rng(rank))
        ),
        "another processor": Rows(range(24), by_another_processor),
        "workers": DataLoader(Rows(range(24), augmented), batch_size=2, num_workers=1),
        "stream": Told(Rows(range(24), augmented)),
        "datasets": table,
        "a stream of datasets": table.to_iterable_dataset(num_shards=2),
        "noise that is not found": Rows(range(24), hidden_noise),
        "a stream with such noise": Told(Rows(range(24), hidden_noise)),
    }
    cut = {
        "subset": Subset(rows, list(mine)),
        "halves": Rows(range(12 * rank, 12 * rank + 12)),
        "unequal": Rows(range(12 + rank)),
        "shard": table.shard(2, rank),
        "by node": split_dataset_by_node(table, rank, 2),
        "a stream by node": split_dataset_by_node(table.to_iterable_dataset(num_shards=2), rank, 2),
        "batches": [torch.arange(n, n + 2) for n in range(2 * rank, 24, 4)],
        "fewer batches": [torch.arange(2) for _ in range(4 + rank)],
        "a file for each rank": Told(Rows(range(12 * rank, 12 * rank + 12))),
        "an empty file": Told(Rows(range(12 * rank))),
        "loader": DataLoader(
            Subset(Rows(range(24), augmented), list(mine)), batch_size=2, num_workers=1
        ),
        "a loader of a stream": DataLoader(Told(Rows(mine)), batch_size=2),
        "sampler": DataLoader(rows, batch_size=2, sampler=OfARank()),
        "noise of a rank": Rows(
            torch.randint(99, (24,), generator=torch.Generator().manual_seed(rank)).tolist()
        ),
    }
    declared = {
        "own subset": own(Subset(rows, list(mine))),
        "own rows, unequal": own(Rows(range(100 * rank, 100 * rank + 12 + rank))),
        "own loader": DataLoader(
            own(Rows(range(100 * rank, 100 * rank + 12))), batch_size=2, num_workers=1
        ),
        "own sampler": DataLoader(rows, batch_size=2, sampler=own(OfARank())),
    }
    return {
        f"{kind}: {name}": data
        for kind, some in {"whole": whole, "cut": cut, "declared": declared}.items()
        for name, data in some.items()
    }


def own_noise(generator: Any, row: Any) -> Any:
    return row[0] + generator.random(3), row[1]


def labels_of(batch: Any) -> list[int]:
    values = (
        batch["x"]
        if isinstance(batch, dict)
        else batch[0][:, 0]
        if isinstance(batch, list)
        else batch
    )
    return [int(value) for value in values] if isinstance(values, torch.Tensor) else []


def _adopted(data: Any, **settings: Any) -> Any:
    """Return one epoch of data as this rank of two reads it."""
    return adopt(
        data,
        batch_size=2,
        global_batch_size=4,
        assign=share(dist.get_rank(), 2),
        epochs=1,
        seed=1,
        device="cpu",
        **settings,
    )


def agreement() -> dict[str, Any]:
    """What each rank reads of the data that it was given in training and in evaluation, or the
    error.
    """
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, data in given_data().items():
        for evaluates in (False, True):
            source = _adopted(data, for_evaluation=evaluates)
            try:
                steps = list(source)
                read: Any = [
                    n for row in steps for one in row.mine if one.real for n in labels_of(one.batch)
                ]
            except UsageError as error:
                read = error
            found[f"{name}, evaluated" if evaluates else name] = read
    return found


def unseeded() -> dict[str, str]:
    """What is said where each rank has another seed, as in a script that seeds nothing: the error,
    or the warning.
    """
    torch.manual_seed(dist.get_rank())
    noise = TensorDataset(torch.randn(24, 3))
    rows = Rows(range(24))
    uses = {
        "random": (noise, False),
        "random, reproducible": (noise, True),
        "subset": (Subset(rows, list(range(dist.get_rank(), 24, 2))), False),
        "unequal": (Rows(range(12 + dist.get_rank())), False),
    }
    found = {}
    for name, (data, reproducible) in uses.items():
        said: list[str] = []
        with patch("lockstep.data.agreement._warn", said.append):
            try:
                source = _adopted(data, reproducible=reproducible)
                found[name] = f"{sum(len(row.mine) for row in source)} {said[0]}"
            except UsageError as error:
                found[name] = str(error)
    return found


def trainers() -> dict[str, str]:
    """The error of each way to use data that are cut by rank."""
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(3, 5), loss_fn=nn.CrossEntropyLoss(), batch_size=2, max_steps=2, sinks=[]
    )
    whole = Rows(range(24))
    mine = Subset(Rows(range(24)), list(range(dist.get_rank(), 24, 2)))
    uses = {
        "train": lambda: trainer.train(mine),
        "steps": lambda: list(trainer.steps(mine)),
        "evaluate": lambda: trainer.evaluate(mine),
        "predict": lambda: trainer.predict(mine),
        "validation": lambda: trainer.train(whole, mine),
    }
    found = {}
    for name, use in uses.items():
        try:
            found[name] = str(use())
        except UsageError as error:
            found[name] = str(error)
    return found
