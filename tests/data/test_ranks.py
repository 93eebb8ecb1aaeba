"""On real ranks: streams that end at different times, and a sampler that knows its rank."""

from lockstep.errors import UsageError
from tests.data.rank_cases import agreement, all_cases, trainers, unseeded
from tests.ranks import run_ranks


def test_streams_sharded_by_rank_end_together_and_samplers_know_their_rank():
    short, long = run_ranks(all_cases, 2)
    assert [(row[1], row[5][1:]) for row in short["rows"][:5]] == [
        (0, ([0, 1], True)),
        (0, ([2], True)),
        (0, ([2], False)),
        (0, ([2], False)),
        (0, ([2], False)),
    ]
    assert [row[5][1] for row in long["rows"][:5]] == [
        [100, 101],
        [102, 103],
        [104, 105],
        [106, 107],
        [108],
    ]
    assert [(*row[:2], row[4]) for row in short["rows"]] == [
        (*row[:2], row[4]) for row in long["rows"]
    ]
    assert len(short["rows"]) == 10
    assert "sharded by rank" in short["notice"]
    assert (short["places"], long["places"]) == ([0, 2, 4, 6], [1, 3, 5])


def test_data_that_are_cut_by_rank_beforehand_are_refused_and_no_others():
    """A habit of other trainers: shared out once more, most samples are never seen."""
    ranks = run_ranks(agreement, 2)
    for name, first in ranks[0].items():
        other = ranks[1][name]
        if name.startswith("cut"):
            assert isinstance(first, UsageError), name
            assert str(first) == str(other), name
            assert "data.rank_sharded = True" in str(first)
        elif name.startswith("whole"):
            assert isinstance(first, list), (name, str(first))
            assert sorted(first + other) == list(range(24)), name
        else:
            assert isinstance(first, list), (name, str(first))
            assert len(set(first)) == len(first) >= 12, name
            assert not set(first) & set(other), name
    texts = {name: str(error) for name, error in ranks[0].items() if name.startswith("cut")}
    assert "delete Subset(dataset, …)" in texts["cut: subset"]
    assert (
        "delete dataset.shard(…) or split_dataset_by_node(…)"
        in texts["cut: a stream by node, evaluated"]
    )
    assert "the OfARank gives rank 1 other samples than rank 0" in texts["cut: sampler"]
    assert "rank 0 has 12 samples or batches of data, and rank 1 has 13" in texts["cut: unequal"]


def test_random_data_of_a_script_that_seeds_nothing_are_warned_of():
    """Their ranks may have made them of random numbers; what is surely cut is refused
    all the same.
    """
    said, other = run_ranks(unseeded, 2)
    assert said == other
    assert said["random"].startswith("6 ranks 0 and 1 have 24 each, but dataset[0] on rank 1")
    assert "torch.manual_seed(0) before they are made" in said["random"]
    for name in ("random, reproducible", "subset", "unequal"):
        assert "data.rank_sharded = True" in said[name], name


def test_every_way_to_use_data_compares_them():
    first, other = run_ranks(trainers, 2)
    assert first == other
    assert all(
        "dataset[0] on rank 1 is another sample than on rank 0" in error for error in first.values()
    ), first
