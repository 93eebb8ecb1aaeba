"""The models of docs/models.md train, and their losses add up however a batch is cut."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep.verify.proof
from lockstep.config import config_from
from lockstep.launch.spawn import spawn_again
from lockstep.verify import Subject, verify

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/models.md").read_text(), re.DOTALL
)
KINDS = ("outputs and a loss function", "its own loss", "an auxiliary loss", "cut")


def losses(place: int, batch: int) -> list[float]:
    """Of two steps of 8 samples, in micro-batches of `batch`; examples take their imports from the
    first one.
    """
    torch.manual_seed(0)
    names: dict[str, Any] = {"BATCH": batch}
    for block in dict.fromkeys((BLOCKS[0], BLOCKS[place])):
        torch.manual_seed(0)
        exec(block, names)
    return [float(record.loss) for record in names["trainer"].steps(names["data"])]


@pytest.mark.parametrize("place", range(len(KINDS)), ids=KINDS)
def test_each_kind_of_model_has_one_loss_however_the_batch_is_cut(place: int) -> None:
    whole = losses(place, batch=8)
    assert len(whole) == 2
    for batch in (1, 2, 4):
        assert losses(place, batch) == pytest.approx(whole, rel=1e-5)
    assert len(BLOCKS) == len(KINDS)


def test_the_model_that_says_how_it_is_cut_is_the_same_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        lockstep.verify.proof, "_spawn", partial(spawn_again, preload=["tests.preloaded"])
    )
    settings = config_from({"training.batch_size": 2, "training.global_batch_size": 8})
    assert verify(cut_model, ["pipeline:2", "tensor:2"], config=settings, steps=1).passed


def cut_model() -> Subject:
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in (BLOCKS[0], BLOCKS[-1]):
        exec(block.rpartition("trainer = ")[0], names)
    return Subject(names["Deep"](), names["data"], loss_fn=torch.nn.CrossEntropyLoss())
