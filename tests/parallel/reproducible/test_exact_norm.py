"""A norm whose bits do not depend on how gradients are cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parallel.parallel_model import gradient_norm
from lockstep.parallel.reproducible.exact_norm import exact_norm

CPU = torch.device("cpu")


def uneven(seed: int, exponent: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-9, 1, (5000,), generator=generator)
    return torch.randn(5000, generator=generator) * spread * 10.0**exponent


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.floats(-30, 15), st.lists(st.integers(1, 4999), max_size=6))
def test_cuts_and_order_change_no_bit(seed: int, exponent: float, cuts: list[int]) -> None:
    whole = uneven(seed, exponent)
    norm = exact_norm([whole], [], CPU, 5000)
    shuffled = whole[torch.randperm(5000, generator=torch.Generator().manual_seed(seed))]
    pieces = list(torch.tensor_split(shuffled, sorted(cuts)))
    assert exact_norm([p.reshape(-1, 1) for p in pieces], [], CPU, 5000).item() == norm.item()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.floats(-30, 15), st.sampled_from([5000, 2**30, 2**40]))
def test_it_is_the_norm(seed: int, exponent: float, elements: int) -> None:
    whole = uneven(seed, exponent)
    true = math.sqrt(math.fsum(float(x) ** 2 for x in whole.double()))
    assert exact_norm([whole], [], CPU, elements).item() == pytest.approx(true, rel=2**-23)


def test_many_small_gradients_beside_a_large_one_are_not_lost() -> None:
    """In one fixed-point number, squares below its unit would vanish."""
    gradients = torch.full((1 << 20,), 2.0**-13)
    gradients[0] = 1.0
    assert exact_norm([gradients], [], CPU, 1 << 30).item() == pytest.approx(
        math.sqrt(1 + (2**20 - 1) * 2**-26)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_seen(bad: float) -> None:
    assert not math.isfinite(
        exact_norm([torch.ones(3), torch.tensor([1.0, bad])], [], CPU, 5).item()
    )


def test_nothing_has_the_norm_zero() -> None:
    assert exact_norm([], [], CPU, 5).item() == 0.0
    assert exact_norm([torch.zeros(5)], [], CPU, 5).item() == 0.0


@pytest.mark.parametrize("others", [[], [torch.full((7,), 3 + 4j)], [torch.full((3, 5), 0.5)]])
def test_many_small_gradients_have_the_norm_of_one(others: list[torch.Tensor]) -> None:
    """In float32, the sum of their squares is 1e-6 off."""
    small = [uneven(seed, 0.0)[:900].reshape(30, 30) for seed in range(200)]
    gradients = [*small, *others, torch.randn(100, 100, generator=torch.Generator().manual_seed(0))]
    true = math.sqrt(math.fsum(abs(x) ** 2 for g in gradients for x in g.flatten().tolist()))
    assert gradient_norm(gradients, [], CPU).item() == pytest.approx(true, rel=2**-22)
