"""A checkpoint taken elsewhere: its digest, its weights as safetensors or for `torch.load`, the whole of it rewritten.

The digest is one line for the same training, whatever the topology and the dtype of storage: SHA-256 over the tensors
of the model in the order of their canonical names (by code points). For each: a line of JSON, `["name", "dtype",
[shape]]`, and the elements of the whole tensor, row by row, little-endian, as stored. Tied names count once, under the
canonical one.

Whole tensors pass through memory one at a time, save for the torch format, whose writer needs them all at once.
Source of the format: huggingface/safetensors (8 bytes of header length, a JSON header, the tensors' bytes).
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lockstep.checkpoint.commit import write_once
from lockstep.checkpoint.manifest import MODEL, Manifest, config_text, proved_manifest, read_manifest, read_state
from lockstep.checkpoint.posix import locate, sync_folder
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.read import PartReader, open_part
from lockstep.checkpoint.snapshot import GROUPS_KEY, Part, Staged, TensorBlock, dtype_name, dtype_of, tensor_bytes
from lockstep.checkpoint.storage import Checkpoint, CheckpointPath, Location
from lockstep.errors import UsageError
from lockstep.progress import Advance, progress_of

_SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool":
    "BOOL",
}  # fmt: skip


def digest(path: Checkpoint) -> str:
    """Return the digest of a checkpoint's model, 64 hexadecimal digits.

    Raises:
        UsageError: there is no checkpoint at `path`.
        DamagedError: something that the digest depends on is not what was written.
    """
    checkpoint = locate(path)
    return digest_tensors(_whole_tensors(checkpoint, proved_manifest(checkpoint, MODEL)))


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of whole tensors, given by name in the order of the names."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def weights(path: Checkpoint) -> dict[str, Tensor]:
    """Return the model's tensors, whole, on the CPU, for `model.load_state_dict`; tied names appear and share memory.

    Raises:
        UsageError: there is no checkpoint here.
        DamagedError: the checkpoint is not what was written; every byte of the model was compared.
    """
    checkpoint = locate(path)
    manifest = proved_manifest(checkpoint, MODEL)
    model: dict[str, Tensor] = {}
    for name, tensor in _whole_tensors(checkpoint, manifest):
        model |= dict.fromkeys((name, *manifest.parameters[name].aliases), tensor)
    return model


def export_safetensors(path: Checkpoint, output: str | Path) -> Path:
    """Write the model's tensors, whole, to one safetensors file, by canonical name; its metadata lists tied names.

    Raises:
        UsageError: `output` exists already, or a dtype has no place in the format.
        DamagedError: the checkpoint is not what was written; every byte that is exported was compared.
    """
    checkpoint = locate(path)
    manifest = proved_manifest(checkpoint, MODEL)
    header = _safetensors_header(manifest)
    expected = sorted(manifest.parameters)

    def write(file: BinaryIO) -> None:
        file.write(len(header).to_bytes(8, "little") + header)
        names = []
        for name, tensor in _whole_tensors(checkpoint, manifest):
            file.write(tensor_bytes(tensor))
            names.append(name)
        assert names == expected

    return _write_whole(Path(output), write)


def export_torch(path: Checkpoint, output: str | Path) -> Path:
    """Write `{"model": weights(path), "step": …}` for `torch.load(…, weights_only=True)`."""
    step = read_manifest(path).step
    return _write_whole(Path(output), lambda file: torch.save({"model": weights(path), "step": step}, file))


def rewrite_full(path: Checkpoint, output: Checkpoint, advance: Advance = lambda _bytes: None) -> CheckpointPath:
    """Write the same checkpoint with one file of whole tensors a part, committed like any other.

    Args:
        advance: called with the bytes that were read to be written.

    Raises:
        UsageError: `output` exists already.
        DamagedError: the checkpoint is not what was written.
    """
    checkpoint, target = locate(path), locate(output)
    manifest = proved_manifest(checkpoint)
    aliases = {name: facts.aliases for name, facts in manifest.parameters.items() if facts.aliases}
    parts = {
        part: _unread_part(open_part(checkpoint, manifest, part), aliases if part == MODEL else {}, advance)
        for part in manifest.parts
    }
    state = read_state(checkpoint)
    staged = Staged(parts, state, state.pop(GROUPS_KEY, {}))
    write_once(target, manifest.step, staged, config_text(checkpoint), "full", Ranks.alone())
    return target.path


def _whole_tensors(checkpoint: Location, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the model, whole, on CPU, in the order of the names; one at a time."""
    reader = open_part(checkpoint, manifest, MODEL)
    total = sum(t.size.numel() * t.properties.dtype.itemsize for t in reader.stored.tensors.values())
    with progress_of(f"reading {checkpoint.name}", total) as advance:
        for name, stored in sorted(reader.stored.tensors.items()):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            reader.read_into({name: TensorBlock.whole(tensor)})
            yield name, tensor
            advance(tensor.nbytes)


def _unread_part(reader: PartReader, aliases: dict[str, tuple[str, ...]], advance: Advance) -> Part:
    """Return a part of whole tensors that are read when they are written."""
    pieces = {
        name: TensorBlock.whole(torch.empty(stored.size, dtype=stored.properties.dtype, device="meta"))
        for name, stored in sorted(reader.stored.tensors.items())
    }

    def read(name: str) -> Tensor:
        whole = torch.empty_like(pieces[name].tensor, device="cpu")
        reader.read_into({name: pieces[name].with_tensor(whole)})
        advance(whole.nbytes)
        return whole

    return Part(pieces, aliases, read)


def _safetensors_header(manifest: Manifest) -> bytes:
    header: dict[str, object] = {}
    metadata = {"format": "pt", "step": str(manifest.step)}
    position = 0
    for name, facts in sorted(manifest.parameters.items()):
        if facts.dtype not in _SAFETENSORS_DTYPES:
            raise UsageError(
                f"{name} is {facts.dtype}, which safetensors can't hold",
                fix="lockstep checkpoint convert --to torch, or change its dtype before saving",
            )
        size = torch.Size(facts.shape).numel() * dtype_of(facts.dtype).itemsize
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[facts.dtype],
            "shape": list(facts.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    aliases = {name: list(facts.aliases) for name, facts in manifest.parameters.items() if facts.aliases}
    if aliases:
        metadata["aliases"] = json.dumps(aliases)
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    return text + b" " * (-len(text) % 8)


def _write_whole(target: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Write a file that is there when it is whole, and not before; an existing one is left alone."""
    if target.exists():
        raise UsageError(f"{target} exists already", fix="name another file, or move it away")
    beside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(target.absolute().parent)
    return target
