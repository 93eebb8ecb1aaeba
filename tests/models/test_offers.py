"""What a model offers in another shape than the protocol has is one error with what to write."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.protocol import objective_of, segments_of


class Model(nn.Module):
    def __init__(self, offered: Any) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.offered = offered

    def inputs(self, batch: dict[str, Tensor]) -> Any:
        return self.offered(batch)

    def segments(self) -> Any:
        return [self.first]

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.sum()

    def count(self, batch: Any) -> int:
        return 3


def test_inputs_that_are_no_tuple_are_refused() -> None:
    """A dict would be its keys, and a tensor its rows."""
    batch = {"x": torch.ones(3, 2)}
    for offered, kind in ((lambda b: b, "dict"), (lambda b: b["x"], "Tensor")):
        model = Model(offered)
        with pytest.raises(UsageError, match=rf"inputs\(\) of Model returns a {kind}"):
            objective_of(model, None).of(model, batch)
    model = Model(lambda b: b.values())
    assert torch.equal(objective_of(model, None).of(model, batch)[0], model(batch["x"]).sum())


def test_segments_without_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"segments\(\) of Model lists a Linear"):
        segments_of(Model(None))
