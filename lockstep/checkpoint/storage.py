"""One folder of tensors in DCP's format: planning, writing and reading pieces.

The files are those of torch.distributed.checkpoint (its own `load` reads them). What is ours: names and blocks come
from `Piece`, every byte is counted into a checksum as it is written, and reading trusts nothing (`stored_metadata`).
Collectives are the caller's affair: a plan, a write and a read here are local.
"""

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from lockstep.checkpoint.disk import ChecksummedStream, FileFacts, open_inside, read_inside, sync_directory
from lockstep.checkpoint.manifest import DamagedError, Manifest, problems_of_files
from lockstep.checkpoint.names import METADATA, MODEL
from lockstep.checkpoint.pieces import Part, Piece, dtype_name
from lockstep.checkpoint.sizes import check_block, check_sizes
from lockstep.checkpoint.stored_metadata import StoredPart, parse_metadata
from lockstep.checkpoint.torch_internals import read_items
from lockstep.checkpoint.untrusted import METADATA_LIMIT


def local_plan(part: Part) -> SavePlan:
    """What this rank could write of a part."""
    return SavePlan([_write_item(name, piece) for name, piece in part.pieces.items() if not piece.is_empty])


def global_plan(plans: list[SavePlan], folder: Path) -> tuple[list[SavePlan], Metadata]:
    """Each block once, shared out so that replicas write about the same number of bytes each; and the metadata of it
    all.

    Raises:
        ValueError: the ranks' blocks of some tensor overlap, or leave a part of it out.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    shared, metadata = planner.create_global_plan(plans)
    return PartWriter(folder).prepare_global_plan(shared), metadata


class PartWriter(FileSystemWriter):
    """Writes this rank's file of one folder; `facts` holds size and checksum of each file written."""

    def __init__(self, folder: Path) -> None:
        # No copying ahead: pieces staged on CPU need none, and it would touch the current device of a background
        # thread.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.folder = folder
        self.fs = _ChecksummedFiles()

    @property
    def facts(self) -> dict[str, FileFacts]:
        return cast(_ChecksummedFiles, self.fs).facts

    def write(self, plan: SavePlan, part: Part) -> list[WriteResult]:
        """Write what the plan gives to this rank, and sync it; no file if that is nothing."""
        if not plan.items:
            return []
        results: list[WriteResult] = self.write_data(plan, _PieceSavePlanner(part)).wait()
        sync_directory(self.folder)
        return results

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP's own holds the absolute path and a random id: the same state would differ in bytes


class _ChecksummedFiles(FileSystem):
    """Where DCP opens and renames files: every file written here gets its checksum on the way."""

    def __init__(self) -> None:
        self.facts: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        with ChecksummedStream(Path(path)) as stream:
            yield stream
            self.facts[Path(path).name] = stream.facts

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.facts[Path(new_path).name] = self.facts.pop(Path(path).name)


class _PieceSavePlanner(DefaultSavePlanner):
    def __init__(self, part: Part) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.part = part

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.part.resolve(write_item.index.fqn)


def _write_item(name: str, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.size())
    data = TensorWriteData(chunk, TensorProperties(piece.tensor.dtype), torch.Size(piece.shape))
    # SHARD for whole tensors too: then any rank that holds a block may be the one that writes it.
    return WriteItem(MetadataIndex(name, piece.offset), WriteItemType.SHARD, tensor_data=data)


class PartReader(FileSystemReader):
    """Reads blocks of one folder of a checkpoint into pieces.

    Raises:
        DamagedError: `.metadata` is not the file that was written, or holds what it must not.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest, part: str) -> None:
        super().__init__(checkpoint / part)
        self.fs = _FilesInside(checkpoint, part)
        self.stored = read_stored_part(checkpoint, manifest, part)
        self.storage_data = dict(self.stored.places)

    def read_into(self, pieces: dict[str, Piece]) -> None:
        """Fill the pieces, in place, from whatever blocks were stored. Shapes and dtypes are the caller's to compare
        first.
        """
        planner = _PieceLoadPlanner(pieces)
        items: list[ReadItem] = []
        for name, piece in pieces.items():
            if piece.tensor.numel():
                block = ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.size())
                items += read_items(name, self.stored.tensors[name], block)
        self._check_blocks(items)
        with torch.no_grad():
            self.read_data(LoadPlan(items), planner).wait()

    def _check_blocks(self, items: list[ReadItem]) -> None:
        for place in {self.stored.places[item.storage_index] for item in items}:
            with self.fs.create_stream(Path(self.path, place.relative_path), "rb") as file:
                try:
                    check_block(cast(IO[bytes], file), place.offset, place.length)
                except ValueError as error:
                    where = str(Path(self.path) / place.relative_path)
                    raise DamagedError("a checkpoint can't be read", where=where, why=str(error)) from None

    def read_metadata(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("the metadata is read by read_stored_part, never by torch's unpickler")


class _FilesInside(FileSystem):
    """Where DCP opens files to read: only inside the checkpoint, never through a link."""

    def __init__(self, checkpoint: Path, part: str) -> None:
        self.checkpoint, self.part = checkpoint, part

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "rb"
        with open_inside(self.checkpoint, f"{self.part}/{Path(path).name}") as stream:
            yield stream


class _PieceLoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: dict[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        block = self.pieces[read_item.dest_index.fqn].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            block = block.narrow(dim, offset, length)
        return block

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise AssertionError("objects are never stored with tensors, and never unpickled")


def read_stored_part(checkpoint: Path, manifest: Manifest, part: str) -> StoredPart:
    """What one folder of tensors holds, from its `.metadata`, whose checksum is compared before it is parsed."""
    relative = f"{part}/{METADATA}"
    problems = problems_of_files(checkpoint, manifest, [relative], thorough=True)
    try:
        if problems:
            raise ValueError(problems[0])
        stored = parse_metadata(read_inside(checkpoint, relative, METADATA_LIMIT))
        unlisted = {f"{part}/{place.relative_path}" for place in stored.places.values()} - manifest.files.keys()
        if unlisted:
            raise ValueError(f"it points at {min(unlisted)}, which the manifest does not list")
        check_sizes(stored, {name: f.size for name, f in manifest.files.items() if name.startswith(f"{part}/")}, part)
        if part == MODEL:
            _compare_with_manifest(stored, manifest)
    except ValueError as error:
        raise DamagedError("a checkpoint can't be read", where=str(checkpoint / relative), why=str(error)) from None
    return stored


def _compare_with_manifest(stored: StoredPart, manifest: Manifest) -> None:
    found = {name: (tuple(t.size), dtype_name(t.properties.dtype)) for name, t in stored.tensors.items()}
    listed = {name: (facts.shape, facts.dtype) for name, facts in manifest.parameters.items()}
    if found != listed:
        name = min({*found, *listed}, key=lambda n: (found.get(n) == listed.get(n), n))
        raise ValueError(f"it disagrees with the manifest about {name}")
