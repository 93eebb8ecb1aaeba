"""Says in words how a reduced gradient comes from what each micro-batch adds to it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.verify.recorded_flow import NOT_REDUCED
from lockstep.verify.relations import SAME, distance, relation

_MOST_TERMS = 32  # micro-batches of a step whose weights in a sum are solved for


def reduced_relation(
    gradient: Tensor, whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int], ranks: int, unit: float
) -> str:
    """Return a clause on how a gradient relates to the reference's.

    Args:
        whole: the reference's.
        terms: what each micro-batch adds; empty if that is not known.
        mine: the micro-batches of this rank.
        unit: factor between this rank's terms and the reference's, which a mean over ranks would have undone.
    """
    how = relation(gradient, whole, _sums(whole, terms, mine, ranks, unit))
    return (_weights(gradient, whole, terms, mine) or how) if how.startswith("differs") else how


def _weights(gradient: Tensor, whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int]) -> str:
    """Return by what each micro-batch weighs in a sum, if it is one."""
    if not 1 < len(terms) <= _MOST_TERMS or gradient.numel() < len(terms):
        return ""
    columns = torch.stack([term.flatten() for term in terms.values()], dim=1)
    both = torch.stack([gradient.double().flatten(), whole.double().flatten()], dim=1)
    solved = torch.linalg.lstsq(columns, both).solution
    if distance(columns @ solved, both) > SAME:
        return ""
    weights = {m: round(float(a / b), 3) for m, (a, b) in zip(terms, solved.tolist(), strict=True) if b}
    missing = any(weight == 0 for m, weight in weights.items() if m not in mine)
    listed = ", ".join(f"micro-batch {m} by {weight:g}" for m, weight in weights.items())
    return f"weighs {listed}" + (f": those of other ranks are {NOT_REDUCED}" if missing else "")


def _sums(whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int], ranks: int, unit: float) -> dict[str, Tensor]:
    """Return what a reduction that goes wrong may leave, by a name."""
    if not terms:
        return {}
    total = torch.stack(list(terms.values())).sum(0)
    size = float((total * total).sum())
    scale = float((total * whole.double()).sum()) / size if size else 0.0
    own = torch.stack([terms[m] for m in mine]).sum(0) if mine else torch.zeros_like(total)
    sums = {"this rank's own sum": own, "the sum of the other ranks": total - own}
    if mine:
        sums["this rank's last micro-batch's"] = terms[mine[-1]]
        sums["this rank's first micro-batch's"] = terms[mine[0]]
    found: dict[str, Tensor] = {}
    for what, each in sums.items():
        if bool(each.any()):
            found[f"{what}, {NOT_REDUCED}" if each is own else what] = each * scale * unit
            found[f"{ranks} × {what}"] = each * scale * unit * ranks
            found[f"1/{ranks} of {what}"] = each * scale * unit / ranks
    found["the reference plus this rank's own sum"] = (total + own) * scale
    return found
