"""What is far away is sent once, and nothing of it is loaded before all checksums were compared."""

import io
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep import checkpoint
from lockstep.checkpoint import DamagedError, Location, Snapshot
from lockstep.checkpoint.fetch import Ranges, deal_rest, fetched
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.posix import PosixStorage
from lockstep.checkpoint.storage import MARK_BYTES, ChecksumStream, FileInfo, FilePiece
from lockstep.errors import RunError, UsageError
from tests.checkpoint.shared import CONFIG, flip
from tests.ranks import run_ranks

NAME = "step-00000001"
MODEL = "model/__0_0.distcp"
OPTIMIZER = "optimizer/main/__0_0.distcp"


class Far(PosixStorage):
    """A folder that is read as a storage far away, and counts the bytes that are read."""

    is_remote = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes: dict[str, int] = {}
        self.seconds_for_a_read = 0.0

    def read_pieces(
        self, name: str, pieces: Sequence[FilePiece]
    ) -> Generator[tuple[FilePiece, memoryview], None, None]:
        for piece in super().read_pieces(name, pieces):
            time.sleep(self.seconds_for_a_read)
            yield piece

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        with super().open(name, file) as stream:
            read = stream.read
            reads = self.read_bytes

            class CountedReads(io.RawIOBase):
                def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
                    return stream.seek(to, whence)

                def read(self, size: int = -1) -> bytes:
                    data = read(size)
                    reads[file] = reads.get(file, 0) + len(data)
                    return data

                def readinto(self, buffer: Any) -> int:
                    data = self.read(len(buffer))
                    buffer[: len(data)] = data
                    return len(data)

            yield CountedReads()  # type: ignore[misc]


def state() -> Snapshot:
    """A model with a file of four MiB, and an optimizer with one of more than two."""
    model = {f"w{number}": torch.arange(300_000.0) + number for number in range(3)}
    model["small"] = torch.ones(5)
    return Snapshot(model, {"main": {"w0//exp_avg": torch.arange(600_000.0)}}, {"step": 1})


def zeros(like: Snapshot) -> Snapshot:
    def cleared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    return Snapshot(cleared(like.model), {"main": cleared(like.optimizers["main"])})


def saved(root: Path) -> Location:
    checkpoint.save(root, 1, state(), config_yaml=CONFIG)
    return Location(Far(root), NAME)


def shifted() -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in state().model.items()}


def loading(target: Snapshot) -> Callable[[Location, bool], int]:
    """Return what loads into a target, and returns the step."""

    def load(saved: Location, is_verified: bool) -> int:
        return int(checkpoint.load(saved, target, is_verified=is_verified)["step"])

    return load


def assert_loaded(target: Snapshot) -> None:
    for name, tensor in state().model.items():
        assert target.model[name].equal(tensor), name
    assert target.optimizers["main"]["w0//exp_avg"].equal(torch.arange(600_000.0))


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    """For its checksum and for its value: it was read for each."""
    far = saved(tmp_path)
    target = zeros(state())
    assert checkpoint.load(far, target)["step"] == 1
    assert_loaded(target)
    sizes = {file: info.size for file, info in checkpoint.read_manifest(far).files.items()}
    assert isinstance(far.storage, Far)
    read = {file: far.storage.read_bytes[file] for file in sizes}
    assert read == sizes
    assert sizes[MODEL] > 3 * MARK_BYTES


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, "config.yaml", "state.json"])
def test_damage_anywhere_is_noticed_before_anything_changes(tmp_path: Path, file: str) -> None:
    far = saved(tmp_path)
    path = tmp_path / NAME / file
    size = path.stat().st_size
    places = [0, MARK_BYTES - 1, MARK_BYTES, size // 2, size - 1]
    for place in {place for place in places if 0 <= place < size}:
        flip(path, place)
        for only in (None, ["model"]):
            target = zeros(state())
            with pytest.raises(DamagedError, match=f"{file}: its checksum"):
                checkpoint.load(far, target, only=only)
            assert not any(tensor.any() for tensor in target.model.values())
        flip(path, place)
    data = path.read_bytes()
    for other in (data[:-1], data + b"\0", None):
        path.unlink(missing_ok=True)
        if other is not None:
            path.write_bytes(other)
        with pytest.raises(DamagedError, match=file):
            checkpoint.load(far, zeros(state()))


def test_a_file_without_bytes_is_looked_for(tmp_path: Path) -> None:
    """As a rank without a share writes one, under `format: local`."""
    empty = "model/__9_0.distcp"
    far = saved(tmp_path)
    manifest = checkpoint.read_manifest(far)
    files = {**manifest.files, empty: FileInfo(0, 0)}
    changed = Manifest(1, files, manifest.parameters, manifest.parts)
    (tmp_path / NAME / "manifest.json").write_bytes(changed.to_bytes())
    (tmp_path / NAME / empty).touch()
    checkpoint.load(far, zeros(state()))
    (tmp_path / NAME / empty).write_bytes(b"0")
    with pytest.raises(DamagedError, match=f"{empty}: 1 bytes, where 0 were written"):
        checkpoint.load(far, zeros(state()))
    (tmp_path / NAME / empty).unlink()
    with pytest.raises(DamagedError, match=f"{empty}: missing"):
        checkpoint.load(far, zeros(state()))


def test_the_newest_is_loaded_with_each_byte_read_once(tmp_path: Path) -> None:
    """It was read to be chosen, and then to be loaded."""
    far = saved(tmp_path)
    target = zeros(state())
    found = checkpoint.load_newest(far.storage, loading(target))
    assert found is not None
    assert found[0] == far.path
    assert_loaded(target)
    assert isinstance(far.storage, Far)
    sizes = {file: info.size for file, info in checkpoint.read_manifest(far).files.items()}
    assert {file: far.storage.read_bytes[file] for file in sizes} == sizes
    assert checkpoint.load_newest(Far(tmp_path / "nothing"), loading(target)) is None


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (MODEL, "flipped"),
        (OPTIMIZER, "missing"),
        ("optimizer/main/.metadata", "cut"),
        ("state.json", "flipped"),
        ("manifest.json", "flipped"),
    ],
)
def test_an_older_one_is_loaded_where_the_newest_is_damaged(
    tmp_path: Path, file: str, damage: str
) -> None:
    """What the load finds is told as a look beforehand tells it, and no tensor has changed."""
    far = saved(tmp_path)
    checkpoint.save(tmp_path, 2, Snapshot(shifted(), state().optimizers), config_yaml=CONFIG)
    path = tmp_path / "step-00000002" / file
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    if damage == "flipped":
        path.write_bytes(data)
        flip(path, len(data) // 2)
    if damage == "missing":
        path.unlink()
    target = zeros(state())
    changed: list[bool] = []

    def load(saved: Location, is_verified: bool) -> int:
        changed.append(any(bool(tensor.any()) for tensor in target.model.values()))
        return loading(target)(saved, is_verified)

    with patch("lockstep.checkpoint.keep._warn") as warn:
        found = checkpoint.load_newest(far.storage, load)
    assert found == (far.path, 1)
    assert_loaded(target)
    assert not any(changed)
    ((told, reason),) = [call.args for call in warn.call_args_list]
    assert told == tmp_path / "step-00000002"
    with patch("lockstep.checkpoint.keep._warn") as warn:
        assert checkpoint.resume_point(tmp_path) == tmp_path / NAME
    ((_, of_a_folder),) = [call.args for call in warn.call_args_list]
    assert reason == of_a_folder
    flip(tmp_path / NAME / MODEL, 0)
    with pytest.raises(RunError, match="none of the 2 checkpoints"):
        checkpoint.load_newest(far.storage, loading(target))


def test_what_is_refused_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Bytes come while the ranks compare names and shapes; they end with the comparison."""
    far = saved(tmp_path)
    assert isinstance(far.storage, Far)
    far.storage.seconds_for_a_read = 0.2
    other = zeros(state())
    other.model["w0"] = torch.zeros(2)
    with pytest.raises(UsageError, match="does not fit this model"):
        checkpoint.load(far, other)
    assert OPTIMIZER not in far.storage.read_bytes, "which comes after the model's file"


def test_what_was_not_needed_can_be_read_after_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces that are shorter than what one checksum covers, as a small object is."""
    monkeypatch.setattr("lockstep.checkpoint.storage._CHUNK", MARK_BYTES // 8)
    near = checkpoint.fetched(saved(tmp_path))
    checkpoint.load(near, zeros(state()), only=["model"])
    with near.open(OPTIMIZER) as stream:
        assert stream.read() == (tmp_path / NAME / OPTIMIZER).read_bytes()


def test_checkpoints_of_older_versions_have_no_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = ChecksumStream.info.fget
    assert info is not None
    without = property(lambda self: FileInfo(info(self).size, info(self).crc32))
    monkeypatch.setattr(ChecksumStream, "info", without)
    far = saved(tmp_path)
    assert fetched(far) is far, "so that it is read as before"
    assert b"marks" not in (tmp_path / NAME / "manifest.json").read_bytes()
    target = zeros(state())
    checkpoint.load(far, target)
    assert_loaded(target)
    target = zeros(state())
    found = checkpoint.load_newest(far.storage, loading(target))
    assert found == (far.path, 1)
    assert_loaded(target)
    flip(tmp_path / NAME / MODEL, 2 * MARK_BYTES)
    target = zeros(state())
    with pytest.raises(DamagedError, match="its checksum is not that"):
        checkpoint.load(far, target)
    assert not any(tensor.any() for tensor in target.model.values())


def test_another_number_of_marks_is_refused(tmp_path: Path) -> None:
    manifest = checkpoint.read_manifest(saved(tmp_path))
    marks = manifest.files[MODEL].marks
    assert len(marks) == 3
    for others in (marks[:-1], (*marks, 1)):
        info = FileInfo(manifest.files[MODEL].size, manifest.files[MODEL].crc32, others)
        changed = Manifest(1, {**manifest.files, MODEL: info}, manifest.parameters, manifest.parts)
        with pytest.raises(ValueError, match="another number of checksums"):
            Manifest.from_bytes(changed.to_bytes())


def test_what_no_rank_needs_is_dealt_out_once() -> None:
    mib = MARK_BYTES
    files = {
        "model/a": FileInfo(5 * mib + 7, 1),
        "model/b": FileInfo(200 * mib, 1),
        "state.json": FileInfo(9, 1),
        "model/c": FileInfo(10, 1),
        "model/empty": FileInfo(0, 0),
    }
    needed: list[Ranges] = [
        {"model/a": [(mib + 3, mib + 5)], "model/c": [(0, 10)]},
        {"model/a": [(3 * mib, 5 * mib + 1), (mib, mib + 1)]},
    ]
    shares = deal_rest(Manifest(1, files, {}), ["state.json"], needed)
    spans = {
        file: sorted(span for share in shares for span in share.get(file, ()))
        for file in {file for share in shares for file in share}
    }
    assert spans.pop("model/a") == [(0, mib), (2 * mib, 3 * mib)]
    assert spans.pop("model/empty") == [], "it is looked at, once"
    (of_b,) = spans.values()
    assert of_b[0][0] == 0
    assert of_b[-1][1] == 200 * mib
    assert all(first[1] == then[0] for first, then in pairwise(of_b))
    assert all(share.get("model/b") for share in shares), "both ranks have some of it"


def sharded(fill: float) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1_200_000.0).view(1200, 1000) * fill
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "plain": torch.arange(9.0) * fill}


def here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_as_two(folder: str) -> dict[str, Any]:
    """Load what one process saved, and then what is damaged on the other rank's half.

    At last load the newest one: the damaged one is passed over by both, for an older one.
    """
    far = Location(Far(Path(folder)), NAME)
    target = sharded(0.0)
    checkpoint.load(far, Snapshot(target))
    expected = sharded(1.0)
    equal = all(here(tensor).equal(here(expected[name])) for name, tensor in target.items())
    assert isinstance(far.storage, Far)
    read = far.storage.read_bytes.get(MODEL, 0)
    dist.barrier()
    if dist.get_rank() == 0:
        flip(Path(folder, NAME, MODEL), 4 << 20)
    dist.barrier()
    error = ""
    target = sharded(0.0)
    try:
        checkpoint.load(far, Snapshot(target))
    except DamagedError as caught:
        error = str(caught)
    changed = any(bool(here(tensor).any()) for tensor in target.values())
    found = checkpoint.load_newest(far.storage, loading(Snapshot(target)))
    assert found is not None
    equal &= all(here(tensor).equal(here(expected[name])) for name, tensor in target.items())
    chosen = (found[0].name, found[1])
    return {"equal": equal, "read": read, "error": error, "changed": changed, "chosen": chosen}


def test_each_rank_reads_its_ranges_and_all_are_told(tmp_path: Path) -> None:
    whole = {"w": torch.arange(1_200_000.0).view(1200, 1000), "plain": torch.arange(9.0)}
    checkpoint.save(tmp_path, 0, Snapshot(whole, state={"step": 0}), config_yaml="")
    checkpoint.save(tmp_path, 1, Snapshot(whole), config_yaml="")
    size = (tmp_path / NAME / MODEL).stat().st_size
    for rank in run_ranks(load_as_two, 2, str(tmp_path)):
        assert rank["equal"]
        assert rank["read"] <= size
        assert rank["error"].count("its checksum is not that") == 1, "though both need the bytes"
        assert not rank["changed"]
        assert rank["chosen"] == ("step-00000000", 0)
