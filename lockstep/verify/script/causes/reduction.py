"""Names how ranks of a script combine their own gradients into the one with which they step.

Two ranks whose own gradients are 1 and 5, and their mean 3. If both step with 6, 1.5, 1 or 0:

    >>> own = [np.array([1.0]), np.array([5.0])]
    >>> for final in (6.0, 1.5, 1.0, 0.0):
    ...     print(_mistake([np.array([final])] * 2, own).text.format(which=""))
    the gradient is the sum over ranks, 2 × the mean that one process has
    the gradient is divided by the number of ranks twice: 1/2 of the mean
    the gradient on all ranks is rank 0's alone
    the gradient is lost: it is 0 where the ranks' own gradients are not

Each parameter is judged by itself, so that one of many that is not reduced is found.

Tests: tests/verify/test_algebra.py, tests/verify/test_script.py,
tests/parallel/test_worked_examples.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import listed
from lockstep.verify.algebra import (
    ADDS_UP,
    OWN,
    Values,
    distance,
    factor,
    mean_of,
    weighted_sum,
    wrong_sums,
)
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.evidence import GradientEvidence
from lockstep.verify.script.causes.fixes import script_cause
from lockstep.verify.script.causes.gradients import BY_PARTS, NOT_SYNCHRONISED, SUM
from lockstep.verify.script.vectors import floor_of, is_same, is_wrong


@dataclass(frozen=True)
class _Mistake:
    """A mistake in how ranks combine their own gradients into the one with which they step."""

    kind: str  # of the cause; "" if nothing is known of it
    text: str  # `{which}` stands for the parameters
    # how many factors were fitted: some fit any parameter that has no more elements
    fitted: int = 0


_UNEXPLAINED = _Mistake("", "")


def reduction_cause(evidence: GradientEvidence) -> Cause | None:
    """Return the cause if ranks don't step with the mean of their own gradients.

    Each parameter is judged by itself.
    """
    floor = floor_of(evidence.reference)
    apart: dict[_Mistake, list[str]] = {}
    for name, part in evidence.slices.items():
        final = [gradient[part] for gradient in evidence.ranks]
        if any(is_wrong(gradient, evidence.reference[part], floor) for gradient in final):
            mistake = _mistake(final, [gradient[part] for gradient in evidence.own])
            if mistake is not None:
                apart.setdefault(mistake, []).append(name)
    apart.pop(_UNEXPLAINED, None)
    for mistake, names in list(apart.items()):
        if all(evidence.sizes[name] <= mistake.fitted for name in names):
            del apart[mistake]
    if not apart:
        return None
    mistake = max(apart, key=lambda each: len(apart[each]))
    names = apart[mistake]
    which = "" if len(names) == len(evidence.sizes) else f" of {listed(names, 5)}"
    by = f"{BY_PARTS}: added up so, they are the ranks' gradient"
    text = mistake.text.format(which=which)
    return script_cause(mistake.kind, text, by, evidence.framework, parameters=names)


def _mistake(final: Sequence[Values], own: Sequence[Values]) -> _Mistake | None:
    """Return how ranks' gradients of one parameter come from their own ones.

    None: they are the mean.
    """
    mean = mean_of(own)
    if all(is_same(gradient, mean) for gradient in final):
        return None
    if all(is_same(gradient, final[0]) for gradient in final[1:]):
        return _mistake_of_all(final[0], own, mean)
    return _mistake_of_each(final, own, mean)


def _mistake_of_each(final: Sequence[Values], own: Sequence[Values], mean: Values) -> _Mistake:
    """Return how ranks, which step with different gradients, come to theirs."""
    ranks = len(own)
    parts = [gradient / ranks for gradient in own]
    # of each rank: (what is summed, how many times) → the wrong sum that it may have been left with
    sums_of_ranks = [
        {(sum_.what, sum_.times): sum_ for sum_ in wrong_sums(parts, [rank], ranks, unit=ranks)}
        for rank in range(ranks)
    ]
    for what, times in dict.fromkeys(key for sums in sums_of_ranks for key in sums):
        candidates = [sums.get((what, times)) for sums in sums_of_ranks]
        # A sum that is 0 on a rank is not among those that may be left there.
        values = [np.zeros_like(mean) if sum_ is None else sum_.value for sum_ in candidates]
        if not all(map(is_same, final, values)):
            continue
        text = (
            "the gradient{which} is not synchronised: each rank's optimizer uses the gradient of"
            " its own samples"
        )
        if what == OWN and times == 1 / ranks:
            text = (
                "the gradient{which} is not synchronised, and divided by the number of ranks: each"
                " rank's optimizer uses its own"
            )
        elif (what, times) != (OWN, 1.0):
            first = next(sum_ for sum_ in candidates if sum_ is not None)
            text = (
                f"the gradient{{which}} on each rank {first.relation}, and not the mean over ranks"
            )
        return _Mistake(NOT_SYNCHRONISED, text)
    apart = [rank for rank, gradient in enumerate(final) if not is_same(gradient, mean)]
    if is_same(mean_of(final), mean):
        text = (
            "the gradient{which} differs from rank to rank, and only its mean over ranks is right:"
            " a part of it is not synchronised, as what is added after the ranks are reduced"
        )
        return _Mistake(NOT_SYNCHRONISED, text)
    if len(apart) == ranks:
        return _UNEXPLAINED
    text = (
        f"the gradient{{which}} on rank {listed(list(map(str, apart)))} is not the mean over ranks,"
        " and on the others it is"
    )
    return _Mistake(NOT_SYNCHRONISED, text)


def _mistake_of_all(final: Values, own: Sequence[Values], mean: Values) -> _Mistake:
    """Return how the gradient with which all ranks step is made of their own ones."""
    ranks = len(own)
    if not final.any():
        text = "the gradient{which} is lost: it is 0 where the ranks' own gradients are not"
        return _Mistake(NOT_SYNCHRONISED, text)
    if is_same(final, mean * ranks):
        text = (
            f"the gradient{{which}} is the sum over ranks, {ranks} × the mean that one process has"
        )
        return _Mistake(SUM, text)
    if is_same(final, mean / ranks):
        text = (
            f"the gradient{{which}} is divided by the number of ranks twice: 1/{ranks} of the mean"
        )
        return _Mistake(SUM, text)
    for rank, gradient in enumerate(own):
        if is_same(final, gradient):
            return _Mistake(
                NOT_SYNCHRONISED, f"the gradient{{which}} on all ranks is rank {rank}'s alone"
            )
    times = factor(final, mean)
    if distance(final, times * mean) <= ADDS_UP:
        text = f"the gradient{{which}} is {times:.3g} × the mean over ranks"
        return _Mistake(SUM, text, fitted=1)
    fitted = weighted_sum(own, final)
    if not fitted.is_unique or fitted.residual > ADDS_UP:
        return _UNEXPLAINED
    weights = ", ".join(f"{weight:.3g}" for weight in np.round(fitted.weights, 6) + 0.0)
    text = f"the ranks' gradients{{which}} count {weights}, and 1/{ranks} each in a mean"
    return _Mistake("weights of ranks", text, fitted=ranks)
