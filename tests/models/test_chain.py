"""A chain of segments says which of them does not accept its arguments."""

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.models.chain import run_segment


def test_a_segment_that_does_not_accept_the_batchs_keys_is_told_what_to_write() -> None:
    batch = ((), {"input_ids": torch.zeros(1, 2, dtype=torch.int64)})
    with pytest.raises(
        UsageError, match=r"Embedding, does not accept(.|\n)*'input_ids'(.|\n)*inputs\(batch\)"
    ):
        run_segment(nn.Embedding(2, 2), *batch, batch)


def test_a_type_error_inside_of_a_segment_stays() -> None:
    class Wrong(nn.Module):
        def forward(self, x: int) -> str:
            return "1" + x  # type: ignore[operator]

    with pytest.raises(TypeError, match="can only concatenate"):
        run_segment(Wrong(), (1,), {}, ((1,), {}))
