"""Metrics that follow from what the labels of a data set say: accuracies, or errors of numbers.

| what is learned | metrics |
|---|---|
| one class of several | `accuracy`: the share of texts with the right class |
| a class for each word | `accuracy`: the share of words with the right class |
| any of several classes | `accuracy`: the share of classes, over all texts, told rightly |
| numbers | `mean_absolute_error` |

Tests: tests/evaluate/test_label_metrics.py
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.data.language import IGNORED

Metric = Callable[[Tensor, Tensor], Tensor]


def metrics_of_labels(labels: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics, by name, of what a data set calls `labels` among its facts."""
    if labels["problem_type"] == "regression":
        return {"mean_absolute_error": _absolute_errors}
    if labels["problem_type"] == "multi_label_classification":
        return {"accuracy": _right_of_several}
    return {"accuracy": _right}


def _right(logits: Tensor, targets: Tensor) -> Tensor:
    """Return whether the likeliest class is the right one, for each target that counts.

    Args:
        logits: [texts, classes], or [texts, tokens, classes].
        targets: numbers of classes, [texts] or [texts, tokens].
    """
    return (logits.argmax(-1) == targets)[targets != IGNORED]


def _right_of_several(logits: Tensor, targets: Tensor) -> Tensor:
    """Return for each text the share of classes that are told rightly: [texts]."""
    return ((logits > 0) == (targets > 0.5)).float().mean(-1)


def _absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean absolute error of each text: [texts]."""
    return (outputs.reshape(targets.shape) - targets).abs().reshape(len(targets), -1).mean(-1)
