"""Taking a checkpoint elsewhere: weights as safetensors or for `torch.load`, or the whole of it as one file a part.

Whole tensors pass through memory one at a time, save for the torch format, whose writer needs them all at once.
Source of the format: huggingface/safetensors (8 bytes of header length, a JSON header, the tensors' bytes).
"""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lockstep.checkpoint.commit import commit
from lockstep.checkpoint.digest import whole_tensors
from lockstep.checkpoint.disk import read_inside, sync_directory
from lockstep.checkpoint.local import Reader, open_part
from lockstep.checkpoint.manifest import DamagedError, Manifest, proved_manifest, read_manifest
from lockstep.checkpoint.names import CONFIG, MODEL
from lockstep.checkpoint.pieces import Part, Piece, dtype_of, tensor_bytes
from lockstep.checkpoint.restore import read_state
from lockstep.checkpoint.snapshot import GROUPS_KEY, Staged
from lockstep.checkpoint.together import Ranks
from lockstep.checkpoint.untrusted import JSON_LIMIT
from lockstep.errors import UsageError
from lockstep.progress import Advance

_SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool":
    "BOOL",
}  # fmt: skip


def export_safetensors(checkpoint: str | Path, output: str | Path) -> Path:
    """The model's tensors, whole, in one safetensors file, by canonical name; tied names are listed in its metadata.

    Raises:
        UsageError: `output` exists already, or a dtype has no place in the format.
        DamagedError: the checkpoint is not what was written; every byte that is exported was compared.
    """
    folder, target = Path(checkpoint), Path(output)
    manifest = proved_manifest(folder, MODEL)
    header = _safetensors_header(manifest)
    expected = sorted(manifest.parameters)

    def write(file: BinaryIO) -> None:
        file.write(len(header).to_bytes(8, "little") + header)
        names = []
        for name, tensor in whole_tensors(folder, manifest):
            file.write(tensor_bytes(tensor))
            names.append(name)
        assert names == expected

    return _write_whole(target, write)


def weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The model's tensors, whole, on the CPU, for `model.load_state_dict`; tied names appear, and share memory.

    Raises:
        UsageError: there is no checkpoint here.
        DamagedError: the checkpoint is not what was written; every byte of the model was compared.
    """
    folder = Path(checkpoint)
    manifest = proved_manifest(folder, MODEL)
    model: dict[str, Tensor] = {}
    for name, tensor in whole_tensors(folder, manifest):
        model |= dict.fromkeys((name, *manifest.parameters[name].aliases), tensor)
    return model


def export_torch(checkpoint: str | Path, output: str | Path) -> Path:
    """`{"model": weights(checkpoint), "step": …}` for `torch.load(…, weights_only=True)`."""
    step = read_manifest(Path(checkpoint)).step
    return _write_whole(Path(output), lambda file: torch.save({"model": weights(checkpoint), "step": step}, file))


def rewrite_full(
    checkpoint: str | Path, output: str | Path, advance: Advance = lambda _bytes: None
) -> Path:  # fmt: skip
    """The same checkpoint with one file of whole tensors a part, committed like any other.

    Args:
        advance: told of the bytes that were read to be written.

    Raises:
        UsageError: `output` exists already.
        DamagedError: the checkpoint is not what was written.
    """
    folder = Path(checkpoint)
    manifest = proved_manifest(folder)
    aliases = {name: facts.aliases for name, facts in manifest.parameters.items() if facts.aliases}
    parts = {
        part: _lazy_part(open_part(folder, manifest, part), aliases if part == MODEL else {}, advance)
        for part in manifest.parts
    }
    state = read_state(folder)
    groups = state.pop(GROUPS_KEY, {})
    config_yaml = _config(folder)
    staged = Staged(parts, state, groups)
    return commit(Path(output), manifest.step, staged, config_yaml, Ranks.alone())


def _config(folder: Path) -> str:
    try:
        return read_inside(folder, CONFIG, JSON_LIMIT).decode()
    except (OSError, ValueError) as error:
        raise DamagedError("a checkpoint can't be read", where=str(folder / CONFIG), why=str(error)) from None


def _lazy_part(reader: Reader, aliases: dict[str, tuple[str, ...]], advance: Advance) -> Part:
    """A part of whole tensors that are read when they are written."""
    pieces = {
        name: Piece(torch.empty(t.size, dtype=t.properties.dtype, device="meta"), tuple(t.size), (0,) * len(t.size))
        for name, t in sorted(reader.stored.tensors.items())
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
    """A file that is there when it is whole, and not before; an existing one is left alone."""
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
    sync_directory(target.absolute().parent)
    return target
