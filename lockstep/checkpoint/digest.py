"""One line that says what the weights are: equal for the same training, whatever the topology and the dtype of storage.

SHA-256 over the tensors of the model in the order of their canonical names (by code points). For each: a line of JSON,
`["name", "dtype", [shape]]`, and the elements of the whole tensor, row by row, little-endian, as stored. Tied names
count once, under the canonical one.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.local import open_part
from lockstep.checkpoint.manifest import Manifest, proved_manifest
from lockstep.checkpoint.names import MODEL
from lockstep.checkpoint.pieces import Piece, dtype_name, tensor_bytes
from lockstep.progress import progress_of


def digest(path: str | os.PathLike[str]) -> str:
    """The digest of a checkpoint's model, 64 hexadecimal digits. Holds one whole tensor in memory at a time.

    Raises:
        UsageError: there is no checkpoint at `path`.
        DamagedError: something that the digest depends on is not what was written.
    """
    folder = Path(path)
    return digest_tensors(whole_tensors(folder, proved_manifest(folder, MODEL)))


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of whole tensors, given by name in the order of the names."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def whole_tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the model, whole, on CPU, in the order of the names; one at a time."""
    reader = open_part(folder, manifest, MODEL)
    total = sum(t.size.numel() * t.properties.dtype.itemsize for t in reader.stored.tensors.values())
    with progress_of(f"reading {folder.name}", total) as advance:
        for name, stored in sorted(reader.stored.tensors.items()):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            reader.read_into({name: Piece(tensor, tuple(stored.size), (0,) * tensor.ndim)})
            yield name, tensor
            advance(tensor.nbytes)
