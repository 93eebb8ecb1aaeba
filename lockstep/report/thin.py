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
    """An exponential mean over about `span` values, without the pull of its first value."""
    keep = 1 - 1 / max(1.0, span)
    mean, weight, result = 0.0, 0.0, list[float | None]()
    for value in values:
        if value is None:
            result.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
