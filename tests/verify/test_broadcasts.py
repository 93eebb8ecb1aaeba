"""A loss that pairs each prediction with all targets is said, and no other."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from lockstep.verify.script.observed.broadcasts import product_in, watch_losses


def said(given: tuple[int, ...], target: tuple[int, ...]) -> list[str]:
    """Return what is said of torch's losses of these shapes."""
    found: list[str] = []
    with warnings.catch_warnings():  # puts back what shows them
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_args, **_kwargs: None
        watch_losses(found.append)
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
            loss(torch.zeros(given), torch.zeros(target))
    return found


@pytest.mark.parametrize(("given", "target"), [((8, 1), (8,)), ((8,), (8, 1)), ((8, 8, 1), (8, 8))])
def test_samples_that_meet_the_targets_of_others(
    given: tuple[int, ...], target: tuple[int, ...]
) -> None:
    found = said(given, target)
    assert len(found) == 4
    assert f"is given {list(given)} and the targets {list(target)}" in found[0]


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ((8, 1), (8, 1)),
        ((8, 1), (1,)),  # one number for all, as in a GAN
        ((8, 1), ()),
        ((8, 3, 4), (3, 4)),  # one picture for all
        ((8, 3, 1), (8, 1, 3)),  # all pairs of a sample's quantiles
        ((8, 3, 1), (3, 4)),  # one picture for all, its columns from one number
        ((1, 1), (1,)),
    ],
)
def test_sound_losses(given: tuple[int, ...], target: tuple[int, ...]) -> None:
    assert said(given, target) == []


def product(given: tuple[int, ...], by: tuple[int, ...], *, learned: bool = False) -> str:
    """Return what is said of a product of losses with a mask; or with what is `learned`, too."""
    losses = torch.zeros(given, requires_grad=True)
    mask = torch.ones(by, requires_grad=learned)
    assert product_in(losses, mask) == product_in(mask, losses)
    return product_in(losses, mask)


@pytest.mark.parametrize(("given", "by"), [((8, 1), (8,)), ((8,), (8, 1)), ((8, 8), (8, 8, 1))])
def test_samples_that_meet_the_masks_of_others(given: tuple[int, ...], by: tuple[int, ...]) -> None:
    assert f"{list(given)} is multiplied by {list(by)}" in product(given, by)


@pytest.mark.parametrize(
    ("given", "by"),
    [
        ((8, 5), (8, 5)),
        ((8, 1), (8, 1)),
        ((8, 5), (8, 1)),  # one weight a sample
        ((8, 5), (5,)),  # one a position
        ((8, 5, 3), (8, 5)),  # fails by itself
        ((2, 8, 5), (8, 5)),  # one mask for all heads
        ((8, 1), (1,)),
        ((8, 1), ()),
        ((8, 1), (1, 8)),  # all pairs, on purpose
        ((8, 1), (5,)),  # one number of a sample for each of five
        ((1, 1), (1,)),
    ],
)
def test_sound_products(given: tuple[int, ...], by: tuple[int, ...]) -> None:
    assert product(given, by) == ""
    assert product((8, 1), (8,), learned=True) == ""  # an outer product
