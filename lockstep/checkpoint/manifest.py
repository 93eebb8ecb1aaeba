"""`manifest.json`: what a checkpoint holds, and the checksums that prove it.

The manifest is written last. It is JSON, one entry a line; its last line is the CRC-32 of all lines before it, so that
a flipped byte is noticed in the manifest as in any other file.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk import FileFacts, facts_inside, read_inside, size_inside
from lockstep.checkpoint.names import (
    CONFIG,
    MANIFEST,
    METADATA,
    MODEL,
    STATE,
    is_listed_file,
    is_part,
    raw_file,
    step_of,
)
from lockstep.checkpoint.untrusted import JSON_LIMIT, count_of, counts_of, parse_json, text_of
from lockstep.errors import RunError, UsageError
from lockstep.progress import Advance, progress_of

FORMAT_VERSION = 1


class DamagedError(RunError):
    """A checkpoint, or a file of it, is not what was written."""


@dataclass(frozen=True)
class ParameterFacts:
    """One tensor of the model, whole: its shape, its dtype without `torch.`, and further names that share it."""

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: the step after which the state was taken.
        files: path inside the checkpoint, with `/`, → size and checksum.
        parameters: canonical name → facts, in the order of the names.
        parts: the folders of tensors: `model`, `optimizer/NAME`, `extra/NAME`.
        written_by: program → its version.
        ranks: of how many ranks it holds the raw shards (`format: local`); None: the parts are DCP's.
    """

    step: int
    files: Mapping[str, FileFacts]
    parameters: Mapping[str, ParameterFacts]
    parts: tuple[str, ...] = (MODEL,)
    written_by: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None

    def to_bytes(self) -> bytes:
        """The file, its checksum included."""
        files = {path: {"size": f.size, "crc32": f"{f.crc32:08x}"} for path, f in sorted(self.files.items())}
        parameters = {
            name: {"shape": list(p.shape), "dtype": p.dtype, "aliases": list(p.aliases)}
            for name, p in sorted(self.parameters.items())
        }
        lines = ["{", f'"format_version": {FORMAT_VERSION},', f'"step": {self.step},']
        lines += [f'"written_by": {json.dumps(dict(self.written_by))},', f'"parts": {json.dumps(list(self.parts))},']
        lines += [f'"ranks": {self.ranks},'] if self.ranks is not None else []
        lines += _entries("files", files) + _entries("parameters", parameters)
        body = "".join(line + "\n" for line in lines).encode()
        return body + _checksum_line(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Raises ValueError, with the reason, for anything but what `to_bytes` wrote."""
        body, newline, _ = data[:-1].rpartition(b"\n")
        body += newline
        if data != body + _checksum_line(body):
            raise ValueError("its last line is not the checksum of what is above it")
        content = parse_json(data)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise UsageError(
                f"the checkpoint has format version {version}; this Lockstep reads version {FORMAT_VERSION}",
                fix="use the version of Lockstep that wrote it, or a newer one",
            )
        ranks = content.get("ranks")
        manifest = cls(
            step=count_of(content["step"]),
            files={path: _facts(facts) for path, facts in content["files"].items()},
            parameters={name: _parameter(facts) for name, facts in content["parameters"].items()},
            parts=tuple(text_of(part) for part in content["parts"]),
            written_by={text_of(name): text_of(version) for name, version in content["written_by"].items()},
            ranks=None if ranks is None else count_of(ranks),
        )
        manifest._check_names()
        manifest._check_sizes()
        return manifest

    def _check_names(self) -> None:
        stray = [path for path in self.files if not is_listed_file(path)]
        stray += [part for part in self.parts if not is_part(part)]
        if stray:
            raise ValueError(f"it lists {stray[0]!r}, which no checkpoint holds")
        needed = [STATE, CONFIG]
        if self.ranks is None:
            needed += [f"{part}/{METADATA}" for part in self.parts]
        elif self.ranks > len(self.files):  # a billion names need not be made to see that they are not there
            raise ValueError(f"it is of {self.ranks} ranks, and lists {len(self.files)} files")
        else:
            needed += [raw_file(MODEL, rank) for rank in range(self.ranks)]  # every rank writes one
        if missing := [path for path in needed if path not in self.files]:
            raise ValueError(f"it does not list {missing[0]}")
        if MODEL not in self.parts:
            raise ValueError("it lists no part for the model")

    def _check_sizes(self) -> None:
        """No reader allocates more for the model than its files have."""
        there = sum(facts.size for path, facts in self.files.items() if path.startswith(f"{MODEL}/"))
        claimed = sum(prod(facts.shape) for facts in self.parameters.values())
        if claimed > there:  # an element has a byte at least
            raise ValueError(f"it claims {claimed} elements for the model, whose files have {there} bytes")

    @property
    def num_bytes(self) -> int:
        """Of all files that it lists."""
        return sum(f.size for f in self.files.values())


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of one checkpoint, its own checksum proved; the files that it lists are not looked at.

    Raises:
        UsageError: `path` is not there, or was written by a later format.
        DamagedError: the manifest is missing, cut or changed.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(
            f"there is no checkpoint at {folder}",
            fix="give a folder checkpoints/step-…; `lockstep checkpoint list RUN_DIR` names them",
        )
    try:
        manifest = Manifest.from_bytes(read_inside(folder, MANIFEST, JSON_LIMIT))
    except FileNotFoundError:
        raise DamagedError(
            f"{folder} has no {MANIFEST}", why="it is not a checkpoint, or was only partly copied"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            "the manifest of a checkpoint is damaged", where=str(folder / MANIFEST), why=str(error)
        ) from None
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        raise DamagedError(f"{folder} holds step {manifest.step}, not the step of its name", fix="rename it back")
    return manifest


def problems_of_files(
    folder: Path, manifest: Manifest, paths: Iterable[str] | None = None, *, thorough: bool,
    advance: Advance = lambda _bytes: None,
) -> list[str]:  # fmt: skip
    """What is wrong with the files of a checkpoint, a line each; none if all is well.

    Args:
        paths: the ones to look at; all that the manifest lists if None.
        thorough: read every byte and compare checksums; else sizes only.
        advance: told of the bytes that were read.
    """
    problems = []
    for path in manifest.files if paths is None else paths:
        expected = manifest.files[path]
        try:
            size = size_inside(folder, path)
            if size != expected.size:
                problems.append(f"{path}: {size} bytes, where {expected.size} were written")
            elif thorough and facts_inside(folder, path, advance).crc32 != expected.crc32:
                problems.append(f"{path}: its checksum is not that of what was written")
        except FileNotFoundError:
            problems.append(f"{path}: missing")
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
    return problems


def proved_manifest(folder: Path, part: str | None = None) -> Manifest:
    """The manifest, once every byte of a part (of the whole checkpoint if None) was compared with its checksum.

    Raises:
        UsageError: there is no checkpoint at `folder`.
        DamagedError: something is not what was written.
    """
    manifest = read_manifest(folder)
    paths = [path for path in manifest.files if part is None or path.startswith(f"{part}/")]
    with progress_of(f"checking {folder.name}", sum(manifest.files[path].size for path in paths)) as advance:
        problems = problems_of_files(folder, manifest, paths, thorough=True, advance=advance)
    if problems:
        raise DamagedError(f"the checkpoint {folder} is damaged", why="; ".join(problems[:4]))
    return manifest


def verify(path: str | os.PathLike[str], *, thorough: bool = True) -> list[str]:
    """What is wrong with a checkpoint, a line each; an empty list means that it is whole.

    Args:
        thorough: read every byte and compare checksums (about 2 GB/s); else the manifest's checksum and all sizes.
    """
    try:
        manifest = read_manifest(path)
    except (DamagedError, UsageError) as error:
        return [error.what + (f": {error.why}" if error.why else "")]
    with progress_of(f"checking {Path(path).name}", manifest.num_bytes) as advance:
        return problems_of_files(Path(path), manifest, thorough=thorough, advance=advance)


def _entries(name: str, entries: Mapping[str, Any]) -> list[str]:
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
    return [f'"{name}": {{', *(row + "," for row in rows[:-1]), *rows[-1:], "},"]


def _parameter(content: Mapping[str, Any]) -> ParameterFacts:
    aliases = tuple(text_of(alias) for alias in content["aliases"])
    return ParameterFacts(counts_of(content["shape"]), text_of(content["dtype"]), aliases)


def _facts(content: Mapping[str, Any]) -> FileFacts:
    return FileFacts(count_of(content["size"]), int(text_of(content["crc32"]), 16))


def _checksum_line(body: bytes) -> bytes:
    return f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode()
