"""What is measured of classifiers follows from their labels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import load_config
from lockstep.evaluate.label_metrics import metrics_of_labels
from lockstep.evaluate.measure import evaluate, opened
from lockstep.evaluate.subject import Asked, find_subject
from lockstep.evaluate.text import as_text
from lockstep.trainer import run as train

CLASSES = torch.tensor([[3.0, 1, 0], [0, 2, 1], [0, 1, 2]])


@pytest.mark.parametrize(
    ("problem", "outputs", "targets", "expected"),
    [
        ("single_label_classification", CLASSES, torch.tensor([0, 1, 1]), {"accuracy": 2 / 3}),
        (None, CLASSES[None], torch.tensor([[0, -100, 1]]), {"accuracy": 1 / 2}),
        (
            "multi_label_classification",
            CLASSES[:1] - 0.5,
            torch.tensor([[1.0, 0, 0]]),
            {"accuracy": 2 / 3},
        ),
        (
            "regression",
            torch.tensor([[1.0], [2.0]]),
            torch.tensor([1.5, 2]),
            {"mean_absolute_error": 0.25},
        ),
        (
            "regression",
            torch.tensor([[1.0, 2.0]]),
            torch.tensor([[1.5, 2]]),
            {"mean_absolute_error": 0.25},
        ),
    ],
)
def test_metrics_are_those_of_the_labels(
    problem: str | None, outputs: Tensor, targets: Tensor, expected: dict[str, float]
) -> None:
    found = metrics_of_labels({"problem_type": problem})
    means = {name: float(metric(outputs, targets).float().mean()) for name, metric in found.items()}
    assert means == pytest.approx(expected)


def test_a_classifier_has_an_accuracy_and_no_perplexity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = [{"text": "ab"[n % 2] * 3, "label": n % 2} for n in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    settings = {
        "model": {"name": "hf:bert", "auto": "AutoModelForSequenceClassification", "args": sizes},
        "data": {"name": "labelled", "args": {"path": "rows.jsonl", "validation_fraction": 0.5}},
        "training": {"max_steps": 1, "batch_size": 2},
    }
    Path("run.yaml").write_text(json.dumps(settings))
    assert train(load_config("run.yaml"), output_dir=Path("run"), resume="never") == 0
    subject = find_subject(Asked(Path("run")))
    found = evaluate(opened(subject, subject.config))
    assert found.all.perplexity is None
    assert 0 <= found.metrics["accuracy"] <= 1
    assert "accuracy" in as_text(found)
    assert "perplexity" not in as_text(found)
