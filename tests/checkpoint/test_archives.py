"""Small tensors are archives of `torch.save`, though torch makes one of each form alone."""

import io
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint import Snapshot
from lockstep.checkpoint.archives import SMALL, ArchiveForm, form_for, form_of

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((), (1,), (7,), (3, 5), (1, 0, 2), (4, 1, 64), (1000, 33))
NAME = "archive/.data/serialization_id"  # what differs, and no reader uses


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)


def by_torch(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def as_archive(form: ArchiveForm, tensor: Tensor) -> bytes:
    return b"".join(form.pieces(tensor))


def entries(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None, "each CRC-32 inside is right"
        return {name: opened.read(name) for name in opened.namelist()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_archive_is_what_torch_writes(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = filled(shape, dtype)
        form = form_of(tensor)
        if not tensor.numel():
            assert form is None, "torch writes it"
            continue
        assert form is not None, "torch lays its archives out otherwise"
        archive = as_archive(form, tensor)
        expected = by_torch(tensor)
        assert len(archive) == len(expected) == form.length
        ours = entries(archive)
        theirs = entries(expected)
        assert {**ours, NAME: b""} == {**theirs, NAME: b""}
        loaded = torch.load(io.BytesIO(archive), weights_only=True)
        for data in (archive, expected):
            read = form.tensor(memoryview(data))
            assert read is not None
            assert (read.dtype, read.shape) == (dtype, tensor.shape)
            assert read.view(-1).view(torch.uint8).equal(loaded.view(-1).view(torch.uint8))


def test_what_has_another_form_is_left_to_torch() -> None:
    form = form_for(torch.float32, (2, 3))
    assert form is not None
    others = [
        by_torch(torch.ones(3, 2)),
        by_torch(torch.ones(3, 2).T),
        by_torch(torch.ones(2, 3, dtype=torch.int32)),
        by_torch(torch.ones(4, 3)[:2]),
        by_torch(torch.ones(2, 3))[:-1],
    ]
    assert [form.tensor(memoryview(other)) for other in others] == [None] * len(others)
    assert form_of(torch.ones(2, dtype=torch.complex64).conj()) is None
    assert form_of(torch.nn.Parameter(torch.ones(2))) is None
    assert form_for(torch.uint8, (SMALL + 1,)) is None


def tensors() -> dict[str, Tensor]:
    """Small ones of two forms, one whose rows are not one after the other, and a large one."""
    small = {f"small.{number}": torch.full((5,), float(number)) for number in range(40)}
    others = {f"other.{number}": torch.full((2, 2), number) for number in range(10)}
    across = torch.arange(12.0).view(3, 4).T
    large = torch.arange(SMALL // 4 + 1, dtype=torch.float32)
    return {**small, "across": across, **others, "large": large, "no rows": torch.empty(0, 3)}


def empty(like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def test_torch_is_asked_for_forms_not_for_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block cost torch.save and torch.load 0.4 and 0.6 ms, however small it was."""
    given = tensors()
    forms = {(tensor.dtype, tensor.shape) for tensor in given.values()}
    calls = []

    def counted(call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        calls.append(call.__name__)
        return call(*given, **more)

    for call in (torch.save, torch.load):
        monkeypatch.setattr(torch, call.__name__, partial(counted, call))
    path = checkpoint.save(tmp_path, 1, Snapshot(given), config_yaml="")
    assert calls.count("save") <= len(forms) < 10
    targets = empty(given)
    checkpoint.load(path, Snapshot(targets))
    assert calls.count("load") == 1, "of the large one, for where its elements lie"
    for name, tensor in given.items():
        assert targets[name].equal(tensor), name


def test_archives_that_torch_wrote_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every checkpoint until now has these, with strides of any kind."""
    given = tensors()
    monkeypatch.setattr("lockstep.checkpoint.write.form_of", lambda tensor: None)
    path = checkpoint.save(tmp_path, 1, Snapshot(given), config_yaml="")
    targets = empty(given)
    checkpoint.load(path, Snapshot(targets))
    for name, tensor in given.items():
        assert targets[name].equal(tensor), name


def test_a_large_block_is_read_into_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory for each block, and a copy from there, took longer than to read it."""
    rows = torch.arange(SMALL, dtype=torch.float32).view(-1, 64)
    given = {"whole": rows, "across": rows.clone(), "second": rows.clone()}
    path = checkpoint.save(tmp_path, 1, Snapshot(given), config_yaml="")
    copied = []
    copy = Tensor.copy_

    def counted(target: Tensor, source: Tensor, **more: bool) -> Tensor:
        copied.append(source.nbytes)
        return copy(target, source, **more)

    monkeypatch.setattr(Tensor, "copy_", counted)
    targets = {
        "whole": torch.zeros_like(rows),
        "across": torch.zeros(rows.T.shape).T,  # its rows are not one after the other
        "second": torch.zeros_like(rows),
    }
    checkpoint.load(path, Snapshot(targets))
    assert copied == [rows.nbytes]
    assert all(target.equal(rows) for target in targets.values())


def test_torch_looks_at_one_large_block_of_a_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a millisecond for each; one of the same form that begins otherwise is found."""
    rows = torch.arange(SMALL, dtype=torch.float32).view(-1, 64)
    given = {f"w{number}": rows + number for number in range(3)}
    given["across"] = torch.arange(SMALL, dtype=torch.float32).view(64, -1).T
    path = checkpoint.save(tmp_path, 1, Snapshot(given), config_yaml="")
    calls = []
    load = torch.load

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(given)
        return load(*given, **more)

    monkeypatch.setattr(torch, "load", counted)
    targets = {name: torch.zeros(rows.shape) for name in given}
    checkpoint.load(path, Snapshot(targets))
    assert len(calls) == 3, "of one; and of the other, for its form and for its elements"
    for name, tensor in given.items():
        assert targets[name].equal(tensor), name
