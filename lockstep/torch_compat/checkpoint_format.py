"""The records of `torch.distributed.checkpoint`'s metadata file.

And the blocks in which a DTensor is stored, and the names that DCP gives to files and places.

Public torch: `FileSystemReader` unpickles the metadata, which can run any code. Of a DTensor's
block only the method knows that `torch.distributed.checkpoint` calls itself: shards may be uneven
or strided. Seen to work: torch 2.11.0 to 2.15.0, whose files have version 1.0 of the format. The
file of a rank and the record of a block's place are what DCP's own writer makes, block by block, in
a third of a millisecond each. When gone: metadata with an unknown record is refused with its name,
and nothing is loaded; a save raises.
"""

from collections.abc import Sequence
from typing import cast

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from lockstep.errors import UsageError

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
METADATA_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
GET_LAYOUT = ("torch.serialization", "_get_layout")


def chunks_of(tensor: DTensor) -> ChunkStorageMetadata:
    """Return the block of the whole tensor that this rank holds: offsets and sizes.

    UsageError: there is not one block: a pending reduction, or a placement that leaves several.
    """
    try:
        chunks = cast(Sequence[ChunkStorageMetadata], tensor.__create_chunk_list__())  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"a DTensor with placements {tensor.placements} can't be saved", why=str(error)
        ) from None
    if len(chunks) != 1:
        what = (
            f"a DTensor with placements {tensor.placements} lies in {len(chunks)} blocks on one"
            " rank"
        )
        raise UsageError(what, why="a checkpoint stores one block of a tensor from each rank")
    return chunks[0]


def tensor_file(plan: SavePlan) -> str:
    """Return the file of the rank that a global plan is for, as DCP names it."""
    return f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"


def stored_at(file: str, offset: int, length: int) -> object:
    """Return DCP's record of where a block is stored: a file beside `.metadata`, and its bytes."""
    return _StorageInfo(file, offset, length)


def read_items(
    name: str, stored: TensorStorageMetadata, target: ChunkStorageMetadata
) -> list[ReadItem]:
    """Return which parts of which stored blocks fill the target block."""
    return create_read_items_for_chunk_list(name, stored, [target])
