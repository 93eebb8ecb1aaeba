"""The order of samples is a pure function of (seed, step), and every sample comes once an epoch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import lockstep
from lockstep.data import DistributedSampler, SampleOrder
from lockstep.errors import UsageError

# samples, batch size, micro-batches
sizes = st.tuples(st.integers(1, 200), st.integers(1, 7), st.integers(1, 6))


def order(num_samples: int, batch_size: int, accumulation: int, **options: object) -> SampleOrder:
    return SampleOrder(num_samples, batch_size, batch_size * accumulation, **{"seed": 1, **options})  # type: ignore


def epoch_of(made: SampleOrder, epoch: int) -> list[int]:
    steps = range(epoch * made.steps_per_epoch, (epoch + 1) * made.steps_per_epoch)
    return [
        index for step in steps for micro in made.samples_of(step).micro_batches for index in micro
    ]


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), st.integers(0, 3))
def test_trap_12_every_sample_of_an_epoch_exactly_once(size, shuffle, epoch):
    """Drawing at random on each rank reads some samples twice and others never."""
    made = order(*size, shuffle=shuffle)
    assert sorted(epoch_of(made, epoch)) == list(range(size[0]))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 100),
    st.sampled_from([(1, 12), (2, 6), (3, 4), (6, 2), (12, 1)]),
    st.integers(0, 40),
)
def test_a_step_holds_the_same_samples_however_it_is_cut(num_samples, cut, step):
    whole = order(num_samples, 12, 1).samples_of(step)
    pieces = order(num_samples, *cut).samples_of(step)
    assert [index for micro in pieces.micro_batches for index in micro] == whole.micro_batches[0]
    assert (pieces.epoch, pieces.last_of_epoch) == (whole.epoch, whole.last_of_epoch)


@settings(max_examples=40, deadline=None)
@given(sizes, st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_a_window_depends_on_nothing_that_was_asked_before(size, steps):
    used = order(*size)
    for step in steps:
        assert used.samples_of(step) == order(*size).samples_of(step)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 300))
def test_steps_never_straddle_epochs_and_only_the_last_is_short(size, step):
    num_samples, batch_size, accumulation = size
    made = order(*size)
    window = made.samples_of(step)
    place = step % made.steps_per_epoch
    assert window.epoch == step // made.steps_per_epoch
    assert window.last_of_epoch == (place == made.steps_per_epoch - 1)
    left = num_samples - place * batch_size * accumulation
    assert window.num_samples == min(left, batch_size * accumulation)
    assert all(len(micro) == batch_size for micro in window.micro_batches[:-1])
    assert 1 <= len(window.micro_batches[-1]) <= batch_size


def test_trap_13_the_order_depends_on_the_epoch():
    """A forgotten `set_epoch` gives every epoch the same order: here there is nothing to forget."""
    made = order(50, 5, 2)
    assert epoch_of(made, 0) != epoch_of(made, 1)
    assert epoch_of(made, 0) != epoch_of(order(50, 5, 2, seed=2), 0)
    assert epoch_of(made, 0) == epoch_of(order(50, 5, 2), 0)
    unshuffled = order(50, 5, 2, shuffle=False)
    assert epoch_of(unshuffled, 0) == epoch_of(unshuffled, 3) == list(range(50))


def test_the_order_of_a_seed_stays_what_it_is():
    """A run that is resumed with a newer version goes on through the same permutation."""
    assert order(10, 2, 2).samples_of(3).micro_batches == [[5, 3], [0, 2]]


def test_trap_14_nothing_is_dropped_silently():
    """A sampler that drops the remainder says nothing; the default here drops nothing, and
    `drop_last` says what.
    """
    made = order(23, 2, 3)
    assert (made.dropped_per_epoch, made.notice, made.steps_per_epoch) == (0, None, 4)
    assert [len(m) for m in made.samples_of(3).micro_batches] == [2, 2, 1]
    dropping = order(23, 2, 3, drop_last=True)
    assert (dropping.dropped_per_epoch, dropping.steps_per_epoch) == (5, 3)
    assert dropping.notice is not None
    assert "5 of 23 samples" in dropping.notice
    assert len(set(epoch_of(dropping, 0))) == 18
    assert dropping.samples_of(2).last_of_epoch


def test_trap_66_the_last_batch_is_not_filled_with_repeats():
    """Repeating samples to even out the last batch trains on them twice."""
    last = order(9, 4, 2).samples_of(1)
    assert [len(m) for m in last.micro_batches] == [1]


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(0, 60))
def test_drop_last_gives_whole_steps_only(size, step):
    num_samples, batch_size, accumulation = size
    if num_samples < batch_size * accumulation:
        with pytest.raises(UsageError, match="drops every step"):
            order(*size, drop_last=True)
        return
    assert order(*size, drop_last=True).samples_of(step).num_samples == batch_size * accumulation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, 10), r"10 = 2 × 4 \+ 2"),
        ((10, 8, 4), r"4 = 0 × 8 \+ 4"),
        ((0, 1, 1), "empty"),
    ],
)
def test_sizes_that_do_not_multiply_out_are_one_clear_message(arguments, message):
    with pytest.raises(UsageError, match=message):
        SampleOrder(*arguments, seed=0)


# ---- the sampler for one's own loop ----


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
    first = list(sampler)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_batches_of_all_ranks_together_are_the_trainers_steps():
    order = SampleOrder(24, 2, 6, seed=7)
    loaders = [
        DataLoader(range(24), batch_size=2, sampler=DistributedSampler(24, 3, r, seed=7))
        for r in range(3)
    ]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        together = sorted(index for batch in batches for index in batch.tolist())
        assert together == sorted(
            index for micro in order.samples_of(step).micro_batches for index in micro
        )


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
