"""Check the values that are read from files, and turn dtypes and tensors into what files hold, and back."""

import json
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

JSON_LIMIT = 256 << 20  # bytes: about two million parameters in a manifest
MANIFEST = "manifest.json"  # files with a manifest are a checkpoint
GROUPS_KEY = "optimizer_groups"  # the key of state.json for the parameter groups of the optimizers
METADATA_LIMIT = 1 << 30  # bytes of DCP's `.metadata`, which names every block of every tensor


def parse_json(data: bytes, *, finite: bool = True) -> dict[str, Any]:
    """Parse a JSON object, or raise a ValueError; with `finite` also for NaN and Infinity, which JSON does not have."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it holds {constant}, which is not a number")

    try:
        found = json.loads(data, parse_constant=refuse if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if type(found) is not dict:
        raise ValueError(f"it holds a {type(found).__name__}, where an object is needed")
    return found


def count_of(value: Any) -> int:
    """Return a size, an offset or a number of things; ValueError unless it is whole, from 0 to 2⁶³ - 1."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"it holds {str(value)[:40]!r}, where a count is needed")
    return value


def counts_of(values: Any) -> tuple[int, ...]:
    """Return a list of counts as a tuple; ValueError unless it is one."""
    if type(values) is not list:
        raise ValueError(f"it holds {str(values)[:40]!r}, where counts are needed")
    return tuple(count_of(value) for value in values)


def text_of(value: Any) -> str:
    """Return a string as it is; ValueError unless it is one."""
    if type(value) is not str:
        raise ValueError(f"it holds {str(value)[:40]!r}, where a text is needed")
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return torch.bfloat16 for `bfloat16`; raise a ValueError for a name that is not a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor, row by row, as bytes; no copy if it is contiguous on CPU."""
    assert sys.byteorder == "little"
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
