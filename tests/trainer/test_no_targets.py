"""Samples whose targets are all ignored: in a micro-batch, a step, an evaluation. The reference is
plain PyTorch.
"""

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Trainer
from lockstep.bad_numbers import BadNumbersError
from lockstep.config import config_from
from lockstep.errors import RunError, UsageError
from tests.ranks import run_ranks

SAMPLES = 16
CLASSES = 3


def samples(ignored: slice) -> TensorDataset:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(SAMPLES) % CLASSES
    y[ignored] = -100
    return TensorDataset(x, y)


class Counted(nn.Linear):
    def count(self, batch: Any) -> Tensor:
        count: Tensor = (batch[1] != -100).sum()
        return count


class InForward(nn.Linear):
    """Computes a mean that is written by hand, and returns what it is of, too."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        scores = super().forward(x)
        return scores if targets is None else {"loss": by_hand(scores, targets), "scores": scores}

    def count(self, batch: Any) -> Tensor:
        count: Tensor = (batch[1] != -100).sum()
        return count


def by_hand(scores: Tensor, targets: Tensor) -> Tensor:
    valid = (targets != -100).float()
    each = F.cross_entropy(scores.float(), targets.clamp(min=0), reduction="none")
    return (each * valid).sum() / valid.sum()


LOSSES = {
    "object": (nn.Linear, nn.CrossEntropyLoss()),
    "function": (nn.Linear, F.cross_entropy),
    "partial": (nn.Linear, partial(F.cross_entropy, ignore_index=-100)),
    "lambda": (nn.Linear, lambda scores, targets: F.cross_entropy(scores, targets)),
    "by hand": (Counted, by_hand),
    "in forward": (InForward, None),
}


def trained(kind: str, data: Any, **settings: Any) -> tuple[Trainer, list[Any], list[str]]:
    """Return a trainer after the steps over some data, the steps' records, and the warnings."""
    torch.manual_seed(0)
    make, loss_fn = LOSSES[kind]
    model = make(8, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    settings = {"batch_size": 4, "shuffle": False, **settings}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(model, optimizer, loss_fn, **settings)
        records = list(trainer.steps(data))
    return trainer, records, [str(warning.message) for warning in caught]


def plain(data: TensorDataset) -> tuple[float, float]:
    """Return loss and gradient norm of the first model for all samples, in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Linear(8, CLASSES)
    x, y = data.tensors
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), float(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("ignored", [slice(4), slice(4, 8)], ids=["first", "later"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_micro_batch_without_targets_adds_nothing(
    kind: str, ignored: slice, precision: str
) -> None:
    data = samples(ignored)
    _, (record,), texts = trained(kind, data, global_batch_size=SAMPLES, precision=precision)
    assert not record.skipped
    assert (float(record.loss), float(record.grad_norm)) == pytest.approx(
        plain(data), rel=1e-2 if precision == "fp16" else 1e-5
    )
    assert not texts


def rank_without_targets() -> tuple[float, float, bool]:
    _, (record,), _ = trained(
        "by hand", samples(slice(8)), global_batch_size=SAMPLES, strategy="ddp"
    )
    return float(record.loss), float(record.grad_norm), record.skipped


def test_a_rank_without_targets_adds_nothing() -> None:
    for loss, norm, skipped in run_ranks(rank_without_targets, 2):
        assert (loss, norm) == pytest.approx(plain(samples(slice(8))))
        assert not skipped


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_without_targets_makes_no_update_and_names_its_samples(
    kind: str, precision: str
) -> None:
    data = samples(slice(8, 16))
    trainer, records, texts = trained(kind, data, global_batch_size=8, precision=precision)
    first = trained(
        kind, samples(slice(0, 0)), global_batch_size=8, max_steps=1, precision=precision
    )[0]
    assert [record.skipped for record in records] == [False, True]
    assert math.isnan(float(records[1].loss))
    assert trainer.step.progress.skipped == [1]
    for name, parameter in trainer.placed.parameters.items():  # neither momentum nor weight decay
        assert torch.equal(parameter, first.placed.parameters[name])
    assert trainer.scaler.get_scale() == first.scaler.get_scale()
    (text,) = texts
    assert (
        "no sample of step 2 has a valid target, which are number 8, 9, 10, 11, 12, 13, 14, 15 of"
        " the data" in text
    )


def test_steps_without_targets_in_a_row_end_the_run() -> None:
    data = TensorDataset(torch.randn(40, 8), torch.full((40,), -100))
    with pytest.raises(
        BadNumbersError, match="no sample of step 5 has a valid target, the last of 5"
    ) as error:
        trained("function", data, global_batch_size=4)
    assert "all targets are ignored" in str(error.value)


def test_a_run_in_which_no_step_had_targets_has_trained_nothing() -> None:
    data = TensorDataset(torch.randn(12, 8), torch.full((12,), -100))
    with pytest.raises(RunError, match="nothing was trained: all 3 steps had no valid target"):
        trained("function", data, global_batch_size=4)


def test_of_several_steps_without_targets_the_first_is_told_and_the_number() -> None:
    _, records, texts = trained("function", samples(slice(4, 12)), global_batch_size=4)
    assert [record.skipped for record in records] == [False, True, True, False]
    first, number = texts
    assert "no sample of step 2 has a valid target" in first
    assert number == "2 steps had no valid target, and made no update"


def test_a_step_of_a_loop_of_ones_own_without_targets() -> None:
    x, y = samples(slice(0, 4)).tensors
    trainer = Trainer(
        nn.Linear(8, CLASSES), "sgd", F.cross_entropy, batch_size=4, global_batch_size=4
    )
    before = [p.detach().clone() for p in trainer.placed.parameters.values()]
    with pytest.warns(UserWarning, match="no sample of step 1 has a valid target"):
        assert math.isnan(float(trainer.training_step((x[:4], y[:4]))))
    assert all(
        torch.equal(p, q) for p, q in zip(trainer.placed.parameters.values(), before, strict=True)
    )
    assert math.isfinite(float(trainer.training_step((x[4:8], y[4:8]))))


def test_an_evaluation_without_targets_is_nan_and_passed_over(tmp_path: Path) -> None:
    model = nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    trainer = Trainer(
        model,
        optimizer,
        F.cross_entropy,
        batch_size=4,
        global_batch_size=4,
        max_steps=4,
        eval_steps=1,
        output_dir=tmp_path,
        keep_best="eval_loss",
        early_stopping={"patience": 1},
        scheduler=plateau,
    )
    nothing = samples(slice(0, SAMPLES))
    with pytest.warns(UserWarning, match="no sample of the evaluation has a valid target"):
        last = trainer.train(samples(slice(0, 0)), nothing)
    assert last is not None
    assert last.step == 4
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert trainer.best_checkpoint is None
    with pytest.warns(UserWarning, match="no sample of the evaluation"):
        assert math.isnan(trainer.evaluate(nothing))
    assert math.isfinite(trainer.evaluate(samples(slice(0, SAMPLES - 1))))


@pytest.mark.parametrize(
    ("args", "of_class"),
    [
        ({}, nn.CrossEntropyLoss()),
        (
            {"ignore_index": 0, "label_smoothing": 0.2},
            nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.2),
        ),
    ],
)
def test_a_config_names_a_function_of_torchs(args: dict[str, Any], of_class: nn.Module) -> None:
    data = samples(slice(2, 5))
    data.tensors[1].clamp_(min=0)
    losses = []
    for loss_fn in (None, of_class):
        named = (
            {}
            if loss_fn
            else {"loss_fn": {"name": "torch.nn.functional:cross_entropy", "args": args}}
        )
        torch.manual_seed(0)
        settings: Any = {"batch_size": 2, "global_batch_size": SAMPLES}
        trainer = Trainer(
            nn.Linear(8, CLASSES), "sgd", loss_fn, config=config_from(named), **settings
        )
        losses += [float(record.loss) for record in trainer.steps(data)]
    assert losses[0] == losses[1]


def test_arguments_that_a_function_of_torchs_does_not_take() -> None:
    config = config_from(
        {"loss_fn": {"name": "torch.nn.functional:cross_entropy", "args": {"ignored": 0}}}
    )
    with pytest.raises(
        UsageError, match="takes no argument 'ignored'; did you mean 'ignore_index'"
    ):
        Trainer(nn.Linear(8, CLASSES), "sgd", config=config)
    with pytest.raises(UsageError, match="arguments that do not belong to it"):
        Trainer(nn.Linear(8, CLASSES), "sgd", partial(F.cross_entropy, ignored=0))
