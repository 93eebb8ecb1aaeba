"""Says in words how a reduced gradient comes from what each micro-batch adds to it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.verify.recorded_flow import ITSELF, NOT_REDUCED
from lockstep.verify.relations import SAME, distance, relation

_MOST_TERMS = 32  # micro-batches of a step whose weights in a sum are solved for
_SCALED = 2.0**-22  # relative rounding of a float32 that is scaled
_ALIKE = 1e-2  # relative; a gradient that is farther from the sum over micro-batches is not that sum


def reduced_relation(
    gradient: Tensor, whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int], ranks: int, unit: float,
    scale: float,
) -> str:  # fmt: skip
    """Return a clause on how a gradient relates to the reference's.

    Args:
        whole: the reference's.
        terms: what each micro-batch adds; empty if that is not known.
        mine: the micro-batches of this rank.
        unit: factor between this rank's terms and the reference's, which a mean over ranks would have undone.
        scale: factor by which the sum was multiplied after its reduction.
    """
    how = relation(gradient, whole, _sums(whole, terms, mine, ranks, unit))
    if not how.startswith("differs"):
        return how
    return _rounded(gradient, scale) or _weights(gradient, whole, terms, mine) or how


def _weights(gradient: Tensor, whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int]) -> str:
    """Return by what each micro-batch weighs in a sum, if it is one."""
    if not 1 < len(terms) <= _MOST_TERMS or gradient.numel() < len(terms):
        return ""
    columns = torch.stack([term.flatten() for term in terms.values()], dim=1)
    both = torch.stack([gradient.double().flatten(), whole.double().flatten()], dim=1)
    solved = torch.linalg.lstsq(columns, both).solution
    if distance(columns @ solved, both) > SAME:
        return ""
    total, right = columns.sum(1), both[:, 1]
    if distance(total * (total @ right) / max(float(total @ total), 1e-300), right) > _ALIKE:
        largest = float(solved[:, 1].abs().max())
        shares = zip(terms, (solved[:, 1] / largest).tolist(), strict=True)
        return f"{ITSELF} weighs {', '.join(f'micro-batch {m} by {round(share, 3) + 0.0:g}' for m, share in shares)}"
    weights = {m: round(float(a / b), 3) + 0.0 for m, (a, b) in zip(terms, solved.tolist(), strict=True) if b}
    missing = any(weight == 0 for m, weight in weights.items() if m not in mine)
    listed = ", ".join(f"micro-batch {m} by {weight:g}" for m, weight in weights.items())
    return f"weighs {listed}" + (f": those of other ranks are {NOT_REDUCED}" if missing else "")


def _rounded(gradient: Tensor, scale: float) -> str:
    """Return a clause if a gradient was rounded to 16 bits before it was scaled; else ""."""
    before = gradient.detach().double() / scale
    for dtype in (torch.bfloat16, torch.float16):
        if distance(before.to(dtype).double(), before) <= _SCALED:
            return f"is rounded to {str(dtype).removeprefix('torch.')} before it is scaled to the mean"
    return ""


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
