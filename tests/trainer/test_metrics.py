"""Metrics and predictions over whole data sets: each sample once, on every topology the number of
one process.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep import Trainer
from lockstep.errors import RunError, UsageError
from lockstep.run_directory.records import RunDirectory
from tests.parity.same_bits import trainer_for
from tests.parity.toy import Tokens
from tests.ranks import run_ranks

# 53 is not a multiple of any batch here
SAMPLES = 53
CLASSES = 3


def points() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    )


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(-1) == targets


def token_hits(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets)[targets != -100]


def mean_margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over the micro-batch: the last one is smaller."""
    best = outputs.topk(2).values
    return (best[:, 0] - best[:, 1]).mean()


class InOrder:
    """Depends on the order of the samples, and on nothing else: the outputs that it
    saw, each once.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = 0.0
        self.seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for row, target in zip(outputs.double(), targets, strict=True):
            self.value = 0.9 * self.value + float(row.sum()) * (float(target.sum()) + 1)
            self.seen += 1

    def compute(self) -> Tensor:
        return torch.tensor([self.value, self.seen], dtype=torch.float64)


def objects() -> dict[str, Any]:
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

    class OfLogits(MulticlassAUROC):  # type: ignore[misc]
        """torchmetrics takes logits for probabilities where a batch's happen to lie between 0 and
        1.
        """

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            super().update(outputs.softmax(-1), targets)

    return {"f1": MulticlassF1Score(CLASSES, average="macro"), "auroc": OfLogits(CLASSES)}


Found = dict[str, Any]


def of_points(strategy: str, **settings: Any) -> Found:
    trainer = Trainer(
        chain(),
        loss_fn=nn.CrossEntropyLoss(),
        strategy=strategy,
        batch_size=4,
        reproducible=True,
        global_batch_size=16,
        min_num_params=1,
        max_steps=2,
        **settings,
    )
    list(trainer.steps(points()))
    before = torch.get_rng_state()
    metrics = {"hits": hits, "margin": mean_margin, "order": InOrder(), **objects()}
    found = trainer.evaluate(points(), metrics)
    again = trainer.evaluate(
        DataLoader(points(), batch_size=5), {"order": metrics["order"], "hits": hits}
    )
    predictions = trainer.predict(points())
    classes = trainer.predict(
        DataLoader(TensorDataset(points().tensors[0]), 6), lambda outputs: outputs.argmax(-1)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(trainer.forward(points().tensors[0]).argmax(-1), classes)
    return {
        **found,
        "again": again["order"],
        "same": again["hits"],
        "predictions": predictions,
        "classes": classes,
        "plain loss": trainer.evaluate(points()),
    }


def of_tokens(topology: str) -> Found:
    settings = {
        "training.max_steps": 1,
        "training.eval_batches": 33,
        "distributed.context_blocks": 4,
    }
    settings["distributed.sequence_parallel"] = False
    trainer = trainer_for(topology, "transformer", settings, vocab_size=64)
    list(trainer.steps(Tokens()))
    return trainer.evaluate(Tokens(), {"hits": token_hits, "order": InOrder()})


def on_four_ranks(points_on: list[str], tokens_on: list[str]) -> dict[str, Found]:
    found = {name: of_points(POINTS[name][0], **POINTS[name][1]) for name in points_on}
    return found | {topology: of_tokens(topology) for topology in tokens_on}


POINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "pipeline and ddp": ("pipeline", {"pipeline_size": 2}),
}
TOKENS = ["fsdp:2*context:2", "pipeline:2*tensor:2"]


def require_equal(found: Found, expected: Found, where: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = (
            torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        )
        assert same, (where, name, found[name], value)


@pytest.mark.parametrize(
    ("points_on", "tokens_on"),
    [
        (["pipeline and ddp"], TOKENS[:1]),
        pytest.param(["ddp", "fsdp"], TOKENS[1:], marks=pytest.mark.full),
    ],
    ids=["some", "rest"],
)
def test_every_topology_finds_the_numbers_of_one_process(
    points_on: list[str], tokens_on: list[str]
) -> None:
    pytest.importorskip("torchmetrics")
    points_alone = of_points("single")
    tokens_alone = of_tokens("single")
    assert points_alone["order"][1] == SAMPLES
    assert points_alone["loss"] == points_alone["plain loss"]
    for ranks in run_ranks(on_four_ranks, 4, points_on, tokens_on):
        for name in points_on:
            require_equal(ranks[name], points_alone, name)
        for name in tokens_on:
            # Logits of a cut vocabulary are those of one process up to rounding; the loss is
            # computed from its parts.
            order = ranks[name].pop("order")
            assert order.tolist() == pytest.approx(tokens_alone["order"].tolist(), rel=1e-5), name
            require_equal(
                ranks[name], {k: v for k, v in tokens_alone.items() if k != "order"}, name
            )


def test_a_run_that_asks_for_evaluations_without_data_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases: dict[str, dict[str, Any]] = {
        "eval_steps": {"eval_steps": 2},
        "eval_strategy": {"eval_strategy": "epoch", "eval_steps": None},
        "": {"eval_steps": None},
        "nothing is asked for": {},
    }
    for key, settings in cases.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            Trainer(
                chain(), loss_fn=nn.CrossEntropyLoss(), batch_size=4, max_steps=1, **settings
            ).train(points())
        printed = "".join(capsys.readouterr())
        told = [*map(str, (each.message for each in warned)), *printed.splitlines()]
        about_data = [line for line in told if "validation data" in line]
        assert len(about_data) == key.startswith("eval"), about_data
        assert all(f"training.{key} means nothing" in line for line in about_data)


def test_they_are_those_of_a_plain_loop() -> None:
    trainer = Trainer(chain(), loss_fn=nn.CrossEntropyLoss(), batch_size=4)
    model = chain().eval()
    x, y = points().tensors
    outputs = model(x)
    found = trainer.evaluate(points(), {"hits": hits, "margin": mean_margin, **objects()})
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, y).item(), rel=1e-6)
    assert found["hits"] == hits(outputs, y).double().mean().item()
    assert found["margin"] == pytest.approx(mean_margin(outputs, y).item(), rel=1e-6)
    for name, metric in objects().items():
        assert found[name] == pytest.approx(float(metric(outputs, y)), rel=1e-6)
    torch.testing.assert_close(trainer.predict(points()), outputs)


def test_a_collection_names_its_results() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    collection = torchmetrics.MetricCollection(objects(), prefix="val_")
    found = Trainer(chain(), loss_fn=nn.CrossEntropyLoss()).evaluate(points(), collection)
    assert list(found) == ["loss", "val_f1", "val_auroc"] or sorted(found) == [
        "loss",
        "val_auroc",
        "val_f1",
    ]
    with pytest.raises(UsageError, match=r"without a name(.|\n)*write metrics="):
        Trainer(chain(), loss_fn=nn.CrossEntropyLoss()).evaluate(points(), objects()["f1"])


class Lengths(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(index + 1)}


def test_predictions_of_many_shapes_are_a_list() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"twice": 2 * x, "mean": x.mean()}

    found = Trainer(Twice(1, 1)).predict(DataLoader(Lengths(), batch_size=1))
    assert [row.tolist() for row in found["twice"]] == [[2.0] * n for n in (1, 2, 3, 4)]
    assert found["mean"].tolist() == [1.0] * 4


def test_an_error_in_a_metric_and_a_value_that_is_none() -> None:
    trainer = Trainer(chain(), loss_fn=nn.CrossEntropyLoss())

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("shapes differ")

    with pytest.raises(
        RunError,
        match=r"the metric 'broken' raised ValueError: shapes differ\n  where: .*test_metrics",
    ):
        trainer.evaluate(points(), {"broken": broken})
    with pytest.raises(
        UsageError, match=r"the metric 'accuracy' is a str(.|\n)*function \(outputs, targets\)"
    ):
        trainer.evaluate(points(), {"accuracy": "accuracy"})  # type: ignore[dict-item]
    assert trainer.evaluate(points(), {"hits": hits}).keys() == {"loss", "hits"}


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = chain()

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.inside(x), hidden_states=(x,))


def of_the_batch(outputs: Any, batch: Any) -> Any:
    return outputs.argmax(-1) == batch["labels"]


@pytest.mark.parametrize(
    ("metric", "what"),
    [
        (
            lambda outputs, targets: outputs.logits.argmax(-1) == targets,
            "raised AttributeError: 'Tensor' object has no attribute",
        ),
        (of_the_batch, "raised IndexError: "),
        (
            lambda outputs, targets: {"accuracy": 1.0},
            "returned a dict, which is not a number or several",
        ),
        (lambda outputs, targets: None, "returned a NoneType"),
        (lambda prediction: 1.0, "raised TypeError: "),
    ],
)
def test_a_metric_that_takes_something_else_is_one_error_that_says_what_it_is_given(
    metric: Any, what: str
) -> None:
    trainer = Trainer(Answering(), loss_fn=nn.CrossEntropyLoss(), batch_size=4)
    with pytest.raises(RunError) as caught:
        trainer.evaluate(points(), {"accuracy": metric})
    message = str(caught.value)
    assert f"the metric 'accuracy' {what}" in message
    assert re.search(
        r"given outputs = Tensor \[4, \d\] float32 and targets = Tensor \[4\] int64", message
    ), message
    assert (
        'do: write a function of these two, such as {"accuracy": lambda outputs, targets:'
        in message
    )


def test_an_object_that_takes_something_else_is_told_the_same() -> None:
    class Counting:
        def update(self, outputs: Any, targets: Any) -> None:
            outputs.logits.sum()

        def compute(self) -> float:
            return 0.0

    with pytest.raises(
        RunError, match=r"the metric 'mine' raised AttributeError(.|\n)*given outputs = Tensor \[4"
    ):
        Trainer(Answering(), loss_fn=nn.CrossEntropyLoss(), batch_size=4).evaluate(
            points(), {"mine": Counting()}
        )


def test_a_metric_takes_members_of_the_batch_by_their_names() -> None:
    def weighed(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets) * weights

    data = points()
    weights = torch.arange(float(SAMPLES))
    rows = [
        {"input": x, "targets": y, "weights": weight}
        for (x, y), weight in zip(data, weights, strict=True)
    ]
    trainer = Trainer(chain(), loss_fn=nn.CrossEntropyLoss(), batch_size=5)
    found = trainer.evaluate(DataLoader(rows, batch_size=5), metrics={"weighed": weighed})
    x, y = data.tensors
    right = trainer.placed.root.eval()(x).argmax(-1) == y  # type: ignore[union-attr]
    assert found["weighed"] == pytest.approx(float((right * weights).mean()))
    with pytest.raises(UsageError, match="the metric weighed takes weights, and a batch has no"):
        trainer.evaluate(data, metrics={"weighed": weighed})


def test_values_of_numpy_and_lists_are_values() -> None:
    trainer = Trainer(chain(), loss_fn=nn.CrossEntropyLoss(), batch_size=4)
    as_array = {
        "hits": hits,
        "array": lambda o, y: hits(o, y).numpy(),
        "list": lambda o, y: hits(o, y).tolist(),
    }
    found = trainer.evaluate(points(), as_array)
    assert found["array"] == found["list"] == found["hits"]


# ---- what follows them ----


def follower(
    folder: Path, scheduler: Callable[[torch.optim.Optimizer], Any] | None = None, **settings: Any
) -> Trainer:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    common = {"batch_size": 4, "eval_steps": 4, "save_steps": 4, "sinks": ["jsonl"], "log_steps": 1}
    return Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        output_dir=folder,
        scheduler=scheduler and scheduler(optimizer),
        **{**common, **settings},
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k in ("step", "loss", "lr", "eval_loss", "eval_hits")}
        for row in RunDirectory(folder).read_metrics()
    ]


def test_a_run_stops_early_and_stays_stopped_and_the_best_is_kept(tmp_path: Path) -> None:
    settings = {
        "early_stopping": {"metric": "eval_hits", "mode": "max", "patience": 2},
        "save_steps": 1000,
        "keep_best": "eval_hits",
        "keep_best_mode": "max",
        "save_total_limit": 1,
        "num_train_epochs": 40,
    }
    run = follower(tmp_path, **settings)
    run.train(points(), points(), metrics={"hits": hits})
    found = {row["step"]: row["eval_hits"] for row in rows(tmp_path) if "eval_hits" in row}
    last = max(found)
    best = max(found, key=lambda step: (found[step], -step))
    assert last == best + 8 < 400
    (event,) = [
        event for event in RunDirectory(tmp_path).read_events() if event["kind"] == "early_stop"
    ]
    assert event["step"] == last
    assert "eval_hits has not become better than" in event["reason"]
    assert run.best_checkpoint is not None
    assert run.load_checkpoint(run.best_checkpoint)[0] in [
        step for step in found if found[step] == found[best]
    ]
    assert run.evaluate(points(), {"hits": hits})["hits"] == found[best]
    again = follower(tmp_path, **settings)
    again.train(points(), points(), metrics={"hits": hits})
    assert again.step.progress.step == last
    patient = follower(
        tmp_path, **{**settings, "early_stopping": {**settings["early_stopping"], "patience": 4}}
    )
    patient.train(points(), points(), metrics={"hits": hits})
    assert patient.step.progress.step > last


@pytest.mark.parametrize("stop", [8, 14])
def test_a_scheduler_that_follows_a_metric_goes_on_in_the_same_bits(
    stop: int, tmp_path: Path
) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.02
        )

    settings: dict[str, Any] = {"scheduler": plateau, "early_stopping": {"patience": 6}}
    whole = follower(tmp_path / "whole", max_steps=40, **settings)
    whole.train(points(), points())
    rates = [row["lr"] for row in rows(tmp_path / "whole") if "lr" in row]
    assert len(set(rates)) > 2, rates
    for steps in (stop, 40):
        part = follower(tmp_path / "parts", max_steps=steps, **settings)
        part.train(points(), points())
    parts = rows(tmp_path / "parts")
    assert [row for row in rows(tmp_path / "whole") if row not in parts] == []
    for mine, other in zip(
        part.placed.parameters.values(), whole.placed.parameters.values(), strict=True
    ):
        assert torch.equal(mine, other)


def test_evaluations_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    run = follower(tmp_path, num_train_epochs=3, eval_strategy="epoch", max_steps=None)
    run.train(points(), points())
    assert [row["step"] for row in rows(tmp_path) if "eval_loss" in row] == [14, 28, 42]


def test_a_metric_that_no_evaluation_computes_is_refused_before_a_step(tmp_path: Path) -> None:
    for settings, where in (
        ({"early_stopping": {"metric": "eval_hit"}}, "training.early_stopping.metric"),
        ({"keep_best": "eval_hit"}, "checkpoint.keep_best"),
    ):
        with pytest.raises(
            UsageError, match=rf"there is no metric eval_hit(.|\n)*eval_hits(.|\n)*{where}|{where}"
        ):
            follower(tmp_path, max_steps=1, **settings).train(
                points(), points(), metrics={"hits": hits}
            )
    with pytest.raises(UsageError, match=r"eval_loss is never computed(.|\n)*pass val_data"):
        follower(tmp_path, max_steps=1, early_stopping={}).train(points())
    assert not (tmp_path / "metrics.jsonl").exists()
