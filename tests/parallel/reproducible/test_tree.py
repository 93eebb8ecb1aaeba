"""The sum over micro-batches is one expression, whoever adds what."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.parallel.reproducible.tree import (
    Node,
    Partials,
    assign_in_groups,
    assign_tree,
    children,
    clear_zero_signs,
    leaves_of,
    tree_assignment,
)

COUNTS = st.integers(1, 70)
RANKS = st.integers(1, 9)


def leaf(index: int) -> Tensor:
    """Numbers of unequal sizes, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(64, generator=generator) * 10.0 ** torch.randint(
        -4, 4, (64,), generator=generator
    )


def written_out(node: Node) -> Tensor:
    """The expression itself."""
    if node[1] - node[0] == 1:
        return leaf(node[0])
    left, right = children(node)
    return written_out(left) + written_out(right)


@settings(deadline=None, max_examples=40)
@given(COUNTS, RANKS)
def test_every_micro_batch_is_run_once_and_evenly(micro_batches: int, ranks: int) -> None:
    shares = [
        [i for i, real in assign_tree(micro_batches, rank, ranks) if real] for rank in range(ranks)
    ]
    assert sorted(i for mine in shares for i in mine) == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shares[0][0] == 0
    even = [assign_tree(micro_batches, rank, ranks, even=True) for rank in range(ranks)]
    assert len({len(mine) for mine in even}) == 1
    assert [[i for i, real in mine if real] for mine in even] == shares


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.sampled_from([1, 2, 4, 8, 16]))
def test_a_rank_of_two_to_the_n_runs_one_node(micro_batches: int, ranks: int) -> None:
    """So it sends one partial sum, whatever the number of micro-batches: the bytes of any
    all-reduce.
    """
    assert all(
        len(nodes) == 1 or micro_batches < ranks for nodes in tree_assignment(micro_batches, ranks)
    )
    assert max(map(len, tree_assignment(micro_batches, ranks))) == 1


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.integers(1, 4), st.integers(1, 5))
def test_shards_of_a_replica_run_as_many_rounds(
    micro_batches: int, replicas: int, shards: int
) -> None:
    """They meet in a collective each round."""
    seen = []
    for replica in range(replicas):
        first = replica * shards
        ranks = replicas * shards
        mine = [
            assign_in_groups(micro_batches, first + shard, ranks, replicas)
            for shard in range(shards)
        ]
        assert len({len(shares) for shares in mine}) == 1
        run = [index for shares in mine for index, real in shares if real]
        assert sorted(run) == leaves_of(tree_assignment(micro_batches, replicas)[replica])
        seen += run
    assert sorted(seen) == list(range(micro_batches))


@settings(deadline=None, max_examples=40)
@given(COUNTS, RANKS)
def test_ranks_and_one_process_add_up_the_same_bits(micro_batches: int, ranks: int) -> None:
    one = Partials(micro_batches)
    most = 0
    for index in range(micro_batches):
        one.add(index, [leaf(index)])
        most = max(most, len(one))
    assert most <= math.ceil(math.log2(micro_batches)) + 1
    whole = one.total()
    assert whole is not None
    assert torch.equal(whole[0], written_out((0, micro_batches)))  # type: ignore[arg-type]

    together = Partials(micro_batches)
    for nodes in tree_assignment(micro_batches, ranks):
        mine = Partials(micro_batches)
        for index in reversed(leaves_of(nodes)):  # in any order
            mine.add(index, [leaf(index)], owned=False)
        for node in nodes:
            together.put(node, mine.take(node) or [])
        assert len(mine) == 0
    total = together.total()
    assert total is not None
    assert torch.equal(total[0], whole[0])  # type: ignore[arg-type]


def test_another_order_gives_other_bits() -> None:
    """Else the tests here would prove nothing."""
    in_a_row = leaf(0)
    for index in range(1, 13):
        in_a_row = in_a_row + leaf(index)
    assert not torch.equal(in_a_row, written_out((0, 13)))


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.data())
def test_a_missing_leaf_is_left_out_or_stands_as_zero(
    micro_batches: int, data: st.DataObject
) -> None:
    """Both give the same bits after `clear_zero_signs`: buffers with a place for a missing gradient
    hold +0 there.
    """
    present = data.draw(st.sets(st.integers(0, micro_batches - 1), min_size=1))
    out = Partials(micro_batches)
    zero = Partials(micro_batches)
    for index in range(micro_batches):
        value = torch.where(leaf(index) > 100, leaf(index), -0.0)  # many are −0
        if index in present:
            out.add(index, [value.clone()])
        zero.add(index, [value if index in present else torch.zeros(64)])
    left_out = out.total()
    with_zeros = zero.total()
    assert left_out is not None
    assert with_zeros is not None
    clear_zero_signs([left_out[0], with_zeros[0]])  # type: ignore[list-item]
    assert torch.equal(left_out[0].view(torch.int32), with_zeros[0].view(torch.int32))  # type: ignore[union-attr]


def test_finish_gives_zeros_their_sign() -> None:
    gradient = torch.tensor([-0.0, 0.0, -1.0])
    clear_zero_signs([gradient])
    assert torch.signbit(gradient).tolist() == [False, False, True]


def test_a_parameter_without_a_gradient_stays_without() -> None:
    partials = Partials(3)
    for index in range(3):
        partials.add(index, [leaf(index), None, leaf(index) if index == 1 else None])
    total = partials.total()
    assert total is not None
    assert total[1] is None
    assert torch.equal(total[2], leaf(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_stages_hand_on_the_gradient_of_a_shared_weight(cut: int) -> None:
    """A stage must start its backward pass with the later stage's sum of a shared weight.

    The weight is used by five layers. Stages that start so compute what one process computes; those
    that add up their own sums do not.
    """
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, 16))
    x = torch.randn(8, 16)

    def layers(h: Tensor, count: int) -> Tensor:
        for _ in range(count):
            h = torch.tanh(h @ weight) + h
        return h

    layers(x, 5).square().sum().backward()
    whole = weight.grad
    weight.grad = None

    first = layers(x, cut)
    middle = first.detach().requires_grad_()
    layers(middle, 5 - cut).square().sum().backward()
    later = weight.grad
    weight.grad = None
    assert whole is not None
    assert later is not None
    assert middle.grad is not None
    torch.autograd.backward([first, weight], [middle.grad, later])
    assert torch.equal(weight.grad, whole)  # type: ignore[arg-type]
    if cut > 1:
        weight.grad = None
        layers(x, cut).backward(middle.grad)
        assert not torch.equal(later + weight.grad, whole)  # type: ignore[operator]


def test_on_powers_of_two_each_rank_has_one_partial_sum_to_send() -> None:
    """As measured between hosts: tests/parallel/test_traffic.py."""
    assert [max(map(len, tree_assignment(8, ranks))) for ranks in (1, 2, 3, 4, 8)] == [
        1,
        1,
        2,
        1,
        1,
    ]
