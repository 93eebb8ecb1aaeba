"""The records of `torch.distributed.checkpoint`'s metadata file.

And the blocks in which a DTensor is stored.

Public torch: `FileSystemReader` unpickles the metadata, which can run any code. Of a DTensor's
block only the method knows that `torch.distributed.checkpoint` calls itself: shards may be uneven
or strided. Seen to work: torch 2.11.0 to 2.15.0, whose files have version 1.0 of the format. When
gone: metadata with an unknown record is refused with its name, and nothing is loaded; a save of a
DTensor raises.
"""

from collections.abc import Sequence
from typing import cast

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
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


def read_items(
    name: str, stored: TensorStorageMetadata, target: ChunkStorageMetadata
) -> list[ReadItem]:
    """Return which parts of which stored blocks fill the target block."""
    return create_read_items_for_chunk_list(name, stored, [target])
