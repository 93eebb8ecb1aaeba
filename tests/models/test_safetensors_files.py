"""Files of safetensors that are written tensor by tensor: the library reads what was written."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lockstep.errors import UsageError
from lockstep.models.safetensors_files import write_tensors


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    """Each type, a transposed tensor, one without a dim, and one without elements."""
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "number": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "half": torch.arange(5).bfloat16(),
        "flags": torch.tensor([True, False]),
    }
    forms = {name: tensor.to("meta") for name, tensor in tensors.items()}
    file = tmp_path / "weights.safetensors"
    with file.open("xb") as opened:
        write_tensors(opened, forms, tensors.__getitem__, {"format": "pt"})
    found = load_file(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    forms = {"phase": torch.empty(2, dtype=torch.complex64, device="meta")}
    file = (tmp_path / "weights.safetensors").open("xb")
    with file, pytest.raises(UsageError, match="phase is complex64, which safetensors can't hold"):
        write_tensors(file, forms, torch.zeros, {})
