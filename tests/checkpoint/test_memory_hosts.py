"""Who brings which files of a copy to the hosts that lack them, and which copy all hosts have."""

import torch

from lockstep.checkpoint.memory import Holdings
from lockstep.checkpoint.memory_hosts import Held, Share, _common, duties_of

_HOSTS = ["a", "a", "b", "b"]


def _held(begin: int) -> Held:
    """Two of four rows of a weight."""
    return {"model": {"w": ((4, 2), torch.float32, ((begin, 0), (2, 2)))}}


def test_replicas_send_nothing_but_what_lies_beside_the_tensors() -> None:
    """Each host has both halves: the rank with the same half writes the other one's file."""
    held = [_held(0), _held(2), _held(0), _held(2)]
    shares: list[Share] = [{"model": ["w"]}, {"model": ["w"]}, {"model": []}, {"model": []}]
    duties = duties_of(shares, held, _HOSTS)
    assert [each.sends for each in duties] == [[], [], [], []]
    assert (0, shares[0]) in duties[2].twins
    assert (1, shares[1]) in duties[3].twins
    assert duties[0].beside == [2]
    assert duties[2].beside == [0]
    assert all(each.several for each in duties)


def test_shards_of_another_host_are_sent() -> None:
    held = [_held(0), _held(0), _held(2), _held(2)]
    shares: list[Share] = [{"model": ["w"]}, {"model": []}, {"model": ["w"]}, {"model": []}]
    duties = duties_of(shares, held, _HOSTS)
    (to,) = duties[0].sends
    assert _HOSTS[to] == "b"
    assert 0 in duties[to].receives
    (back,) = duties[2].sends
    assert _HOSTS[back] == "a"
    assert 2 in duties[back].receives


def test_one_host_has_nothing_to_bring() -> None:
    (duties,) = duties_of([{"model": ["w"]}], [_held(0)], ["a"])
    assert [*duties.sends, *duties.receives, *duties.twins] == []
    assert not duties.several


def test_the_newest_copy_that_each_host_has_and_that_is_recorded_counts() -> None:
    def holdings(complete: set[int], shown: set[int]) -> Holdings:
        return Holdings(frozenset(shown), frozenset(complete), frozenset())

    both = [holdings({3, 4}, {3}), holdings({2, 3}, {2, 3})]
    assert _common(both, recorded=9) == 3
    assert _common([holdings({4}, set()), holdings({4}, set())], recorded=3) is None
    assert _common([holdings({4}, {4}), holdings({4}, set())], recorded=3) == 4
    assert _common([holdings({4}, set()), holdings({3}, set())], recorded=9) is None
