"""Targets and token ids that the model has no class or row for: one error that names the sample."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import RunError
from lockstep.models.out_of_range import explain_index
from lockstep.trainer import Trainer
from tests.parity.same_bits import trainer_for
from tests.parity.toy import VOCAB, Tokens
from tests.ranks import run_ranks

IDS = torch.arange(6).view(2, 3)


def error_of(call: Callable[[], Any]) -> IndexError:
    with pytest.raises(IndexError) as caught:
        call()
    return caught.value


def loss(targets: list[int], **more: Any) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(torch.zeros(len(targets), 4), torch.tensor(targets), **more)


def explained(call: Callable[[], Any], batch: Any, **more: Any) -> str:
    error = explain_index(error_of(call), [(2, batch)], **more)
    assert error is not None
    return str(error)


def test_a_target_is_named_with_its_sample() -> None:
    batch = {"input_ids": IDS, "targets": torch.tensor([[0, 1, 2], [3, -1, 0]])}
    said = explained(loss([0, 1, 2, 3, -1, 0]), batch, step=7, samples=[[], [], [40, 41]])
    assert "target -1 is not one of the model's 4 classes" in said
    assert "step 7, sample 1 of micro-batch 2, number 41 of the data: targets[1]" in said
    assert "targets are whole numbers from 0 to 3, or -100" in said
    assert "write -100 in the place of -1" in said


def test_a_target_beyond_the_classes_of_a_tuple_in_an_evaluation() -> None:
    said = explained(loss([0, 4]), (torch.zeros(2, 8), torch.tensor([0, 4])))
    assert "target 4 is not one of the model's 4 classes" in said
    assert "the evaluation, sample 1 of micro-batch 2: member 1" in said
    assert "give the model as many classes as the data have" in said


def test_the_number_that_the_loss_ignores_is_its_own() -> None:
    call = loss([0, -100], ignore_index=-1)
    assert "or -1, which counts for nothing" in explained(call, (IDS, torch.tensor([0, -100])))


def test_a_token_id_is_told_from_a_target() -> None:
    ids = torch.tensor([[1, 2], [9, 0]])
    batch = {"input_ids": ids, "targets": torch.tensor([[9, 9], [9, 9]])}
    said = explained(lambda: F.embedding(ids, torch.zeros(5, 3)), batch)
    assert "token id 9 is not in the embedding of 5 rows" in said
    assert "sample 1 of micro-batch 2: input_ids[0]" in said
    assert "padding is a token" in explained(
        lambda: F.embedding(ids - 2, torch.zeros(9, 3)), {"input_ids": ids - 2}
    )


def test_other_errors_are_left_alone() -> None:
    assert explain_index(error_of(lambda: [][0]), [(0, IDS)]) is None
    # the number is in no batch: the model made it
    assert explain_index(error_of(loss([7])), [(0, IDS)]) is None


class Wrong(Tokens):
    """Each sample's target at place 9 is another number in one of them."""

    def __init__(self, number: int, sample: int = 5) -> None:
        super().__init__()
        self.number = number
        self.sample = sample

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        if index == self.sample:
            item["targets"][9] = self.number
        return item


PLAIN = {"distributed.reproducible": False}


def message(topology: str, settings: dict[str, Any], number: int) -> str:
    """The error of a training over all samples."""
    steps = {"training.max_steps": None, "training.num_train_epochs": 1}
    trainer = trainer_for(topology, "transformer", {**steps, **settings})
    with pytest.raises(RunError) as caught:
        list(trainer.steps(Wrong(number)))
    return str(caught.value)


ALL_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "equal bits": {},
    "in chunks": {**PLAIN, "training.loss_chunks": 2},
    "smoothed": {**PLAIN, "training.label_smoothing": 0.1},
}


# by turns below 0 and above the vocabulary; in the full grid both
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        pytest.param(
            settings,
            number,
            id=f"{name}, {number}",
            marks=() if place % 2 == (number < 0) else pytest.mark.full,
        )
        for place, (name, settings) in enumerate(ALL_SETTINGS.items())
        for number in (-1, VOCAB)
    ],
)
def test_a_training_names_the_sample(settings: dict[str, Any], number: int) -> None:
    said = message("single", settings, number)
    assert f"target {number} is not one of the model's {VOCAB} classes" in said
    assert "number 5 of the data: targets[9]" in said


@pytest.mark.full
@pytest.mark.parametrize("topology", ["tensor:2", "context:2", "pipeline:2", "fsdp:2"])
def test_the_rank_that_has_the_sample_names_it(topology: str) -> None:
    axis = topology.partition(":")[0]
    settings = {"distributed.open_axes": [axis]} if axis in ("tensor", "context") else {}
    said = run_ranks(messages, 2, topology, settings)
    assert any("number 5 of the data" in one for one in said), said


def messages(topology: str, settings: dict[str, Any]) -> str:
    """The error of this rank, which may be that the other one has gone."""
    trainer = trainer_for(
        topology, "transformer", {**settings, "training.max_steps": 12}, vocab_size=64
    )
    try:
        list(trainer.steps(Wrong(99)))
    except Exception as error:
        return str(error)
    return "no error"


def test_an_evaluation_and_a_loop_of_ones_own_name_it() -> None:
    trainer = trainer_for("single", "transformer", PLAIN)
    with pytest.raises(RunError, match="the evaluation, sample") as caught:
        trainer.evaluate(Wrong(VOCAB))
    assert f"target {VOCAB} is not one of" in str(caught.value)

    own = Trainer(nn.Linear(8, 4), "sgd", F.cross_entropy, batch_size=4, global_batch_size=4)
    with pytest.raises(RunError, match=r"step 1, sample 2 of micro-batch 0: member 1"):
        own.training_step((torch.zeros(4, 8), torch.tensor([0, 1, 4, 2])))


def picked(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.log_softmax(-1).gather(-1, targets[:, None]).mean()


def indexed(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = torch.arange(len(targets))
    return -outputs.log_softmax(-1)[rows, targets].mean()


def one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(F.one_hot(targets, 4) * outputs.log_softmax(-1)).sum(-1).mean()


def one_hot_within(outputs: Tensor, targets: Tensor) -> Tensor:
    return one_hot(outputs, targets.flatten())


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy(outputs[:, 0].sigmoid(), targets.float())


@pytest.mark.parametrize(
    ("loss_fn", "number", "says"),
    [
        (picked, 7, "target 7 is out of range: it indexes 4 classes"),
        (picked, -1, r"target -1 is out of range(.|\n)*targets != -1"),
        (indexed, 7, "target 7 is out of range: it indexes 4 classes"),
        (indexed, -100, "target -100 is out of range: it indexes 4 classes"),
        (one_hot, 7, "target 7 is out of range: it indexes the classes"),
        (one_hot_within, -1, "target -1 is out of range"),
        (binary, 7, "target 7 of a binary cross entropy is not from 0 to 1"),
    ],
)
def test_a_loss_by_hand_names_the_sample(
    loss_fn: Callable[..., Tensor], number: int, says: str
) -> None:
    trainer = Trainer(nn.Linear(8, 4), "sgd", loss_fn, batch_size=4, global_batch_size=4)
    batch = (torch.zeros(4, 8), torch.tensor([0, 1, number, 1]))
    with pytest.raises(RunError, match=says) as caught:
        trainer.training_step(batch)
    assert "step 1, sample 2 of micro-batch 0: member 1, used in test_out_of_range.py, line" in str(
        caught.value
    )


def test_a_loss_by_hand_over_a_data_set_and_in_an_evaluation() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.tensor([0] * 5 + [4, 0, 0]))
    trainer = Trainer(nn.Linear(8, 4), "sgd", picked, batch_size=4, shuffle=False, max_steps=2)
    with pytest.raises(RunError, match="the evaluation, sample 1 of micro-batch 1"):
        trainer.evaluate(data)
    with pytest.raises(RunError, match="step 2, sample 1 of micro-batch 0, number 5 of the data"):
        list(trainer.steps(data))


def test_a_number_that_the_failing_line_did_not_have_is_not_blamed() -> None:
    """The data hold the number by chance: the mistake is in the program."""

    def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
        return helper(outputs)

    def helper(scores: Tensor) -> Tensor:
        return scores.gather(-1, torch.full((len(scores), 1), 5)).mean()

    trainer = Trainer(nn.Linear(8, 4), "sgd", wrong, batch_size=4, global_batch_size=4)
    with pytest.raises(RuntimeError, match="index 5 is out of bounds"):
        trainer.training_step((torch.zeros(4, 8), torch.tensor([0, 1, 5, 1])))


def test_logits_take_any_number_and_a_warning_says_so_once() -> None:
    loss_fn = nn.BCEWithLogitsLoss()
    trainer = Trainer(nn.Linear(8, 1), "sgd", loss_fn, batch_size=4, global_batch_size=4)
    batch = (torch.zeros(4, 8), torch.tensor([[0.0], [1.0], [-1.0], [1.0]]))
    with pytest.warns(UserWarning, match=r"is -1, not from 0 to 1(.|\n)*sample 2"):
        trainer.training_step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.training_step(batch)
