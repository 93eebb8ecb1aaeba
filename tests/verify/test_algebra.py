"""How a wrong value relates to the right one, and to the parts of a sum, is recognised, and nothing
else claimed.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.verify.algebra import NOT_REDUCED, RELATED, Relation, reduced_relation, relation
from lockstep.verify.script.causes.evidence import GradientEvidence, unscaled
from lockstep.verify.script.causes.gradients import own_count_cause, scaled_cause, shards_cause
from lockstep.verify.script.causes.reduction import reduction_cause
from lockstep.verify.script.causes.shared_model import shared_gradient_cause
from lockstep.verify.script.record import TORCH

RIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
PARTLY = RIGHT.clone()
PARTLY[2] = 0
PLACES = torch.arange(8)


@pytest.mark.parametrize(
    ("mine", "right", "how"),
    [
        (2 * RIGHT, RIGHT, "is 2 × the reference"),
        (RIGHT / 3, RIGHT, "is 1/3 of the reference"),
        (-RIGHT, RIGHT, "is -1 × the reference"),
        (0 * RIGHT, RIGHT, "is 0"),
        (RIGHT / 0, RIGHT, "is not finite"),
        (RIGHT.T, RIGHT, "is the reference, transposed"),
        (RIGHT.roll(1, 1), RIGHT, "is the reference shifted by 1 along dim 1"),
        (RIGHT.flip(0), RIGHT, "has the reference's values in another order"),
        (RIGHT.bfloat16().float(), RIGHT, "is rounded to bfloat16"),
        (PARTLY, RIGHT, "is 0 in 4 of 16 elements, else the reference"),
        (PLACES + 3, PLACES, "is the reference + 3"),
        (OTHER, RIGHT, "is another"),
        (RIGHT[:2], RIGHT, "has the shape [2, 4] instead of [4, 4]"),
        (RIGHT + 0.1 * RIGHT.square(), RIGHT, "differs by "),
        (torch.eye(3)[0], torch.eye(3)[1], "is the reference shifted by -1 along dim 0"),
        # no multiple: 0 × it
        (torch.tensor([0.0, 3.0, 1.0, 1.0]), torch.tensor([2.0, 0.0, 0.0, 0.0]), "differs by "),
    ],
)
def test_a_relation_is_named_if_it_holds(mine: Tensor, right: Tensor, how: str) -> None:
    assert relation(mine, right, [(Relation("is another"), OTHER)]).clause.startswith(how)


# Two ranks, as in the docstring of the module: a rank's own gradient is two times its part of the
# mean.
OWN_GRADIENTS = (torch.tensor([2.0, 0.0, 4.0]), torch.tensor([0.0, 6.0, 4.0]))
MEAN = torch.tensor([1.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("wrong", "how", "kind"),
    [
        ([2.0, 6.0, 8.0], "is 2 × the reference", RELATED),
        ([2.0, 0.0, 4.0], "is this rank's own sum, not reduced", NOT_REDUCED),
        ([1.0, 0.0, 2.0], "is 1/2 of this rank's own sum", RELATED),
        ([0.0, 6.0, 4.0], "is the sum of the other ranks", RELATED),
        ([2.0, 3.0, 6.0], "is the reference plus this rank's own sum", RELATED),
        ([1.3, 2.1, 4.0], "weighs micro-batch 0 by 1.3, micro-batch 1 by 0.7", RELATED),
    ],
)
def test_a_wrong_reduction_is_told_by_the_weights_of_its_parts(
    wrong: list[float], how: str, kind: str
) -> None:
    """One process has the parts of the mean, micro-batch by micro-batch; a config's ranks are
    compared with it.
    """
    parts = {number: own.double() / 2 for number, own in enumerate(OWN_GRADIENTS)}
    found = reduced_relation(torch.tensor(wrong), MEAN, parts, [0], ranks=2, unit=2.0, scale=1.0)
    assert (found.clause, found.kind) == (how, kind)


@pytest.mark.parametrize(
    ("ranks", "kind", "says"),
    [
        (
            [[2.0, 0.0, 4.0], [0.0, 6.0, 4.0]],
            "gradient synchronisation",
            "uses the gradient of its own samples",
        ),
        (
            [[1.0, 0.0, 2.0], [0.0, 3.0, 2.0]],
            "gradient synchronisation",
            "and divided by the number of ranks",
        ),
        (
            [[0.0, 6.0, 4.0], [2.0, 0.0, 4.0]],
            "gradient synchronisation",
            "is the sum of the other ranks, and not",
        ),
        (
            [[1.0, 3.0, 4.0], [0.0, 9.0, 4.0]],
            "gradient synchronisation",
            "on rank 1 is not the mean over ranks",
        ),
        (
            [[1.5, 1.0, 4.0], [0.5, 5.0, 4.0]],
            "gradient synchronisation",
            "only its mean over ranks is right",
        ),
        ([[2.0, 0.0, 4.0]] * 2, "gradient synchronisation", "on all ranks is rank 0's alone"),
        ([[0.0, 0.0, 0.0]] * 2, "gradient synchronisation", "is lost: it is 0"),
        ([[2.0, 6.0, 8.0]] * 2, "sum of gradients", "is the sum over ranks, 2 ×"),
        ([[0.5, 1.5, 2.0]] * 2, "sum of gradients", "divided by the number of ranks twice"),
        ([[3.0, 9.0, 12.0]] * 2, "sum of gradients", "is 3 × the mean over ranks"),
        ([[1.3, 2.1, 4.0]] * 2, "weights of ranks", "count 0.65, 0.35, and 1/2 each"),
        ([[1.0, 1.0, 1.0]] * 2, "", ""),
    ],
)
def test_a_wrong_reduction_of_a_script_is_told_by_the_same_sums(
    ranks: list[list[float]], kind: str, says: str
) -> None:
    """A script's ranks are seen together, with their own gradients before they are reduced."""
    own = [gradient.double().numpy() for gradient in OWN_GRADIENTS]
    final = [np.array(gradient) for gradient in ranks]
    evidence = GradientEvidence({"weight": 3}, final, MEAN.double().numpy(), own, TORCH)
    found = reduction_cause(evidence)
    assert (found.kind if found else "") == kind
    assert says in (found.text if found else "")


def test_gradients_that_are_one_multiple_are_told_by_their_names() -> None:
    """Two towers whose features are gathered without gradients, and a scale that all ranks see."""
    right = np.array([1.0, 3.0, 4.0])
    sizes = {"tower": 2, "scale": 1}
    halved = np.array([0.5, 1.5, 4.0])
    found = scaled_cause(GradientEvidence(sizes, [halved, halved], right, [], TORCH))
    assert found is not None
    assert found.kind == "sum of gradients"
    assert found.text == "the gradient of tower is 0.5 × that of one process"
    other = np.array([0.5, 3.5, 4.0])
    assert scaled_cause(GradientEvidence(sizes, [other, other], right, [], TORCH)) is None


def test_a_loss_that_a_script_scales_is_no_factor_of_a_rank() -> None:
    """It multiplies its loss by 4, and divides by it before the update; rank 1 multiplies by 8."""
    right = np.array([1.0, 3.0, 4.0])
    own = [4.0 * right, 8.0 * right]
    seen = unscaled(own, 4.0 * right, right)
    assert [gradient.tolist() for gradient in seen] == [right.tolist(), (2 * right).tolist()]
    clipped = np.array([1.0, 1.0, 1.0])  # by the script itself, element by element
    assert unscaled(own, 4.0 * right, clipped) is own
    assert unscaled(own, right, right) is own


def test_a_number_is_a_multiple_of_any_other() -> None:
    """A bias of one element tells no factor by itself, and with other parameters it does; two
    weights of ranks fit any parameter of two elements.
    """
    sizes = {"weight": 2, "bias": 1}
    right = np.array([1.0, 3.0, 4.0])
    own = [np.array([2.0, 0.0, 4.0]), np.array([0.0, 6.0, 4.0])]
    other = np.array([1.0, 3.5, 1.2])
    assert reduction_cause(GradientEvidence(sizes, [other] * 2, right, own, TORCH)) is None
    alone = np.array([1.0, 3.0, 1.2])
    assert scaled_cause(GradientEvidence(sizes, [alone] * 2, right, [], TORCH)) is None
    found = reduction_cause(GradientEvidence(sizes, [0.3 * right] * 2, right, own, TORCH))
    assert found is not None
    assert found.text == "the gradient is 0.3 × the mean over ranks"


@pytest.mark.parametrize(
    ("ranks", "kind", "says"),
    [
        ([[0.5, 1.5, 2.0]] * 2, "sum of gradients", "is 0.5 × that of one process"),
        (
            [[1.0, 0.0, 3.0], [0.0, 3.0, 1.0]],
            "gradient synchronisation",
            "is not summed over the ranks that share the model",
        ),
    ],
)
def test_halves_that_are_alike_are_no_parts_of_a_sum(
    ranks: list[list[float]], kind: str, says: str
) -> None:
    """Stages see one gradient, which a loss divided by their number has halved; what comes through
    a rank's own part of the layers is not alike.
    """
    right = MEAN.double().numpy()
    seen = [np.array(gradient) for gradient in ranks]
    found = shared_gradient_cause(GradientEvidence({"weight": 3}, seen, right, [], TORCH))
    assert found is not None
    assert found.kind == kind
    assert says in found.text


def test_a_count_of_a_rank_s_own_is_told_from_a_rank_that_weighs_its_samples() -> None:
    """Texts are padded to 5 words on rank 0 and in one process, and to 4 on rank 1."""
    own = [gradient.double().numpy() for gradient in OWN_GRADIENTS]
    right = 0.5 * own[0] + 0.4 * own[1]
    evidence = GradientEvidence({"weight": 3}, [(own[0] + own[1]) / 2] * 2, right, own, TORCH)
    found = own_count_cause(evidence, own)
    assert found is not None
    assert found.kind == "loss normalisation"
    assert "weighs the ranks' samples by 0.500, 0.400" in found.text
    # rank 1 computes 5/4 of what one process does on its samples
    assert own_count_cause(evidence, [own[0], 0.8 * own[1]]) is None


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ((0.5, 0.25), "(0.5 × on rank 0, 0.25 × on rank 1, of what one process has)"),
        ((0.5, 0.5), ""),  # a sum that is divided twice
        ((0.5, -1.0), ""),
    ],
)
def test_shards_that_ranks_scale_by_factors_of_their_own(
    factors: tuple[float, float], says: str
) -> None:
    right = np.array([1.0, 3.0, 4.0, 2.0])
    owner = np.array([0, 0, 1, 1])
    mine = right * np.array(factors)[owner]
    evidence = GradientEvidence({"weight": 4}, [mine, mine], right, [], TORCH)
    found = shards_cause(mine, owner, 2, evidence)
    assert (found.kind if found else "") == ("clipping" if says else "")
    assert says in (found.text if found else "")
    mine[0] += 1  # and something else is wrong
    assert shards_cause(mine, owner, 2, evidence) is None
