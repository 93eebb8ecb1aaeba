"""Models of the hub, from a cache that the test makes. Nothing is fetched."""

from pathlib import Path

import pytest

from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.models import check_model, hf_hub
from lockstep.trainer import build
from tests.models.test_hf_auto import config_of
from tests.parity.adapted import write_base

constants = pytest.importorskip("huggingface_hub").constants


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache in which a model `somebody/tiny` has its files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--somebody--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("abc")
    return model / "snapshots/abc"


def test_a_model_of_the_hub_is_taken_from_its_cache(cache: Path) -> None:
    write_base(cache)
    config = config_of("hf:somebody/tiny")
    check_model(config.model)
    assert type(build(config, Data(None))).__name__ == "LlamaForCausalLM"


def test_one_that_is_not_there_is_one_error(cache: Path) -> None:
    """Nor is a cache with a config alone a model: its weights would be drawn at random."""
    cache.mkdir(parents=True)
    (cache / "config.json").write_text('{"model_type": "llama"}')
    no_weights = "has no weights in safetensors, neither in the hub's cache nor on the hub"
    with pytest.raises(UsageError, match=no_weights):
        check_model(config_of("hf:somebody/tiny").model)
    with pytest.raises(UsageError, match="is neither a folder here nor a model that the hub gives"):
        check_model(config_of("hf:somebody/other").model)


def test_a_model_without_safetensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(UsageError, match="somebody/tiny has no weights in safetensors"):
        hf_hub.local_copy("somebody/tiny")


def test_a_path_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/mine").mkdir(parents=True)
    assert not hf_hub.is_name("models/mine")
    assert hf_hub.is_name("models/another")
    assert not any(map(hf_hub.is_name, ("llama", "./models/another", "a/b/c")))
