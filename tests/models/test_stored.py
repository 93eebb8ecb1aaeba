"""A tensor in files is cut before it is read: the same piece as of the tensor, no other bytes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.models.stored import (
    BytesRead,
    ComputedPart,
    FilePart,
    JoinedPart,
    ReadablePart,
    StackedPart,
    StoredTensor,
    StoredWeights,
    SwappedPart,
)


@pytest.fixture
def tensors(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, FilePart], BytesRead]:
    made = {name: torch.randn(6, 4) for name in "abcd"} | {"scalar": torch.tensor(2.5)}
    save_file(made, tmp_path / "a.safetensors")
    counted = BytesRead()
    file = tmp_path / "a.safetensors"
    parts = {name: FilePart(file, name, tuple(t.shape), counted) for name, t in made.items()}
    return made, parts, counted


def made_of(
    parts: dict[str, FilePart], made: dict[str, Tensor]
) -> list[tuple[ReadablePart, Tensor]]:
    a, b, c, d = (parts[name] for name in "abcd")
    ta, tb, tc, td = (made[name] for name in "abcd")
    stacked = StackedPart([a, b], 0)
    return [
        (a, ta),
        (JoinedPart([a, b], 1), torch.cat([ta, tb], 1)),
        (JoinedPart([a, b, c], 0), torch.cat([ta, tb, tc])),
        (stacked, torch.stack([ta, tb])),
        (StackedPart([a, b], 1), torch.stack([ta, tb], 1)),
        (
            JoinedPart([stacked, StackedPart([c, d], 0)], 1),
            torch.cat([torch.stack([ta, tb]), torch.stack([tc, td])], 1),
        ),
        (SwappedPart(stacked, (1, 2)), torch.stack([ta, tb]).transpose(1, 2)),
        (ComputedPart(lambda: ta * 2, (6, 4)), ta * 2),
    ]


@pytest.mark.parametrize("number", range(8))
def test_pieces_are_those_of_the_tensor(number: int, tensors: tuple) -> None:
    made, parts, counted = tensors
    part, expected = made_of(parts, made)[number]
    for chunks in (1, 2, 3, 5):
        for dim in range(expected.ndim):
            mine = StoredTensor(part, torch.float32).chunk(chunks, dim)
            theirs = expected.chunk(chunks, dim)
            assert [each.shape for each in mine] == [each.shape for each in theirs]
            for one, other in zip(mine, theirs, strict=True):
                before = counted.total
                assert torch.equal(one.read(), other)
                if not isinstance(part, ComputedPart):
                    assert counted.total - before == other.numel() * 4
                again = one.chunk(2, expected.ndim - 1)[-1].read()
                assert torch.equal(again, other.chunk(2, expected.ndim - 1)[-1])
            empty = StoredTensor(part, torch.float32).narrow(dim, 0, 0).read()
            assert empty.shape == expected.narrow(dim, 0, 0).shape


def test_it_is_read_where_more_is_asked_of_it(tensors: tuple) -> None:
    made, parts, _ = tensors
    stored = StoredTensor(parts["a"], torch.float64)
    assert stored.ndim == 2
    assert torch.equal(stored.t(), made["a"].double().t())
    assert torch.equal(torch.add(stored, 1), made["a"].double() + 1)
    assert torch.equal(torch.cat([stored, stored]), torch.cat([made["a"].double()] * 2))
    assert torch.equal(stored[1:3], made["a"].double()[1:3])
    assert torch.equal(stored.clone(memory_format=torch.contiguous_format), made["a"].double())
    assert float(StoredTensor(parts["scalar"], torch.float32).read()) == 2.5


def test_what_is_read_stays_when_the_file_goes(tensors: tuple) -> None:
    made, parts, _ = tensors
    found = StoredTensor(parts["a"], torch.float32).read()
    parts["a"].file.write_bytes(bytes(1000))
    assert torch.equal(found, made["a"])


def test_a_copy_of_a_model_shares_its_files(tensors: tuple) -> None:
    import copy

    _, parts, counted = tensors
    weights = StoredWeights(parts, counted)
    assert copy.deepcopy(weights) is weights
    assert "a" in weights
    assert "z" not in weights
