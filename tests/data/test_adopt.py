"""Whatever a user passes becomes steps; ours is the order, unless the user brought one."""

import random
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from lockstep.config import DataConfig
from lockstep.data import (
    DistributedSampler,
    IterableSteps,
    SampleOrder,
    StepLoader,
    StepSource,
)
from lockstep.errors import UsageError
from tests.data.shared import adopt, everything, plain, share, whole_from

NUMBERS = TensorDataset(torch.arange(10))


def steps_of(
    data: Any, config: DataConfig | None = None, *, assign=everything, **options: Any
) -> StepSource:
    given = {
        "batch_size": 2,
        "global_batch_size": 4,
        "epochs": 2,
        "seed": 1,
        "device": "cpu",
        **options,
    }
    return adopt(data, config, assign=assign, **given)


def numbers(source: StepSource) -> list[list[int]]:
    """The samples of each step."""
    return [[n for micro in row[5:] for n in micro[1][0]] for row in plain(list(source))]


def ours(shuffle: bool, drop_last: bool = False) -> list[list[int]]:
    order = SampleOrder(10, 2, 4, seed=1, shuffle=shuffle, drop_last=drop_last)
    steps = [order.samples_of(step) for step in range(2 * order.steps_per_epoch)]
    return [[index for indices in step.micro_batches for index in indices] for step in steps]


def test_trap_12_a_shuffling_loader_without_a_sampler_gets_our_order():
    """`DataLoader(shuffle=True)` on each rank draws on each rank for itself."""
    assert numbers(steps_of(DataLoader(NUMBERS, batch_size=2, shuffle=True))) == ours(shuffle=True)
    assert numbers(steps_of(DataLoader(NUMBERS, batch_size=2))) == ours(shuffle=False)
    assert numbers(steps_of(NUMBERS)) == ours(shuffle=True)
    assert numbers(steps_of(NUMBERS, DataConfig(shuffle=False))) == ours(shuffle=False)


def test_trap_14_drop_last_is_said():
    """A loader's `drop_last` drops what it does not mention."""
    for source in (
        steps_of(DataLoader(NUMBERS, batch_size=2, drop_last=True)),
        steps_of(NUMBERS, DataConfig(drop_last=True, shuffle=False)),
    ):
        assert numbers(source) == ours(shuffle=False, drop_last=True)
        assert "2 of 10 samples" in (source.notice or "")


def joined(samples: list[Any]) -> Any:
    return [torch.stack([100 + sample[0] for sample in samples])]


def test_a_loaders_collate_function_and_workers_are_kept():
    loader = DataLoader(NUMBERS, batch_size=2, collate_fn=joined, num_workers=2, prefetch_factor=3)
    source = steps_of(loader)
    assert isinstance(source, StepLoader)
    assert numbers(source) == [[100 + n for n in step] for step in ours(shuffle=False)]
    inner = source._loader
    assert (inner.num_workers, inner.prefetch_factor) == (2, 3)


@pytest.mark.parametrize("kind", [TorchDistributedSampler, DistributedSampler])
def test_trap_66_a_distributed_sampler_is_left_out(kind):
    """torch's repeats samples to even out ranks, and would cut a share that the trainer
    cuts again.
    """
    sampler = kind(NUMBERS, num_replicas=3, rank=1, shuffle=False)
    source = steps_of(DataLoader(NUMBERS, batch_size=2, sampler=sampler))
    assert numbers(source) == ours(shuffle=False)
    assert "DistributedSampler is not used" in (source.notice or "")


@pytest.mark.parametrize(
    "custom",
    [
        {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 10, 7)},
        {"batch_size": 2, "sampler": SubsetRandomSampler([1, 2, 3, 5, 8])},
        {"batch_size": 2, "sampler": RandomSampler(NUMBERS, replacement=True)},
        {"batch_sampler": [[0, 1, 2], [3], [4, 5]]},
        {"batch_sampler": BatchSampler(SequentialSampler(NUMBERS), 3, drop_last=True)},
    ],
    ids=["weighted", "subset", "replacement", "list", "batch sampler"],
)
def test_a_samplers_order_is_kept_the_same_on_every_rank_and_after_a_resume(custom):
    whole = plain(list(steps_of(DataLoader(NUMBERS, **custom))))
    for ranks in (2, 3):
        parts = []
        for rank in range(ranks):
            torch.manual_seed(rank)
            parts.append(
                plain(list(steps_of(DataLoader(NUMBERS, **custom), assign=share(rank, ranks))))
            )
        assert whole_from(parts) == whole
    for start in (1, len(whole) - 1):
        assert (
            plain(list(steps_of(DataLoader(NUMBERS, **custom), start_step=start))) == whole[start:]
        )
    assert "reads its micro-batches" in (steps_of(DataLoader(NUMBERS, **custom)).notice or "")
    assert {row[1] for row in whole} == {0, 1}


class Lazy:
    """Draws each batch when it is asked for it."""

    def __iter__(self):
        for _ in range(6):
            yield [random.randrange(10), int(torch.randint(10, ()))]


def test_a_sampler_that_draws_as_it_goes_draws_the_same_on_every_rank():
    drawn = []
    for rank in range(2):
        steps = []
        random.seed(rank), torch.manual_seed(rank)
        for row in steps_of(DataLoader(NUMBERS, batch_sampler=Lazy())):
            random.random(), torch.rand(rank + 1)  # training draws too, and not the same everywhere
            steps.append(row)
        drawn.append(plain(steps))
    assert drawn[0] == drawn[1]
    assert len({str(row[5:]) for row in drawn[0]}) == len(drawn[0])


def test_steps_by_a_sampler_hold_its_batches_in_turn():
    source = steps_of(DataLoader(NUMBERS, batch_sampler=[[0, 1, 2], [3], [4, 5]]), epochs=1)
    assert source.steps_per_epoch == 2
    assert [[m[1][0] for m in row[5:]] for row in plain(list(source))] == [
        [[0, 1, 2], [3]],
        [[4, 5]],
    ]


def test_a_sampler_is_told_its_epoch_and_reads_ranks_own_share_only():
    class Told(SequentialSampler):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    read: list[int] = []

    class Counting(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    data = Counting(torch.arange(10))
    list(steps_of(DataLoader(data, batch_size=2, sampler=Told(data)), assign=share(1, 2)))
    assert Told.epochs[:2] == [0, 1]
    assert read == [2, 3, 6, 7, 8, 9] * 2  # the last two for a dummy


def test_a_sampler_that_can_be_iterated_once_says_so_in_the_second_epoch():
    once = iter([[0, 1], [2, 3]])
    with pytest.raises(UsageError, match="yields nothing in epoch 1"):
        list(steps_of(DataLoader(NUMBERS, batch_sampler=once)))
    once = iter([[0, 1], [2, 3]])
    assert len(list(steps_of(DataLoader(NUMBERS, batch_sampler=once), epochs=1))) == 1


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter(torch.arange(5.0))


def test_iterables_of_samples_and_of_batches_are_told_apart():
    samples = plain(list(steps_of(Stream(), epochs=1)))
    assert [len(micro[1]) for row in samples for micro in row[5:]] == [2, 2, 1]
    loader = plain(list(steps_of(DataLoader(Stream(), batch_size=2, num_workers=1), epochs=1)))
    assert loader == samples
    ready = plain(list(steps_of([torch.ones(3), torch.ones(1)], epochs=1)))
    assert [len(micro[1]) for row in ready for micro in row[5:]] == [3, 1]
    assert isinstance(steps_of(iter([torch.ones(3)])), IterableSteps)
    assert "every rank reads all of Stream" in (
        steps_of(DataLoader(Stream(), batch_size=2)).notice or ""
    )


def test_a_stream_sharded_by_rank_says_so_and_works_alone():
    class Sharded(Stream):
        rank_sharded = True

    for data in (Sharded(), DataLoader(Sharded(), batch_size=2)):
        source = steps_of(data, epochs=1)
        assert "sharded by rank" in (source.notice or "")
        assert [row[3] for row in plain(list(source))] == [4, 1]


def test_epochs_and_steps_bound_each_other():
    assert len(numbers(steps_of(NUMBERS, epochs=2))) == 6
    assert len(numbers(steps_of(NUMBERS, epochs=2, stop_step=4))) == 4
    assert len(numbers(steps_of(NUMBERS, epochs=None, stop_step=7))) == 7
    assert numbers(steps_of(NUMBERS, epochs=2, start_step=6)) == []
    assert steps_of(NUMBERS).steps_per_epoch == 3


def test_a_loaders_batch_size_must_agree_or_is_taken():
    loader = DataLoader(NUMBERS, batch_size=5)
    with pytest.raises(UsageError, match=r"DataLoader has batch_size 5, training\.batch_size is 2"):
        steps_of(loader)
    assert [len(step) for step in numbers(steps_of(loader, for_evaluation=True, epochs=1))] == [10]


@pytest.mark.parametrize("data", [torch.zeros(4), {"x": 1}, "text", 7, None])
def test_what_is_no_data_is_one_clear_message(data):
    with pytest.raises(UsageError, match="can't be trained on"):
        steps_of(data)


def test_sizes_that_do_not_multiply_out_are_refused_for_every_kind():
    for data in (NUMBERS, Stream(), [torch.ones(2)]):
        with pytest.raises(UsageError, match=r"5 = 2 × 2 \+ 1"):
            steps_of(data, global_batch_size=5)


def test_torchs_own_collate_function_is_known_to_draw_nothing(monkeypatch: pytest.MonkeyPatch):
    """A DataLoader hands it over like any other; keeping generators' states around it takes longer
    than it itself.
    """
    monkeypatch.setattr(
        "lockstep.data.reader.preserve_states", lambda: pytest.fail("states are kept")
    )
    assert numbers(steps_of(DataLoader(NUMBERS, batch_size=2))) == ours(shuffle=False)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ({"x": torch.zeros(4, 2), "y": torch.zeros(4)}, False),
        ([torch.zeros(4), ["a", "b", "c", "d"]], False),
        ({"x": torch.zeros(4, 2), "y": torch.zeros(4), "targets in the step": 9}, False),
        ({"tokens": torch.zeros(9), "positions": torch.zeros(9), "begins": torch.zeros(3)}, False),
        (1.0, True),
        ({"x": torch.zeros(4), "y": torch.tensor(1)}, True),
        ((torch.zeros(4, 2), 1), True),
        ({"x": torch.zeros(3, 8), "y": torch.zeros(4)}, True),
    ],
)
def test_a_list_whose_items_look_like_samples_is_told_to_be_one_of_batches(
    first: object, told: bool
) -> None:
    """Each would silently be a micro-batch of its own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps_of([first] * 8)
    assert [
        "give torch.utils.data.DataLoader(data, batch_size=…)" in str(one.message) for one in caught
    ] == [True] * told
