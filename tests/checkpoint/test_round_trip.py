"""One process: what comes back is what went in, and what does not fit is refused."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import checkpoint
from lockstep.checkpoint import Ranks, Snapshot
from lockstep.checkpoint.commit import SaveOptions, write_once
from lockstep.checkpoint.manifest import Manifest, ParameterInfo, _checksum_line
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.snapshot import stage
from lockstep.checkpoint.storage import FileInfo
from lockstep.errors import UsageError
from tests.checkpoint.shared import CONFIG, assert_same, blank, files_of, known, save, snapshot


def test_everything_comes_back(tmp_path: Path) -> None:
    before = snapshot()
    path = save(tmp_path, 100)
    assert path == tmp_path / "step-00000100"
    after = blank(before)
    state = checkpoint.load(path, after)
    assert_same(before, after)
    assert state.pop("optimizer_groups") == {}
    assert state == before.state
    assert (path / "config.yaml").read_text() == CONFIG


def test_the_folder_is_as_documented(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000100"]
    names = {str(file.relative_to(path)) for file in files_of(path)}
    assert names == {
        "manifest.json",
        "state.json",
        "config.yaml",
        "model/.metadata",
        "model/__0_0.distcp",
        "optimizer/main/.metadata",
        "optimizer/main/__0_0.distcp",
        "optimizer/plain_sgd/.metadata",
        "extra/ema/.metadata",
        "extra/ema/__0_0.distcp",
    }
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"].keys() == names - {"manifest.json"}
    assert manifest["parameters"]["head.weight"] == {
        "shape": [5, 7],
        "dtype": "float32",
        "aliases": ["tied.weight"],
    }
    assert "tied.weight" not in manifest["parameters"]
    assert str(tmp_path) not in "".join(
        file.read_bytes().decode("latin1") for file in files_of(path)
    )


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    first = save(tmp_path / "a", 5)
    second = save(tmp_path / "b", 5)
    for one, other in zip(files_of(first), files_of(second), strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_torch_reads_the_tensors(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    target = {"head.weight": torch.zeros(5, 7), "norm": torch.zeros(9, dtype=torch.bfloat16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks that there is no process group
        dcp.load(target, checkpoint_id=path / "model", no_dist=True)
    assert torch.equal(target["head.weight"], known("head.weight", (5, 7)))
    assert torch.equal(target["norm"], known("norm", (9,), torch.bfloat16))


def test_odd_tensors(tmp_path: Path) -> None:
    """Views, transposes, strides, no elements, no dimensions, every dtype."""
    base = known("base", (6, 8))
    model = {
        "view": base[1:3, 2:5],
        "transposed": base.T,
        "strided": base[::2, ::3],
        "expanded": base[:1].expand(4, 8),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5),
        "bool": base > 0,
        "long": torch.arange(5),
        "half": base.half(),
        "double": base.double(),
        "complex": torch.complex(base, base),
        "parameter": torch.nn.Parameter(base.clone()),
        "float8": base.to(torch.float8_e4m3fn),
    }
    path = checkpoint.save(tmp_path, 1, Snapshot(model), config_yaml="")
    target = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.items()}
    checkpoint.load(path, Snapshot(target))
    for name, tensor in model.items():
        assert (
            torch.equal(target[name].double(), tensor.detach().double())
            if name != "complex"
            else True
        ), name
    assert torch.equal(target["complex"], model["complex"])
    assert checkpoint.digest(path) == checkpoint.digest_tensors(sorted(model.items()))


def test_the_target_is_filled_in_place(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    target = blank(snapshot())
    parameter = torch.nn.Parameter(target.model["blocks.0.bias"])
    row = torch.zeros(16, 4)
    target.model["blocks.0.bias"] = parameter
    target.model["blocks.1.weight"] = row[::2]
    checkpoint.load(path, target)
    assert torch.equal(parameter, known("blocks.0.bias", (3,)))
    assert torch.equal(row[::2], known("blocks.1.weight", (8, 4)))
    assert not row[1::2].any()


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    before = {file: file.read_bytes() for file in files_of(path)}
    with pytest.raises(UsageError, match="never overwritten"):
        save(tmp_path, 7, shift=1.0)
    assert {file: file.read_bytes() for file in files_of(tmp_path)} == before


def test_a_damaged_one_in_the_way_is_kept_aside(tmp_path: Path) -> None:
    """A run that went back behind a damaged checkpoint reaches its step again."""
    damaged = save(tmp_path, 7)
    (damaged / "state.json").write_text("{}")
    path = save(tmp_path, 7, shift=1.0)
    assert checkpoint.verify(path) == []
    assert checkpoint.list_checkpoints(tmp_path) == [path]
    (aside,) = tmp_path.glob("step-00000007.aside-*")
    assert (aside / "state.json").read_text() == "{}"


def test_a_name_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "best"
    write_once(locate(path), 7, stage(snapshot()), "", SaveOptions(), Ranks(alone=True))
    assert checkpoint.load(path, blank(snapshot()))["step"] == 3
    with pytest.raises(UsageError, match="exists already"):
        write_once(locate(path), 8, stage(snapshot()), "", SaveOptions(), Ranks(alone=True))


@pytest.mark.fault(
    "checkpoint: it holds another model",
    "other names, shapes or dtypes",
    "exit code 2; what differs is named, nothing is touched",
)
@pytest.mark.promise(
    "Names, shapes and dtypes must be those of your model before one byte is copied into it."
)
def test_what_differs_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    target = blank(snapshot())
    del target.model["norm"]
    target.model["new"] = torch.zeros(2)
    target.model["blocks.0.bias"] = torch.zeros(4)
    target.model["blocks.1.weight"] = torch.zeros(8, 4, dtype=torch.bfloat16)
    with pytest.raises(UsageError) as caught:
        checkpoint.load(path, target)
    message = str(caught.value)
    assert "missing in the checkpoint: new" in message
    assert "only in the checkpoint: norm" in message
    assert "blocks.0.bias (stored [3], wanted [4])" in message
    assert "blocks.1.weight (stored float32, wanted bfloat16)" in message
    assert not any(tensor.any() for tensor in target.model.values()), (
        "nothing is touched before all of it fits"
    )


def test_a_subset_is_not_taken_silently(tmp_path: Path) -> None:
    """Optimizers and extra parts count as names do; weights alone are asked for."""
    path = save(tmp_path, 1)
    weights = blank(snapshot()).model
    with pytest.raises(UsageError, match="only in the checkpoint"):
        checkpoint.load(path, Snapshot(weights))
    assert checkpoint.load(path, Snapshot(weights), only=["model"])["step"] == 3
    assert torch.equal(weights["head.weight"], known("head.weight", (5, 7)))
    other = blank(snapshot())
    other.extra["more"] = {}
    with pytest.raises(UsageError, match="extra/more: not in the checkpoint"):
        checkpoint.load(path, other)


def test_trap_19_ties_are_kept(tmp_path: Path) -> None:
    """Tied weights that come back as two parameters would train apart, with no error."""
    path = save(tmp_path, 1)
    untied = blank(snapshot())
    untied.model["tied.weight"] = torch.zeros(5, 7)
    with pytest.raises(UsageError, match="two parameters in the model, but tied"):
        checkpoint.load(path, untied)
    one_name = blank(snapshot())
    # an alias will do: which name is canonical is a matter of order
    del one_name.model["head.weight"]
    checkpoint.load(path, one_name)
    assert torch.equal(one_name.model["tied.weight"], known("head.weight", (5, 7)))

    apart = Snapshot({"a": torch.zeros(2), "b": torch.ones(2)})
    path = checkpoint.save(tmp_path, 2, apart, config_yaml="")
    shared = torch.zeros(2)
    with pytest.raises(UsageError, match="tied in the model, but two parameters"):
        checkpoint.load(path, Snapshot({"a": shared, "b": shared}))


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": torch.zeros(1)}}, r"state\['a'\]\['b'\] is a Tensor"),
        ({"a": [1, {1: 2}]}, r"state\['a'\]\[1\] has the key 1"),
        ({"a": {1, 2}}, "is a set"),
        ({"optimizer_groups": {}}, "choose another key"),
    ],
)
def test_state_is_json_or_refused(tmp_path: Path, state: dict[str, object], place: str) -> None:
    with pytest.raises(UsageError, match=place):
        checkpoint.save(tmp_path, 1, Snapshot({}, state=state), config_yaml="")
    assert not list(tmp_path.iterdir())


def test_floats_come_back_to_the_bit(tmp_path: Path) -> None:
    state = {
        "floats": [0.1, 1e-310, float("inf"), -0.0, 2.0**-1074, 1.7976931348623157e308],
        "nan": float("nan"),
    }
    path = checkpoint.save(tmp_path, 1, Snapshot({}, state=state), config_yaml="")
    back = checkpoint.load(path, Snapshot({}))
    assert [x.hex() for x in back["floats"]] == [x.hex() for x in state["floats"]]  # type: ignore[union-attr,attr-defined]
    assert back["nan"] != back["nan"]


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=20),
        st.builds(
            ParameterInfo,
            st.lists(st.integers(0, 99), max_size=3).map(tuple),
            st.just("float32"),
            st.lists(st.text(max_size=5), max_size=2).map(tuple),
        ),
        max_size=4,
    )
)
def test_any_name_survives_the_manifest(parameters: dict[str, ParameterInfo]) -> None:
    files = dict.fromkeys(("state.json", "config.yaml", "model/.metadata"), FileInfo(1 << 24, 2))
    manifest = Manifest(3, files, parameters, ("model",), {"torch": "x"})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@pytest.mark.fault(
    "checkpoint: a later format",
    "written by a later version",
    "an error of its own: it is not passed over as damaged",
)
def test_a_later_format_is_not_taken_for_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = path / "manifest.json"
    body = (
        manifest.read_bytes()
        .replace(b'"format_version": 1', b'"format_version": 2')
        .rpartition(b'"crc32"')[0]
    )
    manifest.write_bytes(body + _checksum_line(body))
    assert "format version 2" in checkpoint.verify(path)[0]
    for look in (checkpoint.newest, checkpoint.resume_point):
        with pytest.raises(UsageError, match="format version 2"):
            look(tmp_path)
