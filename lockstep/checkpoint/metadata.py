"""Read `.metadata` of torch.distributed.checkpoint (DCP) without trusting it.

The file is a pickle, which is a program. Every class that DCP's metadata names is replaced by an
inert record, every other name is refused, and each field is checked. So a hostile file can call no
function, point at no file but the tensor files beside it, and claim no more memory than the files
have bytes.

Tests: tests/checkpoint/test_hostile.py, tests/torch_compat/test_checkpoint_format.py
"""

import io
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lockstep.checkpoint.manifest import count_of, dtype_name, dtype_of, text_of
from lockstep.checkpoint.snapshot import TensorInfo
from lockstep.torch_compat.checkpoint_format import (
    GET_LAYOUT,
    METADATA_MODULE,
    METADATA_RECORDS,
    STORAGE_INFO,
)

_TENSOR_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


@dataclass(frozen=True)
class StoredAt:
    """The file beside `.metadata` and the bytes in it where a block is stored."""

    relative_path: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class StoredPart:
    """The content of one folder of tensors, from its metadata."""

    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    places: dict[MetadataIndex, StoredAt] = field(default_factory=dict)

    def info(self) -> dict[str, TensorInfo]:
        return {
            name: (tuple(t.size), dtype_name(t.properties.dtype))
            for name, t in self.tensors.items()
        }


class _Record:
    """Stands in for one of DCP's records.

    BUILD of the class itself fails, because `__setstate__` needs an instance.
    """

    arguments: tuple[object, ...] = ()

    def __new__(cls, *arguments: object) -> "_Record":
        record = super().__new__(cls)
        record.__dict__["arguments"] = arguments
        return record

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if type(state) is dict else {"arguments": state})


class _Size(tuple[int, ...]):
    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise pickle.UnpicklingError("it gives a size attributes")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # New classes for every file, so that one file can't change what the next one uses.
        names = (*METADATA_RECORDS, STORAGE_INFO[1], GET_LAYOUT[1])
        self._records = {name: type(name, (_Record,), {}) for name in names}

    def find_class(self, module: str, name: str) -> object:
        if (module == METADATA_MODULE and name in METADATA_RECORDS) or (module, name) in (
            STORAGE_INFO,
            GET_LAYOUT,
        ):
            return self._records[name]
        if (module, name) == ("torch", "Size"):
            return _Size
        if module == "torch":
            return dtype_of(name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside")


def parse_metadata(data: bytes) -> StoredPart:
    """Return the content of a `.metadata` file.

    Raise a ValueError unless it describes only dense tensors beside it.
    """
    try:
        top = _Unpickler(data).load()
        tensors = {
            text_of(k): _tensor(v)
            for k, v in _typed(_field(top, "state_dict_metadata"), dict).items()
        }
        places = {
            _index(k): _place(v) for k, v in _typed(_field(top, "storage_data"), dict).items()
        }
    except ValueError:
        raise
    except Exception as error:
        # a broken pickle can raise nearly any error: IndexError, EOFError, UnicodeDecodeError …
        raise ValueError(f"{type(error).__name__}: {error}") from None
    for name, tensor in tensors.items():
        # of blocks that lie inside, and leave nothing out; the writer refuses overlaps
        elements = 0
        for chunk in tensor.chunks:
            bounds = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            if any(offset + size > length for offset, size, length in bounds):
                raise ValueError(f"a block of {name} lies outside it")
            elements += chunk.sizes.numel()
        if elements != tensor.size.numel():
            raise ValueError(
                f"the blocks of {name} hold {elements} of its {tensor.size.numel()} elements"
            )
        if any(MetadataIndex(name, chunk.offsets) not in places for chunk in tensor.chunks):
            raise ValueError(f"a block of {name} is described but stored nowhere")
    return StoredPart(tensors, places)


def check_sizes(stored: StoredPart, sizes: Mapping[str, int]) -> None:
    """Raise a ValueError if tensors claim more bytes than their files have, or share bytes.

    `sizes` are the sizes of the files; blocks must not share bytes.
    """
    used: Counter[str] = Counter()
    for place in stored.places.values():
        file = place.relative_path
        used[file] += place.length
        if place.offset + place.length > sizes[file] or used[file] > sizes[file]:
            raise ValueError(f"it claims more bytes than the {sizes[file]} of {file}")
    for name, tensor in stored.tensors.items():
        for chunk in tensor.chunks:
            claimed = prod(chunk.sizes) * tensor.properties.dtype.itemsize
            stored_bytes = stored.places[MetadataIndex(name, chunk.offsets)].length
            if claimed > stored_bytes:
                raise ValueError(
                    f"it claims {claimed} bytes for a block of {name}, where {stored_bytes} are"
                    " stored"
                )


def _tensor(record: Any) -> TensorStorageMetadata:
    if type(record).__name__ != "TensorStorageMetadata":
        raise ValueError(f"it holds a {type(record).__name__}, where only tensors are stored")
    dtype = _field(record, "properties").arguments[0]
    chunks = [
        ChunkStorageMetadata(_size(_field(c, "offsets")), _size(_field(c, "sizes")))
        for c in _typed(_field(record, "chunks"), list)
    ]
    return TensorStorageMetadata(
        TensorProperties(_typed(dtype, torch.dtype)), _size(_field(record, "size")), chunks
    )


def _index(record: Any) -> MetadataIndex:
    return MetadataIndex(text_of(_field(record, "fqn")), _size(_field(record, "offset")))


def _place(record: Any) -> StoredAt:
    path = text_of(_field(record, "relative_path"))
    if not _TENSOR_FILE.fullmatch(path):
        raise ValueError(f"it points at {path!r}, which is not one of its own tensor files")
    offset = count_of(_field(record, "offset"))
    length = count_of(_field(record, "length"))
    if record.__dict__.get("transform_descriptors"):
        raise ValueError("its blocks are transformed (compressed or encrypted)")
    return StoredAt(path, offset, length)


def _field(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or name not in record.__dict__:
        raise ValueError(f"it lacks {name}")
    return record.__dict__[name]


def _typed(value: Any, kind: Callable[..., Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it holds a {type(value).__name__} in a wrong place")
    return value


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError("it lacks a size")
    return torch.Size([count_of(v) for v in value])
