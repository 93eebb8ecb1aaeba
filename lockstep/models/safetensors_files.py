"""Writes files of huggingface/safetensors tensor by tensor, so that one is in memory at a time.

A file is 8 bytes with the length of a header, the header as JSON, and the tensors' bytes. The
library itself writes tensors that are all in memory.

Tests: tests/models/test_safetensors_files.py, tests/models/test_hf_folder.py
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch
from torch import Tensor

from lockstep.errors import UsageError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    file: BinaryIO,
    forms: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors in their order.

    Args:
        file: is written to.
        forms: name → a tensor of the shape and type; on meta.
        read: returns the values of a tensor, which are dropped once they are written.
        metadata: of the header.

    Raises:
        UsageError: the format has no such type.
    """
    file.write(_header(forms, metadata))
    for name, form in forms.items():
        values = read(name)
        assert (values.shape, values.dtype) == (form.shape, form.dtype), name
        file.write(tensor_bytes(values))
        del values


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor, row by row, as bytes; no copy if it is contiguous on CPU."""
    assert sys.byteorder == "little"
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(forms: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return what comes before the tensors: where each begins and ends among their bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, form in forms.items():
        if form.dtype not in _DTYPES:
            raise UsageError(
                f"{name} is {str(form.dtype).removeprefix('torch.')}, which safetensors can't hold",
                fix="`lockstep checkpoint convert PATH --to torch`, or change its dtype before"
                " saving",
            )
        size = form.numel() * form.element_size()
        offsets = [position, position + size]
        shape = list(form.shape)
        header[name] = {"dtype": _DTYPES[form.dtype], "shape": shape, "data_offsets": offsets}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
