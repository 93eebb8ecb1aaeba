"""A storage of one's own: chosen by name, used by the trainer, looked at by the commands."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import Location, Storage, build_storage
from lockstep.checkpoint.commands import run
from lockstep.config import ObjectSpec
from lockstep.errors import RunError, UsageError
from tests.checkpoint import places
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.places import Place
from tests.checkpoint.shared import CONFIG, assert_same, blank, snapshot
from tests.faults.tiny import Points, events, trainer


@pytest.fixture
def memory() -> Iterator[MemoryStorage]:
    places.Elsewhere(places.MEMORY)  # emptied
    yield MemoryStorage()
    places.Elsewhere(places.MEMORY)  # emptied


def test_everything_comes_back(place: Place) -> None:
    path = place.save(100)
    after = blank(snapshot())
    state = checkpoint.load(path, after)
    assert_same(snapshot(), after)
    assert state["loss"] == 0.1
    assert checkpoint.config_text(path) == CONFIG
    assert checkpoint.read_manifest(path).step == 100
    assert checkpoint.digest(path) == checkpoint.digest_tensors(
        sorted((name, tensor) for name, tensor in snapshot().model.items() if name != "tied.weight")
    )
    assert checkpoint.weights(path).keys() == snapshot().model.keys()


def test_an_existing_checkpoint_is_never_overwritten(place: Place) -> None:
    digest = checkpoint.digest(place.save(7))
    with pytest.raises(UsageError, match="never overwritten"):
        place.save(7, shift=1.0)
    assert checkpoint.digest(place.storage.path("step-00000007")) == digest


def test_a_second_writer_of_a_step_does_not_change_the_first_ones(place: Place) -> None:
    """Two writers that do not know of each other begin the same step: one of them is refused."""
    first = place.storage
    second = place.storage
    draft = first.begin("step-00000001")
    place.save(1)
    with pytest.raises(OSError):  # noqa: PT012
        with second.write(draft, "state.json") as stream:
            stream.write(b"{}")
        second.commit(draft, "step-00000001", b"another")
    assert checkpoint.verify(place.storage.path("step-00000001")) == []


def test_a_damaged_one_in_the_way_is_kept_aside(place: Place) -> None:
    damaged = place.save(7)
    place.damage(damaged, "state.json", b"{}")
    path = place.save(7, shift=1.0)
    assert checkpoint.verify(path) == []
    assert place.names() == ["step-00000007"]
    (aside,) = (name for name in place.storage.names() if name.startswith("step-00000007.aside-"))
    assert place.content(place.storage.path(aside), "state.json") == b"{}"


def test_a_run_keeps_its_checkpoints_where_its_config_says(
    tmp_path: Path, memory: MemoryStorage
) -> None:
    keep = {"storage": places.MEMORY, "save_steps": 2, "save_total_limit": 2, "keep_best": "loss"}
    trainer(tmp_path, checkpoint=keep).train(Points())
    found = checkpoint.list_checkpoints(memory)
    assert found[-1] == Location(memory, "step-00000012")
    assert 2 <= len(found) <= 3
    assert not (tmp_path / "checkpoints").exists()
    assert [event["checkpoint"] for event in events(tmp_path, "save")][-1] == "step-00000012"
    again = trainer(tmp_path, checkpoint=keep)
    assert again.resume("auto").name == "step-00000012"  # type: ignore[union-attr]
    assert again.step.progress.step == 12
    afresh = trainer(tmp_path, checkpoint=keep)
    assert afresh.resume(found[-2].name).name == found[-2].name  # type: ignore[union-attr]
    assert checkpoint.newest(memory) == found[-2], "the later one is set aside"
    text = run("list", places.MEMORY)
    assert found[-2].name in text
    assert run("verify", places.MEMORY).count(": whole") == len(found) - 1
    assert run("digest", places.MEMORY) == checkpoint.digest(found[-2])
    run("export", places.MEMORY, output=tmp_path / "model.safetensors")
    run("convert", places.MEMORY, output=tmp_path / "whole")
    assert checkpoint.digest(tmp_path / "whole") == checkpoint.digest(found[-2])


def test_what_a_storage_refuses_is_the_reason_of_the_save(tmp_path: Path) -> None:
    class Refusing(MemoryStorage):
        def commit(self, draft: str, name: str, manifest: bytes) -> None:
            raise ConnectionError("the bucket is gone")

    with pytest.raises(RunError, match="the bucket is gone"):
        checkpoint.save(Refusing({}), 1, snapshot(), config_yaml=CONFIG)


def test_a_commit_that_succeeded_unheard_is_found_on_the_next_try(tmp_path: Path) -> None:
    """Trap 82: a request that was retried may have succeeded the first time."""
    store = MemoryStorage({})
    draft = store.begin("step-00000001")
    store.commit(draft, "step-00000001", b"manifest")
    store.commit(draft, "step-00000001", b"manifest")
    with pytest.raises(FileExistsError):
        store.commit(draft, "step-00000001", b"another")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.checkpoint.shared:known_model", "made a dict, which is not a storage"),
        ("tests.checkpoint.nothing:Storage", "there is no module 'tests.checkpoint.nothing'"),
        ("tests.checkpoint.memory_storage:Memory", "has no Memory"),
    ],
)
def test_what_is_no_storage_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_storage(ObjectSpec(name=name))
    with pytest.raises(UsageError, match=said):
        trainer(tmp_path, checkpoint={"storage": name})


def test_an_unfinished_storage_can_not_be_made() -> None:
    class Half(Storage):
        def names(self) -> list[str]:
            return []

    with pytest.raises(TypeError, match="commit"):
        Half()  # type: ignore[abstract]


def test_reading_begins_anywhere_in_a_file(place: Place) -> None:
    path = place.save(1)
    whole = place.content(path, "state.json")
    with place.storage.open("step-00000001", "state.json") as stream:
        stream.seek(5)
        assert stream.read(7) == whole[5:12]
        assert stream.seek(0, io.SEEK_END) == len(whole)
