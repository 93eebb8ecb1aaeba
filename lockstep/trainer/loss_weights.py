"""What to write where a loss does not add up: the `count` that explains it, if a member of the batch does."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_IGNORED = (-100, -1, 0, 255)  # targets that are commonly left out
_CLOSE = 1e-4


def line_to_write(halves: tuple[Any, Any] | None = None, weight: float = -1.0, *, counted: bool = False) -> str:
    """The fix of a loss that does not add up.

    Args:
        halves: two parts of a batch.
        weight: of the first of them in the loss of both, if it is a mean of the two.
        counted: the model has a `count`, or declares its loss.
    """
    if halves is not None and 0 < weight < 1:
        for text, one, other in _candidates(*halves):
            if one + other and abs(one / (one + other) - weight) < _CLOSE:
                return f"give the model what its loss is a mean over:\ndef count(self, batch):\n    return {text}"
    if halves is not None and not 0 < weight < 1:
        return (
            "a sample's loss depends on the others of its micro-batch (contrastive losses, statistics of the batch), "
            "or the loss is a sum. No count makes the first add up: take it that training.batch_size is part of what "
            'is learned. A sum says so: loss_reduction = "sum", or reduction = "sum" of a loss function'
        )
    what = "its count(batch) is something else than" if counted else "give the model"
    return (
        f"{what} what its loss is divided by, for instance\ndef count(self, batch):\n"
        '    return (batch["labels"] != -100).sum()'
    )


def _candidates(one: Any, other: Any) -> Iterator[tuple[str, float, float]]:
    """(expression, its value for each half) of what a loss may be a mean over."""
    for key in one if isinstance(one, Mapping) else range(len(one) if isinstance(one, tuple | list) else 0):
        a, b = one[key], other[key]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not a.ndim:
            continue
        member = f"batch[{key!r}]".replace("'", '"')
        if a.is_floating_point() or a.dtype.itemsize == 1:
            yield f"{member}.sum()", float(a.sum()), float(b.sum())
            continue
        for ignored in _IGNORED:
            yield f"({member} != {ignored}).sum()", float((a != ignored).sum()), float((b != ignored).sum())
        if a.ndim > 1:
            for ignored in _IGNORED:
                text = f"({member}[..., 1:] != {ignored}).sum()"
                yield text, float((a[..., 1:] != ignored).sum()), float((b[..., 1:] != ignored).sum())
        yield f"{member}.sum()", float(a.sum()), float(b.sum())
