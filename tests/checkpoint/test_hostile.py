"""A checkpoint from a stranger: reading it runs nothing and reaches nothing outside."""

import io
import os
import pickle
import random
import shutil
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from lockstep import checkpoint
from lockstep.checkpoint import DamagedError, commands
from lockstep.checkpoint.manifest import Manifest, ParameterInfo, read_manifest, read_state
from lockstep.checkpoint.metadata import parse_metadata
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.storage import FileInfo
from lockstep.errors import LockstepError, RunError
from tests.checkpoint.shared import blank, save, snapshot


def reseal(path: Path, **changes: Any) -> None:
    """Write a manifest that fits whatever is now in the folder: the attacker can compute checksums
    too.
    """
    old = read_manifest(path)
    files = {name: locate(path).checksum(name) for name in old.files}
    parameters = {**old.parameters, **changes.get("parameters", {})}
    manifest = Manifest(
        old.step, changes.get("files", files), parameters, old.parts, old.written_by, old.ranks
    )
    (path / "manifest.json").write_bytes(manifest.to_bytes())


class Touch:
    """Unpickles to a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def stored_metadata(path: Path) -> Metadata:
    metadata: Metadata = pickle.loads((path / "model" / ".metadata").read_bytes())
    return metadata


def assert_refused(path: Path, match: str) -> None:
    target = blank(snapshot())
    with pytest.raises(DamagedError, match=match):
        checkpoint.load(path, target)
    with pytest.raises(DamagedError, match=match):
        checkpoint.digest(path)


@pytest.mark.fault(
    "hostile: code in `.metadata`",
    "a pickle that runs a program",
    "nothing runs: the file is read by a parser of its own, which knows a dozen classes",
)
@pytest.mark.promise(
    "Metadata that other programs unpickle are read by a parser of Lockstep's own."
)
def test_trap_50_the_metadata_pickle_runs_nothing(tmp_path: Path) -> None:
    """`.metadata` is a pickle: torch would run whatever it names."""
    path = save(tmp_path, 1)
    witness = tmp_path / "witness"
    for function, arguments in (
        (os.system, (f"touch {witness}",)),
        (open, (str(witness), "w")),
        (exec, (f"open({str(witness)!r}, 'w')",)),
        (torch.load, (str(witness),)),
        (eval, ("1",)),
    ):
        for payload in (Touch(function, *arguments), {"x": Touch(function, *arguments)}):
            metadata = stored_metadata(path)
            metadata.planner_data = payload
            (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
            reseal(path)
            assert_refused(path, "which no metadata needs|is not a dtype")
            assert not witness.exists()
            shutil.rmtree(path)
            save(tmp_path, 1)


@pytest.mark.parametrize(
    "program",
    [
        b"ctorch\nload\n.",  # a name of torch that is not a dtype
        b"ctorch\n_C\n.",
        b"ctorch.serialization\nload\n.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.",  # a dotted path through a module
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        # sets an attribute of a class
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'evil'\nI1\nstb.",
        b"ctorch\nSize\n(N}S'evil'\nI1\nstb.",
        b"P1\n.",
        b"\x80\x05\x97.",
        b"(lp0\n0g0\n.",
        b"",
        b".",
        b"garbage",
        b"\x80\x04N.",
        pickle.dumps({}),
        pickle.dumps(Metadata({}, None, None)),
    ],
)
@pytest.mark.promise(
    "It knows a dozen plain classes and calls no function; anything else is refused."
)
def test_programs_that_are_no_metadata_are_refused(program: bytes) -> None:
    with pytest.raises(ValueError):
        parse_metadata(program)


def test_no_function_of_torch_is_called() -> None:
    """dtypes are named as attributes of torch, and so are its functions."""
    seed = torch.initial_seed()
    with pytest.raises(ValueError, match="'manual_seed' is not a dtype"):
        parse_metadata(b"ctorch\nmanual_seed\n(I77\ntR.")
    assert torch.initial_seed() == seed


@pytest.mark.parametrize(
    "path", ["../../x", "/x", "../__0_0.distcp", "__0_0.distcp/../../x", "", ".", "__0_0.distcp\n"]
)
def test_only_a_tensor_file_beside_it_is_pointed_at(tmp_path: Path, path: str) -> None:
    metadata = stored_metadata(save(tmp_path, 1))
    next(iter(metadata.storage_data.values())).relative_path = path
    with pytest.raises(ValueError, match="not one of its own tensor files"):
        parse_metadata(pickle.dumps(metadata))


@pytest.mark.fault(
    "hostile: `../` in paths",
    "metadata point at files outside",
    "refused; nothing outside is read or written",
)
@pytest.mark.promise("Names may not climb out of the folder")
def test_trap_50_paths_do_not_climb_out(tmp_path: Path) -> None:
    """`relative_path` in the metadata may name any file of the machine."""
    secret = tmp_path / "__0_0.distcp"
    shutil.copy(save(tmp_path / "other", 1) / "model" / "__0_0.distcp", secret)
    for climbing in (
        "../../__0_0.distcp",
        str(secret),
        "../__0_0.distcp",
        "__0_0.distcp/../../x",
        "__0_9.distcp",
        "",
    ):
        path = save(tmp_path, 1)
        metadata = stored_metadata(path)
        for info in metadata.storage_data.values():
            info.relative_path = climbing
        (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
        reseal(path)
        assert_refused(path, "not one of its own tensor files|does not list")
        shutil.rmtree(path)


@pytest.mark.fault(
    "hostile: a manifest that lists other files",
    "absolute paths and `../`",
    "refused",
)
def test_the_manifest_lists_no_file_outside(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("secret")
    for stray in (
        "../passwd",
        "/etc/passwd",
        "model/../../passwd",
        "model/../state.json",
        "model//.metadata",
        "passwd",
    ):
        path = save(tmp_path, 1)
        facts = read_manifest(path).files
        reseal(path, files={**facts, stray: facts["state.json"]})
        assert "no checkpoint holds" in checkpoint.verify(path)[0]
        shutil.rmtree(path)


@pytest.mark.fault(
    "hostile: symbolic links",
    "a file or a folder is a link to elsewhere",
    "not followed: refused",
)
@pytest.mark.promise("links are not followed, pipes and devices are not opened.")
def test_links_are_not_followed(tmp_path: Path) -> None:
    other = save(tmp_path / "other", 1)
    for linked in ("state.json", "model/__0_0.distcp", "model/.metadata", "manifest.json"):
        path = save(tmp_path, 1)
        (path / linked).unlink()
        (path / linked).symlink_to(other / linked)
        assert checkpoint.verify(path), linked
        with pytest.raises(DamagedError):
            checkpoint.load(path, blank(snapshot()))
        shutil.rmtree(path)
    path = save(tmp_path, 1)
    shutil.rmtree(path / "model")
    (path / "model").symlink_to(other / "model")
    assert checkpoint.verify(path)
    assert_refused(path, "damaged|can't be read")


@pytest.mark.fault(
    "hostile: a pipe in place of a file",
    "opening it would wait for ever",
    "refused at once",
)
@pytest.mark.promise("links are not followed, pipes and devices are not opened.")
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")
    assert "not an ordinary file" in checkpoint.verify(path)[0]


@pytest.mark.fault(
    "hostile: pickled items that are not tensors",
    "an object beside the tensors",
    "never unpickled: refused",
)
@pytest.mark.promise("Everything that is not a tensor is JSON.")
def test_stored_objects_are_never_unpickled(tmp_path: Path) -> None:
    """DCP loads what is not a tensor with a full unpickler."""
    path = save(tmp_path, 1)
    metadata = stored_metadata(path)
    metadata.state_dict_metadata["count"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("count")] = _StorageInfo("__0_0.distcp", 0, 10)
    (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    assert_refused(path, "only tensors are stored")


@pytest.mark.fault(
    "hostile: code in a tensor file",
    "a pickle where a tensor should be",
    "read with `weights_only`: nothing runs",
)
@pytest.mark.promise("Tensors are read with `weights_only`.")
def test_a_tensor_file_is_read_as_weights_only(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    witness = tmp_path / "witness"
    program = io.BytesIO()
    torch.save(Touch(os.system, f"touch {witness}"), program)
    metadata = stored_metadata(path)
    info = next(
        place for index, place in metadata.storage_data.items() if index.fqn == "blocks.0.weight"
    )
    with (path / "model" / info.relative_path).open("ab") as end:
        info.offset = end.tell()
        info.length = len(program.getvalue())
        end.write(program.getvalue())
    (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    with pytest.raises(RunError, match=r"(?i)weights"):
        checkpoint.load(path, blank(snapshot()))
    assert not witness.exists()


@pytest.mark.fault(
    "hostile: blocks that leave a hole",
    "memory would be loaded that nobody wrote",
    "refused",
)
def test_blocks_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    """What nobody wrote would come back as whatever lay in memory."""
    path = save(tmp_path, 1)
    metadata = stored_metadata(path)
    stored = metadata.state_dict_metadata["blocks.0.weight"]
    stored.chunks[0].sizes = torch.Size([9, 6])  # type: ignore[union-attr]
    (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    assert_refused(path, "54 of its 60 elements")


@pytest.mark.fault(
    "hostile: sizes that no memory could hold",
    "metadata and manifest claim a tensor of terabytes, or the same bytes for many tensors; a block"
    " unpacks to a thousand times its bytes",
    "refused with one message before anything is allocated: nothing is larger than the bytes stored"
    " for it",
)
def test_claims_of_sizes_allocate_nothing(tmp_path: Path) -> None:
    """What looks into a checkpoint without a model to compare it with believes the sizes that it
    finds.
    """
    name = "blocks.0.weight"
    # 4 TiB; so many that their product overflows to 0
    for sizes in ([1 << 20, 1 << 20], [1 << 33, 1 << 33]):
        path = save(tmp_path, 1)
        metadata = stored_metadata(path)
        stored = metadata.state_dict_metadata[name]
        stored.size = stored.chunks[0].sizes = torch.Size(sizes)  # type: ignore[union-attr]
        del stored.chunks[1:]  # type: ignore[union-attr]
        (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
        reseal(path, parameters={name: ParameterInfo(tuple(sizes), "float32")})
        assert_refused(path, "it claims .* bytes for a block of blocks.0.weight|elements")
        for verb, options in (
            ("export", {}),
            ("convert", {"to": "full"}),
            ("convert", {"to": "torch"}),
        ):
            with pytest.raises(DamagedError, match=r"it claims|elements"):
                commands.run(verb, path, output=tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(path)
    path = save(tmp_path, 1)
    metadata = stored_metadata(path)
    for info in metadata.storage_data.values():
        info.offset = 0
        info.length = (path / "model" / info.relative_path).stat().st_size
    (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    assert_refused(path, "it claims more bytes than the")


def test_a_block_that_unpacks_to_a_thousand_times_its_bytes_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    metadata = stored_metadata(path)
    index = next(i for i in metadata.storage_data if i.fqn == "blocks.0.weight")
    plain = io.BytesIO()
    bomb = io.BytesIO()
    torch.save(torch.zeros(64 << 20, dtype=torch.uint8), plain)
    with (
        zipfile.ZipFile(plain) as entries,
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in entries.namelist():
            packed.writestr(entry, entries.read(entry))
    assert len(bomb.getvalue()) < 1 << 20
    file = path / "model" / metadata.storage_data[index].relative_path
    info = metadata.storage_data[index]
    info.offset = file.stat().st_size
    info.length = len(bomb.getvalue())
    with file.open("ab") as end:
        end.write(bomb.getvalue())
    (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    assert_refused(path, "a block is compressed")


def test_metadata_that_disagrees_with_the_manifest_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    metadata = stored_metadata(path)
    metadata.state_dict_metadata["other"] = metadata.state_dict_metadata.pop("norm")
    index = next(i for i in metadata.storage_data if i.fqn == "norm")
    metadata.storage_data[MetadataIndex("other", index.offset)] = metadata.storage_data.pop(index)
    (path / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    assert_refused(path, "disagrees with the manifest about")


def rewritten(path: Path, change: Callable[[str], str]) -> None:
    """Change the text of the manifest, and its checksum with it."""
    text = "\n".join((path / "manifest.json").read_text().splitlines()[:-1]) + "\n"
    body = change(text).encode()
    (path / "manifest.json").write_bytes(body + f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode())


@pytest.mark.fault(
    "hostile: a manifest of numbers that are none, of great depth, or of a billion ranks",
    "`Infinity` for a step, brackets in brackets, sizes beyond all files, ranks that nothing is"
    " listed of",
    "refused with one message, at once and in little memory, by every command",
)
def test_a_manifest_with_impossible_numbers_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    whole = (path / "manifest.json").read_bytes()
    step = '"step": 3,'
    parts = '"parts":'
    for old, new, said in (
        (step, '"step": Infinity,', "Infinity, which is not a number"),
        (step, '"step": 1e999,', "where a count is needed"),
        (step, '"step": -3,', "where a count is needed"),
        (step, '"step": true,', "where a count is needed"),
        (step, f'"step": {10**30},', "where a count is needed"),
        (step, f'"step": {"9" * 5000},', "integer string conversion"),
        (step, step + ' "ranks": 1000000000,', "is of 1000000000 ranks, and lists"),
        (step, step + ' "ranks": Infinity,', "Infinity, which is not a number"),
        (step, step + ' "ranks": 4,', "does not list model/rank-00000.raw"),
        (step, step + ' "x": ' + "[" * 100_000 + "]" * 100_000 + ",", "nested too deeply"),
        ('"shape": [10, 6]', '"shape": [1099511627776, 6]', "it claims"),
        ('"shape": [10, 6]', '"shape": [9223372036854775807, 9223372036854775807]', "it claims"),
        ('"shape": [10, 6]', '"shape": "10"', "where counts are needed"),
        ('"size": ', '"size": -', "where a count is needed"),
        (parts, '"parts": [["model"]], "old":', "where a text is needed"),
        (parts, '"parts": ["optimizer/main"], "old":', "no part for the model"),
        ('"written_by": ', '"written_by": 3, "old": ', "no attribute"),
    ):
        rewritten(path, lambda text, old=old, new=new: text.replace(old, new, 1))  # type: ignore[misc]
        (problem,) = checkpoint.verify(path)
        assert said in problem, (new[:60], problem)
        for verb in ("inspect", "verify", "digest", "export"):
            with pytest.raises(DamagedError):
                commands.run(verb, path)
        (path / "manifest.json").write_bytes(whole)
    assert checkpoint.verify(path) == []


def test_a_manifest_of_forty_gigabytes_is_not_read(tmp_path: Path) -> None:
    """The file has a hole for most of its bytes: nobody had to send them."""
    path = save(tmp_path, 1)
    os.truncate(path / "manifest.json", 40 << 30)
    assert "has more than 256 MiB" in checkpoint.verify(path)[0]
    os.truncate(path / "state.json", 40 << 30)
    with pytest.raises(DamagedError, match="more than 256 MiB"):
        read_state(path)


def test_what_describes_a_checkpoint_is_read_by_verify(tmp_path: Path) -> None:
    """Checksums that fit are not enough: a checkpoint that is called whole can be loaded."""
    for name, text, said in (
        ("state.json", b"[1]", "where an object is needed"),
        ("state.json", b"[" * 100_000, "nested too deeply"),
        ("model/.metadata", b"garbage", "model/.metadata"),
    ):
        path = save(tmp_path, 1)
        (path / name).write_bytes(text)
        reseal(path)
        assert checkpoint.verify(path) == []
        with pytest.raises(DamagedError, match=said):
            commands.run("verify", path)
        shutil.rmtree(path)


def test_a_part_whose_file_is_shorter_than_listed_is_not_allocated(tmp_path: Path) -> None:
    """`optimizer_targets` makes tensors before checksums are compared."""
    path = save(tmp_path, 1)
    facts = read_manifest(path).files
    name = "optimizer/main/__0_0.distcp"
    reseal(path, files={**facts, name: FileInfo(40 << 30, facts[name].crc32)})
    with pytest.raises(DamagedError, match=f"where {40 << 30} were written"):
        checkpoint.optimizer_targets(path, "main", {})


@pytest.mark.fault(
    "hostile: any bytes of a checkpoint are altered under right checksums",
    "bits flipped, bytes taken out or put in, in the metadata, the tensors or the state, and the"
    " manifest made to fit",
    "loaded, or refused with one message: no traceback, by no command",
)
def test_altered_bytes_under_right_checksums_are_one_message(tmp_path: Path) -> None:
    good = save(tmp_path / "good", 1)
    noise = random.Random(0)
    files = [path.relative_to(good).as_posix() for path in good.rglob("*") if path.is_file()]
    files = [name for name in files if name != "manifest.json"]
    path = tmp_path / "bad" / good.name
    outcomes: Counter[str] = Counter()
    for number in range(60):
        shutil.copytree(good, path)
        altered = path / files[number % len(files)]
        data = bytearray(altered.read_bytes())
        at = noise.randrange(len(data))
        kind = noise.choice(("flip", "cut", "insert"))
        if kind == "flip":
            data[at] ^= 1 << noise.randrange(8)
        elif kind == "cut":
            del data[at : at + noise.randrange(1, 9)]
        else:
            data[at:at] = noise.randbytes(noise.randrange(1, 9))
        altered.write_bytes(data)
        reseal(path)
        for use in (
            lambda: checkpoint.digest(path),
            lambda: checkpoint.load(path, blank(snapshot())),
        ):
            try:
                use()
                outcomes["read"] += 1
            except LockstepError:
                outcomes["refused"] += 1
        shutil.rmtree(path)
    assert min(outcomes["read"], outcomes["refused"]) > 10
