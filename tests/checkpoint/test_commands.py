"""`lockstep checkpoint …`: what the commands say, and the files that they write."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lockstep import checkpoint
from lockstep.checkpoint import Snapshot
from lockstep.checkpoint.commands import run
from lockstep.errors import LockstepError, UsageError
from tests.checkpoint import memory_storage
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.shared import assert_same, blank, flip, save, snapshot


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path / "checkpoints", step, shift=float(step))
    return tmp_path


def test_a_path_may_be_a_run_a_folder_or_a_checkpoint(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = run_directory / "checkpoints" / "step-00000002"
    lines = {run("digest", path) for path in (run_directory, run_directory / "checkpoints", newest)}
    assert lines == {checkpoint.digest(newest)}
    assert run("digest", newest.with_name("step-00000001")) not in lines
    monkeypatch.chdir(newest)
    assert {run("digest", ".")} == lines


def test_list(run_directory: Path) -> None:
    (run_directory / "checkpoints" / "step-00000001" / "state.json").unlink()
    _, first, second = run("list", run_directory).splitlines()
    assert first.startswith("step-00000001")
    assert "damaged: state.json: missing" in first
    assert "kB" in second


def test_inspect(run_directory: Path) -> None:
    text = run("inspect", run_directory)
    assert "step-00000002: step 2" in text
    assert "optimizer/main" in text
    assert "head.weight" in text
    assert "tied: tied.weight" in text
    assert '"skipped": [1, 2]' in text
    assert f"{60 + 3 + 32 + 35 + 9 + 1} elements" in text


def test_verify(run_directory: Path) -> None:
    assert run("verify", run_directory).count(": whole") == 2
    flip(run_directory / "checkpoints" / "step-00000001" / "model" / "__0_0.distcp", 700)
    with pytest.raises(LockstepError, match="1 of 2 checkpoints damaged") as caught:
        run("verify", run_directory)
    assert "step-00000001: model/__0_0.distcp: its checksum" in str(caught.value)
    assert caught.value.exit_code == 1
    assert "whole" in run("verify", run_directory / "checkpoints" / "step-00000002")


def test_export_is_safetensors(run_directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    run("export", run_directory, output=output)
    loaded = load_file(output)
    expected = snapshot(2.0).model
    assert loaded.keys() == expected.keys() - {"tied.weight"}
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    with safe_open(output, "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "step": "2",
            "aliases": '{"head.weight": ["tied.weight"]}',
        }
    with pytest.raises(UsageError, match="exists already"):
        run("export", run_directory, output=output)
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_damaged_weights_are_not_exported(run_directory: Path, tmp_path: Path) -> None:
    flip(run_directory / "checkpoints" / "step-00000002" / "model" / "__0_0.distcp", 700)
    for verb, options in (("export", {}), ("convert", {"to": "torch"}), ("convert", {})):
        with pytest.raises(LockstepError, match="damaged"):
            run(verb, run_directory, output=tmp_path / "out", **options)
    with pytest.raises(LockstepError, match="damaged"):
        run("digest", run_directory)
    assert not (tmp_path / "out").exists()


def test_convert_to_full_is_the_same_checkpoint(run_directory: Path, tmp_path: Path) -> None:
    run("convert", run_directory, to="full", output=tmp_path / "whole")
    target = blank(snapshot())
    state = checkpoint.load(tmp_path / "whole", target)
    assert_same(snapshot(2.0), target)
    assert state["step"] == 3
    assert checkpoint.digest(tmp_path / "whole") == run("digest", run_directory)
    assert checkpoint.read_manifest(tmp_path / "whole").parameters["head.weight"].aliases == (
        "tied.weight",
    )


def test_convert_to_torch(run_directory: Path, tmp_path: Path) -> None:
    run("convert", run_directory, to="torch", output=tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["step"] == 2
    assert_same(Snapshot(loaded["model"]), Snapshot(dict(sorted(snapshot(2.0).model.items()))))
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["tied.weight"].data_ptr()


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("show", {}, "there is no `lockstep checkpoint show`"),
        ("digest", {"output": "x"}, "takes no output"),
        ("convert", {"to": "onnx"}, "no format 'onnx'"),
        (
            "convert",
            {"to": "local"},
            "no format 'local'(.|\\n)*--resume .* checkpoint.format=local",
        ),
        ("convert", {"to": "sharded"}, "no format 'sharded'(.|\\n)*ranks write it"),
    ],
)
def test_mistakes_are_told(
    run_directory: Path, verb: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(verb, run_directory, **options)


def test_a_path_without_checkpoints_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint in"):
        run("digest", tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        run("list", tmp_path / "none")


def test_a_config_that_names_a_storage_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its arguments; the run directory itself, maybe a stranger's, imports nothing."""
    bucket: dict[str, bytes] = {}
    made = MemoryStorage(bucket)
    monkeypatch.setattr(memory_storage, "BUCKET", bucket)
    save(made, 3)
    storage = "{name: 'tests.checkpoint.memory_storage:MemoryStorage', args: {bucket: null}}"
    config = tmp_path / "config.yaml"
    config.write_text(f"checkpoint: {{storage: {storage}}}\n")
    assert run("verify", config) == "memory/step-00000003: whole"
    monkeypatch.setitem(sys.modules, "tests.checkpoint.memory_storage", None)
    with pytest.raises(UsageError) as error:
        run("verify", tmp_path)
    assert "its config keeps checkpoints in tests.checkpoint.memory_storage" in str(error.value)
    assert f"give {config}" in str(error.value)
    config.write_text("training: {max_steps: 3}\n")
    with pytest.raises(UsageError, match=r"names no checkpoint\.storage"):
        run("verify", config)
