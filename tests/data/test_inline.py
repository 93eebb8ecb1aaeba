"""What a worker sends arrives unchanged, small tensors inside the message."""

import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from lockstep.data.reader import INLINE_LIMIT, InlineBatch


@dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


def sent(batch: Any) -> Any:
    return pickle.loads(bytes(ForkingPickler.dumps(InlineBatch(batch))))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(1.5),
        torch.zeros(0, 4),
        torch.rand(3, dtype=torch.float16),
        torch.tensor([True, False]),
        torch.rand(4).bfloat16(),
        torch.rand(INLINE_LIMIT),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_every_kind_of_tensor_arrives_as_it_was(tensor):
    arrived = sent({"x": [tensor], "other": ("text", None)})
    assert arrived["other"] == ("text", None)
    assert arrived["x"][0].dtype == tensor.dtype
    assert torch.equal(arrived["x"][0], tensor)


def test_what_arrives_can_be_written_and_keeps_its_type():
    arrived = sent(Batch(torch.zeros(3), ["a"]))
    arrived.x += 1
    assert (arrived.x.tolist(), arrived.names) == ([1, 1, 1], ["a"])


def test_small_tensors_travel_in_the_message_and_large_ones_do_not():
    small, large = torch.zeros(INLINE_LIMIT // 8, dtype=torch.int64), torch.zeros(INLINE_LIMIT, dtype=torch.int64)
    assert len(ForkingPickler.dumps(InlineBatch(small))) > INLINE_LIMIT
    assert len(ForkingPickler.dumps(InlineBatch(large))) < 4096
