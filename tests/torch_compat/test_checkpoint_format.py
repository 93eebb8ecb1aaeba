"""The private names of torch that the format rests on: a release that moves one fails here, and
says which.
"""

import io
import pickle
import pickletools
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.metadata import StoredAt, parse_metadata
from lockstep.torch_compat import checkpoint_format
from tests.checkpoint.shared import save


def globals_of(data: bytes) -> set[tuple[str, str]]:
    """What a pickle names, found without running it."""
    named = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            named.add((module, name))
            return super().find_class(module, name)

    Listing(io.BytesIO(data)).load()
    return named


def test_the_metadata_names_what_is_known(tmp_path: Path) -> None:
    data = (save(tmp_path, 1) / "model" / ".metadata").read_bytes()
    known = {
        (checkpoint_format.METADATA_MODULE, name) for name in checkpoint_format.METADATA_RECORDS
    }
    known |= {checkpoint_format.STORAGE_INFO, checkpoint_format.GET_LAYOUT, ("torch", "Size")}
    dtypes = {("torch", name) for name in ("float32", "bfloat16", "int64")}
    assert globals_of(data) <= known | dtypes
    assert any(operation.name == "BUILD" for operation, _, _ in pickletools.genops(data))


def test_stored_places_look_as_torch_has_them(tmp_path: Path) -> None:
    """No block is transformed, and each lies where torch says."""
    data = (save(tmp_path, 1) / "model" / ".metadata").read_bytes()
    theirs = pickle.loads(data)
    mine = parse_metadata(data)
    assert mine.tensors.keys() == theirs.state_dict_metadata.keys()
    for index, place in theirs.storage_data.items():
        assert mine.places[index] == StoredAt(place.relative_path, place.offset, place.length)
        assert not place.transform_descriptors
    for name, tensor in theirs.state_dict_metadata.items():
        assert mine.tensors[name] == tensor


def test_names_that_are_called_are_there() -> None:
    assert callable(getattr(DTensor, "__create_chunk_list__"))  # noqa: B009
    assert {"path", "fs", "overwrite"} <= vars(FileSystemWriter(".")).keys()
    for method in ("finish", "prepare_global_plan", "storage_meta"):
        assert callable(getattr(FileSystemWriter, method))
    (_, second) = FileSystemWriter(".").prepare_global_plan([SavePlan([]), SavePlan([])])
    assert checkpoint_format.tensor_file(second) == "__1_0.distcp"
    whole = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    stored = torch.distributed.checkpoint.metadata.TensorStorageMetadata(
        torch.distributed.checkpoint.metadata.TensorProperties(torch.float32),
        torch.Size([4]),
        [whole],
    )
    (item,) = checkpoint_format.read_items(
        "x", stored, ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))
    )
    assert (item.dest_index.fqn, tuple(item.storage_offsets), tuple(item.lengths)) == (
        "x",
        (1,),
        (2,),
    )
