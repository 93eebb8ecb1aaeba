"""First mistakes: what is given in the wrong place, or is of the wrong kind, is one error that says
what to write.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import Trainer, UsageError

INPUTS = torch.randn(16, 4)
LABELS = torch.arange(16) % 3
DATA = TensorDataset(INPUTS, LABELS)
CE = nn.CrossEntropyLoss


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def frozen() -> nn.Module:
    return network().requires_grad_(False)


def unstacked() -> DataLoader[Any]:
    """Batches are lists of samples, as those of detectors are."""
    rows = [{"x": INPUTS[i], "y": LABELS[i]} for i in range(16)]
    return DataLoader(rows, batch_size=4, collate_fn=list)  # type: ignore[arg-type]


def detect(outputs: Tensor, targets: Any) -> Tensor:
    return outputs.sum()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return network()


class WithoutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()


class LightningModule(nn.Module):
    """As Lightning's: its forward calls the one of torch, which raises."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


class ClassifierWithForward(Classifier):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layers(*args, **kwargs)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield INPUTS, LABELS


def train(model: Any = None, data: Any = DATA, *, call: str = "train", **given: Any) -> None:
    trainer = Trainer(
        network() if model is None else model, **{"batch_size": 8, "max_steps": 2, **given}
    )
    if call == "train":
        trainer.train(data)
    elif call == "steps":
        list(trainer.steps(data))
    else:
        trainer.training_step(next(iter(DataLoader(data, batch_size=8))))


def placed(model: Any = None, **given: Any) -> None:
    lockstep.place(network() if model is None else model, **given).backward((INPUTS, LABELS))


def of_any_kind() -> Any:
    """A trainer whose arguments mypy does not check."""
    return Trainer(network(), loss_fn=CE())


def optimizer_of_another() -> None:
    train(optimizer=torch.optim.SGD(network().parameters(), lr=0.1), loss_fn=CE())


MISTAKES: dict[str, tuple[Callable[[], object], str, str]] = {
    "no loss_fn": (train, "no loss_fn was given", "loss_fn=torch.nn.CrossEntropyLoss()"),
    "no loss_fn, steps": (lambda: train(call="steps"), "no loss_fn was given", "pass one"),
    "no loss_fn, training_step": (
        lambda: train(call="training_step"),
        "no loss_fn was given",
        "pass one",
    ),
    "no loss_fn, place": (placed, "no loss_fn was given", "pass one"),
    "a model of two inputs": (
        lambda: train(nn.Bilinear(4, 4, 3), loss_fn=CE()),
        "forward of Bilinear can't",
        "sample",
    ),
    "the class of a loss": (
        lambda: train(loss_fn=CE),
        "loss_fn is the class CrossEntropyLoss",
        "CrossEntropyLoss()",
    ),
    "the class of a loss, place": (
        lambda: placed(loss_fn=nn.MSELoss),
        "the class MSELoss",
        "torch.nn.MSELoss()",
    ),
    "the name of a loss": (
        lambda: train(loss_fn="cross_entropy"),
        "'cross_entropy'",
        "torch.nn.CrossEntropyLoss()",
    ),
    "another name of a loss": (lambda: train(loss_fn="mse"), "'mse'", "torch.nn.MSELoss()"),
    "a number as loss": (lambda: train(loss_fn=3), "loss_fn is an int", "pass a function"),
    "a loss of one argument": (
        lambda: train(loss_fn=lambda o: o.sum()),
        "can't be called",
        "def loss_fn(outputs, t",
    ),
    "a loss that returns a number": (
        lambda: train(loss_fn=lambda o, t: o.sum().item()),
        "returned",
        "without .item()",
    ),
    "a loss that returns nothing": (
        lambda: train(loss_fn=lambda o, t: None),
        "loss function returned None",
        "return",
    ),
    "everything frozen": (
        lambda: train(frozen(), loss_fn=CE()),
        "all 4 parameters",
        "requires_grad_(True)",
    ),
    "everything frozen, steps": (
        lambda: train(frozen(), loss_fn=CE(), call="steps"),
        "all 4 par",
        "evaluate",
    ),
    "everything frozen, training_step": (
        lambda: train(frozen(), loss_fn=CE(), call="training_step"),
        "all 4 parameters",
        "requires_grad_(True)",
    ),
    "a model's name": (
        lambda: train("gpt2", loss_fn=CE()),
        "the text 'gpt2'",
        "model.name: hf:gpt2",
    ),
    "a model's class": (
        lambda: train(nn.Linear, loss_fn=CE()),
        "the class Linear",
        "Trainer(Linear(…), …)",
    ),
    "a model's name, place": (
        lambda: placed("gpt2", loss_fn=CE()),
        "the text 'gpt2'",
        "from_pretrained",
    ),
    "a loader in the model's place": (
        lambda: train(DataLoader(DATA)),
        "a DataLoader",
        ".train(data)",
    ),
    "parameters in the model's place": (
        lambda: train(network().parameters()),
        "a generator",
        "the model itself",
    ),
    "several models": (
        lambda: train([network(), network()]),
        "the model is a list",
        "nn.Sequential",
    ),
    "a LightningModule": (
        lambda: train(Classifier()),
        "Classifier is a LightningModule",
        "forward(self, inputs)",
    ),
    "a LightningModule with forward": (
        lambda: train(ClassifierWithForward()),
        "a LightningModule",
        "loss_fn",
    ),
    "no forward": (
        lambda: train(WithoutForward(), loss_fn=CE()),
        "has no forward()",
        "def forward",
    ),
    "a model on meta": (
        lambda: train(on_meta(), loss_fn=CE()),
        "0.weight is on the device meta",
        "init_weights",
    ),
    "another model's optimizer": (
        optimizer_of_another,
        "that are not the model's",
        "model.parameters()",
    ),
    "a dict as optimizer": (
        lambda: train(optimizer={"lr": 0.1}, loss_fn=CE()),
        "optimizer is a dict",
        "lambda para",
    ),
    "an optimizer that needs more": (
        lambda: train(optimizer=lambda: None, loss_fn=CE()),
        "can't be called with (parameters)",
        "lambda parameters",
    ),
    "a function that makes no optimizer": (
        lambda: train(optimizer=lambda parameters: None, loss_fn=CE()),
        "returned None, not an object of",
        "return",
    ),
    "loss and optimizer swapped": (
        lambda: train(optimizer=CE(), loss_fn=torch.optim.SGD(network().parameters())),
        "is a module",
        "Trainer(model",
    ),
    "an optimizer as loss": (
        lambda: train(loss_fn=torch.optim.SGD(network().parameters())),
        "loss_fn is the optimizer SGD",
        "optimizer, l",
    ),
    "a scheduler's class": (
        lambda: train(scheduler=CosineAnnealingLR, loss_fn=CE()),
        "T_max",
        "lambda optimizer",
    ),
    "a path as config": (
        lambda: train(config="train.yaml", loss_fn=CE()),
        "not a lockstep.Config",
        "load_config(",
    ),
    "a number as after_update": (
        lambda: train(after_update=5, loss_fn=CE()),
        "after_update is an int",
        "a function",
    ),
    "three sets of data": (
        lambda: of_any_kind().train(DATA, DATA, DATA),
        "not a number of passes over",
        "epochs=3",
    ),
    "metrics without names": (
        lambda: of_any_kind().train(DATA, DATA, metrics=[CE()]),
        "metrics is a list",
        "metrics={",
    ),
    "metrics of a trainer": (
        lambda: Trainer(network(), loss_fn=CE(), metrics={}),  # type: ignore[call-arg]
        "metrics is an argument of train and evaluate",
        "write trainer.train(…, metrics=…) or trainer.evaluate(…, m",
    ),
    "validation data of a trainer": (
        lambda: Trainer(network(), loss_fn=CE(), val_data=DATA),  # type: ignore[call-arg]
        "val_data is an argument of train",
        "trainer.train(…, val_data=…)",
    ),
    "a generator function as data": (
        lambda: train(data=batches, loss_fn=CE()),
        "the function batches",
        "batches()",
    ),
    "a class as data": (
        lambda: train(data=TensorDataset, loss_fn=CE()),
        "the class TensorDataset",
        "TensorDataset(…)",
    ),
    "inputs and labels as data": (
        lambda: train(data=(INPUTS, LABELS), loss_fn=CE()),
        "two tensors",
        "TensorDataset(",
    ),
    "a path as data": (
        lambda: train(data="train.csv", loss_fn=CE()),
        "the text 'train.csv' can't be",
        "Dataset",
    ),
    "samples that are not put together": (
        lambda: list(Trainer(network(), loss_fn=detect, max_steps=1).steps(unstacked())),
        "look like samples",
        "let the collate function return",
    ),
    "more inputs than the model takes": (
        lambda: list(
            Trainer(nn.Linear(4, 3), loss_fn=CE(), max_steps=1, batch_size=16).steps(
                [(INPUTS, INPUTS, LABELS)]
            )
        ),
        "a batch is a tuple of 3, which gives Linear.forward 2 arguments, and it takes 1: input",
        "inputs(batch)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_first_mistake_says_what_to_write(name: str) -> None:
    mistake, what, fix = MISTAKES[name]
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(UsageError) as raised:
        mistake()
    assert what in f"{raised.value.what} {raised.value.why}"
    assert fix in str(raised.value.fix)
    assert raised.value.where


def test_what_is_right_is_not_refused() -> None:
    thawed = frozen()
    assert Trainer(thawed, loss_fn=CE(), batch_size=8).evaluate(DATA) > 0  # without training
    later = Trainer(
        network(), loss_fn=CE(), batch_size=8, max_steps=2, freeze_until={"0": 1, "2": 1}
    )
    assert len(list(later.steps(DATA))) == 2
    with_forward = Trainer(ClassifierWithForward(), loss_fn=CE(), batch_size=8, max_steps=1)
    assert len(list(with_forward.steps(DATA))) == 1
    of_a_class = Trainer(network(), torch.optim.SGD, CE(), batch_size=8, max_steps=1)
    assert len(list(of_a_class.steps(DATA))) == 1
    ready = Trainer(network(), loss_fn=CE(), max_steps=1, batch_size=16).steps([(INPUTS, LABELS)])
    assert len(list(ready)) == 1
