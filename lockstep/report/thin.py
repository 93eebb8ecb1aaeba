"""Long series made short enough to draw, without losing what stands out."""

from collections.abc import Sequence

LIMIT = 1500


def thinned(values: Sequence[float | None], limit: int = LIMIT) -> list[int]:
    """Indices to keep: of each stretch the least, the most and the first, so that peaks stay."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = limit // 3
    kept = {0, count - 1}
    for stretch in range(stretches):
        indices = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        kept.add(indices[0])
        numbers = [i for i in indices if values[i] is not None]
        if numbers:
            kept |= {min(numbers, key=lambda i: values[i] or 0.0), max(numbers, key=lambda i: values[i] or 0.0)}
    return sorted(kept)


def smoothed(values: Sequence[float | None], span: float) -> list[float | None]:
    """A moving mean over about `span` values on either side, so that it does not trail behind."""
    forth = _exponential(values, span)
    back = _exponential(values[::-1], span)[::-1]
    return [None if a is None or b is None else (a + b) / 2 for a, b in zip(forth, back, strict=True)]


def _exponential(values: Sequence[float | None], span: float) -> list[float | None]:
    """The exponential mean of what came before, without the pull of its first value."""
    keep = 1 - 1 / max(1.0, span)
    mean, weight, result = 0.0, 0.0, list[float | None]()
    for value in values:
        if value is None:
            result.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
