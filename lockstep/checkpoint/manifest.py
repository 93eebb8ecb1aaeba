"""Read and verify the files that describe a checkpoint: its manifest, its state and the config.

The manifest is written last. It is JSON, one entry a line; its last line is the CRC-32 of all lines
before it. That finds damage, and is not a signature: the size and depth of a file are limited, and
it can neither name a file outside of the checkpoint nor claim more bytes than there are.

Tests: tests/checkpoint/test_hostile.py, tests/checkpoint/test_damage.py
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import torch

from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.storage import MANIFEST, Checkpoint, FileInfo, Location, step_of
from lockstep.errors import RunError, UsageError, listed
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.machine.progress import Advance, progress_of

JSON_LIMIT = 256 << 20  # bytes: about two million parameters in a manifest
GROUPS_KEY = "optimizer_groups"  # the key of state.json for the parameter groups of the optimizers
METADATA_LIMIT = 1 << 30  # bytes of DCP's `.metadata`, which names every block of every tensor


def parse_json(data: bytes, *, finite: bool = True) -> dict[str, Any]:
    """Parse a JSON object, or raise a ValueError.

    With `finite`, NaN and Infinity, which JSON does not have, raise it too.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it holds {constant}, which is not a number")

    try:
        content = json.loads(data, parse_constant=refuse if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if type(content) is not dict:
        raise ValueError(f"it holds a {type(content).__name__}, where an object is needed")
    return content


def count_of(value: Any) -> int:
    """Return a size, an offset or a number of things.

    ValueError unless it is whole, from 0 to 2⁶³ - 1.
    """
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


FORMAT_VERSION = 1
STATE = "state.json"
CONFIG = "config.yaml"
METADATA = ".metadata"  # in each part: where each block lies in its tensor files
MODEL = "model"

_DIGITS = 8  # of a CRC-32
_PART = re.compile(r"model|(?:optimizer|extra)/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TENSOR_FILE = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp|rank-[0-9]{5,}\.raw")


class DamagedError(RunError):
    """Raised when a checkpoint, or a file of it, is not what was written."""


class UnreachableError(RunError):
    """Raised when a checkpoint could not be read: whether it is damaged is not known."""


class DamagedFilesError(DamagedError):
    """Raised when files are not those that the manifest lists, before any of it is loaded."""


def unreadable_error(where: str, why: object) -> DamagedError:
    """Return the error for a file that exists but is not what was written."""
    return DamagedError("a checkpoint can't be read", where=where, why=str(why))


def unreachable_error(where: str, error: OSError) -> UnreachableError:
    """Return the error for a storage that does not give what it may have."""
    return UnreachableError(
        "a checkpoint could not be read, and may be whole: no older one is taken in its place",
        where=where,
        why=f"{error.strerror or error}",
        fix="see to the disk, the network or the service, and start again; to go on from an older"
        " checkpoint on purpose, name it (--resume PATH, in Python resume=PATH)",
    )


def damage_by(error: OSError, checkpoint: Location, file: str) -> str:
    """Return a line for the damage that an error of reading a file tells.

    Raise an UnreachableError if it tells none: the file was not had.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{file}: missing"
    if isinstance(error, DamagedBytesError):
        return f"{file}: {error}"
    raise unreachable_error(f"{checkpoint}/{file}", error) from None


def damaged_error(checkpoint: Location, problems: Sequence[str]) -> DamagedFilesError:
    """Return the error for a checkpoint with problems, a line for each."""
    fix = "resume from an older one: `lockstep checkpoint verify RUN` shows which are whole"
    why = listed(sorted(problems))
    return DamagedFilesError(f"the checkpoint {checkpoint} is damaged", why=why, fix=fix)


def raw_file(part: str, rank: int) -> str:
    """Return the file of one rank in a part, under `format: local`."""
    return f"{part}/rank-{rank:05d}.raw"


def checked_part(part: str) -> str:
    """Return `part`, or raise a UsageError if it can't be a folder of tensors.

    Such a folder is `optimizer/NAME` or `extra/NAME`.
    """
    if not _PART.fullmatch(part):
        why = "it becomes a folder: letters, digits, '_', '-' and '.', not starting with '-' or '.'"
        raise UsageError(f"{part.partition('/')[2]!r} can't name a part of a checkpoint", why=why)
    return part


@dataclass(frozen=True)
class ParameterInfo:
    """The shape of a full tensor of the model, its dtype without `torch.`, and its other names."""

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    step: int
    files: Mapping[str, FileInfo]  # by path inside the checkpoint, with `/`
    parameters: Mapping[str, ParameterInfo]  # by canonical name, in the order of the names
    # the folders of tensors: `model`, `optimizer/NAME`, `extra/NAME`
    parts: tuple[str, ...] = (MODEL,)
    written_by: Mapping[str, str] = field(default_factory=dict)  # program → its version
    ranks: int | None = None  # the number of ranks whose raw shards it holds (`format: local`)

    @property
    def num_bytes(self) -> int:
        return sum(f.size for f in self.files.values())

    def files_of(self, part: str) -> list[str]:
        return [file for file in self.files if file.startswith(f"{part}/")]

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON; its last line is its checksum."""
        files = {
            path: {"size": f.size, "crc32": None if f.crc32 is None else f"{f.crc32:08x}"}
            | ({"marks": "".join(f"{mark:08x}" for mark in f.marks)} if f.marks else {})
            for path, f in sorted(self.files.items())
        }
        parameters = {
            name: {"shape": list(p.shape), "dtype": p.dtype, "aliases": list(p.aliases)}
            for name, p in sorted(self.parameters.items())
        }
        lines = ["{", f'"format_version": {FORMAT_VERSION},', f'"step": {self.step},']
        lines += [
            f'"written_by": {json.dumps(dict(self.written_by))},',
            f'"parts": {json.dumps(list(self.parts))},',
        ]
        lines += [f'"ranks": {self.ranks},'] if self.ranks is not None else []
        lines += _entries("files", files) + _entries("parameters", parameters)
        body = "".join(line + "\n" for line in lines).encode()
        return body + _checksum_line(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parse the result of `to_bytes`.

        Any ValueError, KeyError, TypeError or AttributeError means other data.
        """
        body, newline, _ = data[:-1].rpartition(b"\n")
        body += newline
        if data != body + _checksum_line(body):
            raise ValueError("its last line is not the checksum of what is above it")
        content = parse_json(data)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            what = (
                f"the checkpoint has format version {version}; this Lockstep reads version"
                f" {FORMAT_VERSION}"
            )
            raise UsageError(what, fix="use the version of Lockstep that wrote it, or a newer one")
        ranks = content.get("ranks")
        manifest = cls(
            step=count_of(content["step"]),
            files={
                path: FileInfo(
                    count_of(info["size"]), _crc32_of(info["crc32"]), _marks_of(info.get("marks"))
                )
                for path, info in content["files"].items()
            },
            parameters={
                name: ParameterInfo(
                    counts_of(p["shape"]), text_of(p["dtype"]), tuple(map(text_of, p["aliases"]))
                )
                for name, p in content["parameters"].items()
            },
            parts=tuple(text_of(part) for part in content["parts"]),
            written_by={
                text_of(name): text_of(version) for name, version in content["written_by"].items()
            },
            ranks=None if ranks is None else count_of(ranks),
        )
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Raise a ValueError if files are missing, or if some do not belong to a checkpoint."""
        stray = [part for part in self.parts if not _PART.fullmatch(part)]
        for path in self.files:
            part, _, name = path.rpartition("/")
            tensors = _PART.fullmatch(part) and _TENSOR_FILE.fullmatch(name)
            stray += [path] * (path not in (STATE, CONFIG) and not tensors)
        if stray:
            raise ValueError(f"it lists {stray[0]!r}, which no checkpoint holds")
        if odd := [path for path, info in self.files.items() if info.marks and not info.is_marked]:
            raise ValueError(f"it has another number of checksums than {odd[0]} needs")
        needed = [STATE, CONFIG]
        if self.ranks is None:
            needed += [f"{part}/{METADATA}" for part in self.parts]
        elif self.ranks > len(self.files):
            # no need to make a billion names to find that they are missing
            raise ValueError(f"it is of {self.ranks} ranks, and lists {len(self.files)} files")
        else:
            needed += [raw_file(MODEL, rank) for rank in range(self.ranks)]  # every rank writes one
        if missing := [path for path in needed if path not in self.files]:
            raise ValueError(f"it does not list {missing[0]}")
        if MODEL not in self.parts:
            raise ValueError("it lists no part for the model")
        stored_bytes = sum(self.files[file].size for file in self.files_of(MODEL))
        claimed = sum(prod(info.shape) for info in self.parameters.values())
        if claimed > stored_bytes:  # an element has a byte at least
            raise ValueError(
                f"it claims {claimed} elements for the model, whose files have {stored_bytes} bytes"
            )


def _crc32_of(value: Any) -> int | None:
    return None if value is None else int(text_of(value), 16)


def _marks_of(value: Any) -> tuple[int, ...]:
    """Return checksums of eight hexadecimal digits each, one after the other; none for None."""
    digits = "" if value is None else text_of(value)
    if len(digits) % _DIGITS:
        raise ValueError("it has a checksum that is cut short")
    starts = range(0, len(digits), _DIGITS)
    return tuple(int(digits[start : start + _DIGITS], 16) for start in starts)


def _entries(name: str, entries: Mapping[str, Any]) -> list[str]:
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
    return [f'"{name}": {{', *(row + "," for row in rows[:-1]), *rows[-1:], "},"]


def _checksum_line(body: bytes) -> bytes:
    return f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode()


def read_manifest(path: Checkpoint) -> Manifest:
    """Read the manifest of one checkpoint and verify its checksum.

    The listed files are not looked at.

    Raise a UsageError if there is no checkpoint, or it is of a later format, a DamagedError for a
    damaged manifest, and an UnreachableError if it could not be read.
    """
    checkpoint = locate(path)
    return parse_manifest(checkpoint, read_manifest_bytes(checkpoint, checkpoint))


def read_manifest_bytes(checkpoint: Location, source: Location) -> bytes:
    """Return the manifest as it is stored; raise as `read_manifest` if there is none.

    `source` has the checkpoint's files; errors are told of the checkpoint.
    """
    try:
        return source.read(MANIFEST, JSON_LIMIT)
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError) or not checkpoint.storage.exists(checkpoint.name):
            fix = "give a folder checkpoints/step-…; `lockstep checkpoint list RUN_DIR` names them"
            raise UsageError(f"there is no checkpoint at {checkpoint}", fix=fix) from None
        why = "it is not a checkpoint, or was only partly copied"
        raise DamagedError(f"{checkpoint} has no {MANIFEST}", why=why) from None
    except (DamagedBytesError, ValueError) as error:
        raise _damaged_manifest(checkpoint, error) from None
    except OSError as error:
        raise unreachable_error(f"{checkpoint}/{MANIFEST}", error) from None


def _damaged_manifest(checkpoint: Location, error: Exception) -> DamagedError:
    what = "the manifest of a checkpoint is damaged"
    return DamagedError(what, where=f"{checkpoint}/{MANIFEST}", why=str(error))


def parse_manifest(checkpoint: Location, data: bytes) -> Manifest:
    """Return the manifest of a checkpoint from its bytes; raise as `read_manifest`."""
    try:
        manifest = Manifest.from_bytes(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged_manifest(checkpoint, error) from None
    named = step_of(checkpoint.name)
    if named is not None and named != manifest.step:
        raise DamagedError(
            f"{checkpoint} holds step {manifest.step}, not the step of its name",
            fix="rename it back",
        )
    return manifest


def problems_of_files(
    checkpoint: Location,
    manifest: Manifest,
    files: Iterable[str] | None = None,
    *,
    thorough: bool,
    advance: Advance = lambda _bytes: None,
) -> list[str]:
    """Return a line for each problem with `files` (None: all files).

    Their sizes are compared, or, if `thorough`, their checksums. Raise an UnreachableError if one
    could not be read.
    """
    problems = []
    for file in manifest.files if files is None else files:
        expected = manifest.files[file]
        try:
            size = checkpoint.size(file)
            if size != expected.size:
                problems.append(f"{file}: {size} bytes, where {expected.size} were written")
            elif expected.crc32 is None:
                if not checkpoint.storage.in_memory:
                    problems.append(f"{file}: the manifest has no checksum of it")
            elif thorough and checkpoint.checksum(file, advance).crc32 != expected.crc32:
                problems.append(f"{file}: its checksum is not that of what was written")
        except OSError as error:
            problems.append(damage_by(error, checkpoint, file))
    return problems


def verified_manifest(checkpoint: Location, part: str | None = None) -> Manifest:
    """Verify the checksums of one part (None: of all parts), and return the manifest.

    Raises a DamagedError if a checksum is wrong, and what `read_manifest` raises.
    """
    manifest = read_manifest(checkpoint)
    files = list(manifest.files) if part is None else manifest.files_of(part)
    with progress_of(
        f"checking {checkpoint.name}", sum(manifest.files[file].size for file in files)
    ) as advance:
        problems = problems_of_files(checkpoint, manifest, files, thorough=True, advance=advance)
    if problems:
        raise DamagedError(f"the checkpoint {checkpoint} is damaged", why="; ".join(problems[:4]))
    return manifest


def verify(path: Checkpoint, *, thorough: bool = True) -> list[str]:
    """Return a line for each problem with a checkpoint.

    The sizes of its files are compared, or, if `thorough`, their checksums. Raise an
    UnreachableError if it could not be read.
    """
    checkpoint = locate(path)
    try:
        manifest = read_manifest(checkpoint)
    except (DamagedError, UsageError) as error:
        return [error.what + (f": {error.why}" if error.why else "")]
    with progress_of(f"checking {checkpoint.name}", manifest.num_bytes) as advance:
        return problems_of_files(checkpoint, manifest, thorough=thorough, advance=advance)


# key of the state: names of the weights of a loss function, which are with the model's
LOSS_NAMES = "loss_fn"
HUGGING_FACE = "hugging_face"  # key of the state: how `transformers` builds the model again
OWN_FORM = "own_form"  # key of the state: modules that give their `state_dict` a form of their own


def read_state(path: Checkpoint) -> dict[str, Any]:
    """Return `state.json`, without comparing its checksum.

    Raise a DamagedError if it is not one, and an UnreachableError if it could not be read.
    """
    checkpoint = locate(path)
    try:
        return parse_json(_read_described(checkpoint, STATE), finite=False)
    except ValueError as error:
        raise unreadable_error(f"{checkpoint}/{STATE}", error) from None


def config_text(path: Checkpoint) -> str:
    """Return the resolved config of the run that saved; for imported weights, a comment.

    Raises a DamagedError if it is not one, and an UnreachableError if it could not be read.
    """
    checkpoint = locate(path)
    try:
        return _read_described(checkpoint, CONFIG).decode()
    except ValueError as error:
        raise unreadable_error(f"{checkpoint}/{CONFIG}", error) from None


def _read_described(checkpoint: Location, file: str) -> bytes:
    """Return a file without tensors; raise a ValueError if it is damaged at a glance."""
    try:
        return checkpoint.read(file, JSON_LIMIT)
    except OSError as error:
        raise ValueError(damage_by(error, checkpoint, file)) from None
