"""The sampler for one's own loop: nothing repeated, nothing dropped silently, another order each epoch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import lockstep
from lockstep.data import DistributedSampler, SampleOrder
from lockstep.errors import UsageError


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), st.integers(0, 3))
def test_trap_66_every_sample_once_over_all_ranks(size, ranks, shuffle, epoch):
    """torch's DistributedSampler repeats the first samples to make the ranks' shares equal."""
    samplers = [DistributedSampler(size, ranks, rank, shuffle=shuffle) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert sorted(index for share in shares for index in share) == list(range(size))
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_trap_14_dropping_is_chosen_and_counted():
    """Equal shares by leaving samples out, unsaid."""
    samplers = [DistributedSampler(11, 4, rank, drop_last=True) for rank in range(4)]
    assert [len(list(sampler)) for sampler in samplers] == [2] * 4
    assert samplers[0].dropped_per_epoch == 3


def test_trap_13_each_iteration_is_another_epoch_without_set_epoch():
    """A forgotten `set_epoch` repeats the first epoch's order for ever."""
    sampler = DistributedSampler(20, 2, 0)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_batches_of_all_ranks_together_are_the_trainers_steps():
    order = SampleOrder(24, 2, 6, seed=7)
    loaders = [DataLoader(range(24), batch_size=2, sampler=DistributedSampler(24, 3, r, seed=7)) for r in range(3)]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        together = sorted(index for batch in batches for index in batch.tolist())
        assert together == sorted(index for micro in order.window(step).micro_batches for index in micro)


def test_it_is_public_and_takes_its_place_from_the_environment(monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    sampler = lockstep.DistributedSampler(range(10), shuffle=False)
    assert list(sampler) == [2, 5, 8]


def test_bad_arguments_are_one_clear_message():
    with pytest.raises(UsageError, match="rank 3 is not below num_replicas 2"):
        DistributedSampler(10, 2, 3)
    with pytest.raises(UsageError, match="leave nothing"):
        DistributedSampler(3, 4, 0, drop_last=True)
