"""The results of an evaluation as lines, or as JSON.

Tests: tests/evaluate/test_evaluate.py
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lockstep.evaluate.measure import Evaluation, MeanLoss


def as_json(found: Evaluation) -> str:
    """Return one JSON object, whose floats are those of the evaluation to the bit."""
    return json.dumps(asdict(found), default=str, ensure_ascii=False)


def as_text(found: Evaluation) -> str:
    """Return the results for a reader."""
    return "\n".join(_lines(found))


def _lines(found: Evaluation) -> Iterator[str]:
    """Yield the subject, a table of its numbers, and the texts."""
    step = "" if found.step is None else f", step {found.step}"
    yield f"{found.name}{step}, on {found.data} ({found.topology})"
    rows = [("loss", _shown(found.all))]
    if found.recorded is not None:
        same = found.recorded == found.all.loss
        difference = "the same" if same else f"{found.all.loss - found.recorded:+.2g}"
        rows.append(("recorded", f"{found.recorded:.6f} by the run at that step: {difference}"))
    rows += [(f"  {name}", _shown(measured)) for name, measured in found.by_source.items()]
    rows += [(name, _value(value)) for name, value in found.metrics.items()]
    for task, values in found.tasks.items():
        rows += [(f"{task}, {metric}", _value(value)) for metric, value in values.items()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        yield f"  {name:<{width}}  {value}"
    for text in found.texts:
        yield ""
        yield text


def _shown(measured: MeanLoss) -> str:
    parts = [f"{measured.loss:.6f}"]
    if measured.perplexity is not None:
        parts.append(f"perplexity {measured.perplexity:.4f}")
    if measured.samples is not None:
        parts.append(f"{measured.samples} samples")
    return ", ".join(parts)


def _value(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)
