"""`format: local`: each rank's blocks as they lie in its memory, with no plan and no sharing out.

    PART/rank-00000.raw     8 bytes: length of the header; the header, JSON: name → dtype, shape, offset, block, at;
                            then the blocks' elements

Only ranks that hold the same blocks load it again. A reader that puts whole tensors together (`checkpoint convert`,
`digest`, `export`) takes each block from the first rank that has it.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from lockstep.checkpoint.commit import MainRank, merge_aliases, merge_groups, not_written, on_main, unfinished
from lockstep.checkpoint.disk import ChecksummedStream, FileFacts, open_inside, sync_directory
from lockstep.checkpoint.manifest import DamagedError, Manifest, ParameterFacts, problems_of_files
from lockstep.checkpoint.names import MODEL, raw_file
from lockstep.checkpoint.pieces import Part, Piece, dtype_name, dtype_of, tensor_bytes
from lockstep.checkpoint.snapshot import Staged
from lockstep.checkpoint.storage import PartReader
from lockstep.checkpoint.stored_metadata import StoredPart
from lockstep.checkpoint.together import Ranks
from lockstep.checkpoint.untrusted import JSON_LIMIT, count_of, counts_of, parse_json, text_of
from lockstep.errors import UsageError

_Facts = dict[str, tuple[tuple[int, ...], str]]  # name → whole shape, dtype


class Reader(Protocol):
    """What reads a part of a checkpoint."""

    stored: StoredPart

    def read_into(self, pieces: dict[str, Piece]) -> None:
        """Fill the pieces, in place."""


def open_part(folder: Path, manifest: Manifest, part: str) -> Reader:
    """A reader for one part, whatever format the checkpoint has.

    Raises:
        DamagedError: what describes the part is not what was written, or a file of it has another size.
    """
    files = [path for path in manifest.files if path.startswith(f"{part}/")]
    if problems := problems_of_files(folder, manifest, files, thorough=False):
        raise DamagedError("a checkpoint can't be read", where=str(folder / part), why=problems[0])
    return PartReader(folder, manifest, part) if manifest.ranks is None else RawReader(folder, manifest, part)


# ---- writing ----


@dataclass(frozen=True)
class _Written:
    files: dict[str, FileFacts]
    model: _Facts
    aliases: dict[str, tuple[str, ...]]
    groups: dict[str, dict[str, Any]]


def commit_local(path: Path, step: int, staged: Staged, config_yaml: str, ranks: Ranks) -> Path:
    """As `commit.commit`, but each rank writes all that it holds."""
    with ExitStack() as stack:
        main: MainRank | None = None
        if ranks.is_main:
            main = MainRank(path, stack.enter_context(unfinished(path)), step, staged.state, config_yaml)

        def begin(parts: list[list[str]]) -> tuple[str, list[str]]:
            names = sorted({name for mine in parts for name in mine}, key=lambda name: (name != MODEL, name))
            on_main(main).make_folders(names)
            return on_main(main).folder.name, names

        def close(written: list[_Written]) -> None:
            files = {name: facts for rank in written for name, facts in rank.files.items()}
            model = {name: facts for rank in written for name, facts in rank.model.items()}
            aliases = merge_aliases([rank.aliases for rank in written], model)
            on_main(main).groups = merge_groups([rank.groups for rank in written])
            parameters = {
                name: ParameterFacts(shape, dtype, aliases.get(name, ())) for name, (shape, dtype) in model.items()
            }
            on_main(main).seal(files, parameters, names, ranks.size)

        name, names = ranks.judge(not_written(step), lambda: list(staged.parts), begin)
        ranks.judge(not_written(step), lambda: _write(path.with_name(name), staged, ranks.rank), close)
    return path


def _write(folder: Path, staged: Staged, rank: int) -> _Written:
    files = {}
    for part, content in staged.parts.items():
        file = raw_file(part, rank)
        files[file] = _write_part(folder / file, content)
        sync_directory((folder / file).parent)
    model = staged.parts[MODEL]
    facts = {name: (piece.shape, dtype_name(piece.tensor.dtype)) for name, piece in model.pieces.items()}
    return _Written(files, facts, model.aliases, staged.groups)


def _write_part(path: Path, part: Part) -> FileFacts:
    header: dict[str, Any] = {}
    position = 0
    for name, piece in part.pieces.items():
        size = piece.tensor.numel() * piece.tensor.element_size()
        header[name] = {
            "dtype": dtype_name(piece.tensor.dtype), "shape": list(piece.shape), "offset": list(piece.offset),
            "block": list(piece.tensor.shape), "at": position,
        }  # fmt: skip
        position += size
    text = json.dumps(header).encode()
    with ChecksummedStream(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in part.pieces:
            stream.write(tensor_bytes(part.resolve(name)))
        os.fsync(stream.fileno())
        return stream.facts


# ---- reading ----


@dataclass(frozen=True)
class _Block:
    """A block of a tensor, `start` bytes into a file of the part."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    block: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.block) * self.dtype.itemsize


class RawReader:
    """Reads blocks of one part from the files of all ranks."""

    def __init__(self, folder: Path, manifest: Manifest, part: str) -> None:
        self._folder = folder
        self.by_rank: list[dict[str, _Block]] = []
        try:
            for rank in range(manifest.ranks or 0):
                file = raw_file(part, rank)
                self.by_rank.append(_read_header(folder, file, manifest.files[file].size)
                                    if file in manifest.files else {})  # fmt: skip
            self._blocks = self._each_once()
            self.stored = StoredPart({name: _described(blocks) for name, blocks in self._blocks.items()})
            if part == MODEL and {n: (b[0].shape, dtype_name(b[0].dtype)) for n, b in self._blocks.items()} != {
                name: (facts.shape, facts.dtype) for name, facts in manifest.parameters.items()
            }:
                raise ValueError("it disagrees with the manifest about the model's tensors")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError("a checkpoint can't be read", where=str(folder / part), why=str(error)) from None

    def _each_once(self) -> dict[str, list[_Block]]:
        """Name → blocks that make up the tensor, replicas left out."""
        found: dict[str, dict[tuple[int, ...], _Block]] = {}
        for blocks in self.by_rank:
            for name, block in blocks.items():
                mine = found.setdefault(name, {})
                first = next(iter(mine.values()), block)
                if (first.shape, first.dtype) != (block.shape, block.dtype):
                    raise ValueError(f"ranks disagree about {name}")
                if prod(block.block) or not prod(block.shape):
                    mine.setdefault(block.offset, block)
        for name, mine in found.items():
            if sum(prod(b.block) for b in mine.values()) != prod(next(iter(mine.values())).shape if mine else (1,)):
                raise ValueError(f"the blocks of {name} do not make up the whole of it")
        return {name: list(mine.values()) for name, mine in found.items()}

    def read_into(self, pieces: dict[str, Piece]) -> None:
        """Fill the pieces, in place, one block in memory at a time."""
        with torch.no_grad():
            for name, piece in pieces.items():
                for block in self._blocks[name] if piece.tensor.numel() else ():
                    _copy(self._folder, block, piece)


def check_topology(
    folder: Path, manifest: Manifest, reader: Reader, pieces: Mapping[str, Piece], owner: Mapping[str, str],
    ranks: Ranks,
) -> None:  # fmt: skip
    """Raw shards are for the ranks that wrote them.

    Args:
        owner: alias → canonical name, as stored.

    Raises:
        UsageError: this rank holds other blocks.
    """
    if not isinstance(reader, RawReader):
        return
    whole = f"{folder.name}-full"
    fix = f"lockstep checkpoint convert {folder} --to full --output {whole}, then --resume {whole}"
    if manifest.ranks != ranks.size:
        raise UsageError(
            f"{folder} holds the raw shards of {manifest.ranks} ranks (checkpoint.format: local); this run has "
            f"{ranks.size}", fix=fix,
        )  # fmt: skip
    mine = reader.by_rank[ranks.rank]
    for name, piece in pieces.items():
        block = mine.get(owner.get(name, name))
        if block is not None and block.shape != piece.shape:
            continue  # another model: told by who compares all names and shapes
        if block is None or (block.offset, block.block) != (piece.offset, tuple(piece.tensor.shape)):
            raise UsageError(
                f"{folder} holds raw shards (checkpoint.format: local) of a run that laid {name} over its ranks "
                "otherwise than this one", fix=fix,
            )  # fmt: skip


def _read_header(folder: Path, file: str, size: int) -> dict[str, _Block]:
    """The blocks of one file, each inside of it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not what `_write_part` wrote.
    """
    with open_inside(folder, file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, JSON_LIMIT):
            raise ValueError(f"the header of {file} claims {length} bytes")
        header = parse_json(stream.read(length))
    blocks = {}
    for name, facts in header.items():
        shape, offset, block = (counts_of(facts[key]) for key in ("shape", "offset", "block"))
        start = 8 + length + count_of(facts["at"])
        found = _Block(file, dtype_of(text_of(facts["dtype"])), shape, offset, block, start)
        if found.start + found.num_bytes > size:
            raise ValueError(f"{file} claims more bytes for {name} than it has")
        if any(o + b > s for o, b, s in zip(offset, block, shape, strict=True)):
            raise ValueError(f"a block of {name} lies outside it")
        blocks[name] = found
    return blocks


def _described(blocks: list[_Block]) -> TensorStorageMetadata:
    first = blocks[0]
    chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.block)) for b in blocks]
    return TensorStorageMetadata(TensorProperties(first.dtype), torch.Size(first.shape), chunks)


def _copy(folder: Path, block: _Block, piece: Piece) -> None:
    """What the block and the piece have in common."""
    low = [max(a, b) for a, b in zip(block.offset, piece.offset, strict=True)]
    ends = zip(block.offset, block.block, piece.offset, piece.tensor.shape, strict=True)
    high = [min(a + n, b + m) for a, n, b, m in ends]
    if any(end <= start for start, end in zip(low, high, strict=True)):
        return
    with open_inside(folder, block.file) as stream:
        stream.seek(block.start)
        data = bytearray(stream.read(block.num_bytes))
    source = torch.frombuffer(data, dtype=block.dtype).reshape(block.block)
    target = piece.tensor
    for dim, (start, end) in enumerate(zip(low, high, strict=True)):
        source = source.narrow(dim, start - block.offset[dim], end - start)
        target = target.narrow(dim, start - piece.offset[dim], end - start)
    target.copy_(source)
