"""Adapters of peft in the layers of a model that a config names."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import Config
from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.models import build_model, check_model
from lockstep.models.protocol import require_segments
from lockstep.trainer import build
from tests.models.test_hf_auto import config_of, library
from tests.parity.adapted import LORA, write_base
from tests.parity.toy import Tokens

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_base(tmp_path_factory.mktemp("base"))


def adapted(base: str, **model: Any) -> Any:
    return build(config_of(base, **{"lora": LORA, **model}), Data(None))


def test_only_adapters_are_trained_and_change_nothing_at_first(base: str) -> None:
    plain = build_model(config_of(base).model)
    model = adapted(base)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 3
    assert all("lora_" in name for name in trained)
    ids = Tokens()[0]["input_ids"][None]
    assert torch.equal(model(ids), plain(ids))
    assert [name for name, _ in require_segments(model)] == [
        name for name, _ in require_segments(plain)
    ]


def test_first_values_follow_from_the_seed(base: str) -> None:
    one = adapted(base)
    same = adapted(base)
    other = build(config_of(base, lora=LORA).replaced({"training.seed": 7}), Data(None))
    name = "model.layers.0.mlp.down_proj.lora_A.default.weight"
    assert torch.equal(one.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))


def test_a_model_of_a_type_gets_its_values_and_adapters_at_once() -> None:
    """Its class can be filled on meta, where adapters would take the values of the layers."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    model = adapted("hf:llama", args={**sizes, "intermediate_size": 24})
    assert not any(p.is_meta for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert bool(parameter.any()) == ("lora_B" not in name), name


def test_a_new_head_is_trained_in_full(base: str) -> None:
    """peft does so of these tasks when it loads an adapter; of others it has to be said."""
    with pytest.warns(UserWarning, match="no score: drawn"):
        model = adapted(base, auto="AutoModelForSequenceClassification")
    assert model.score.modules_to_save.default.weight.requires_grad
    assert not model.score.original_module.weight.requires_grad


def test_a_new_head_that_would_stay_frozen_is_refused(tmp_path: Path) -> None:
    theirs, _ = library("AutoModelForMaskedLM")
    theirs.save_pretrained(tmp_path)
    head = {"auto": "AutoModelForMultipleChoice", "lora": {"target_modules": ["query"]}}
    says = r"classifier\.(.|\n)*would stay as drawn at random(.|\n)*modules_to_save: .*classifier"
    with pytest.raises(UsageError, match=says):
        adapted(f"hf:{tmp_path}", **head)
    head["lora"] = {"target_modules": ["query"], "modules_to_save": ["classifier", "pooler"]}
    with pytest.warns(UserWarning, match="classifier"):
        assert adapted(f"hf:{tmp_path}", **head)


def test_a_missing_package_is_named(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="adapters need the package peft"):
        check_model(config_of(base, lora=LORA).model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_modules": ["nothing"]}, r"can't put these adapters into a(.|\n)*nothing"),
        ({"target_modules": "(", "layers_to_transform": 1}, "peft refuses the adapters"),
        ({"target_modules": ["q_proj", "v_prj"]}, r"'v_prj', and no layer(.|\n)*did you mean"),
        ({"exclude_modules": ["o_prj"]}, r"exclude_modules names 'o_prj', and no layer has"),
        ({"modules_to_save": ["heads"]}, r"modules_to_save names 'heads', and no layer has"),
        ({"rank_pattern": {"o_proj": 2}}, r"rank_pattern names 'o_proj', and no layer with ad"),
        ({"alpha_pattern": {"layers.9.q_proj": 2}}, r"alpha_pattern names 'layers.9.q_proj'"),
        ({"rank_pattern": {"(": 2}}, r"can't put these adapters into a"),
    ],
)
def test_what_peft_refuses_is_one_error(base: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        adapted(base, lora={**LORA, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.lora.rank": 4}, "unknown key model.lora.rank"),
        ({"model.lora.r": 0}, r"model\.lora\.r"),
        ({"model.lora.init_lora_weights": "pissa"}, r"model\.lora\.init_lora_weights"),
        ({"distributed.tensor_size": 2}, "layers with adapters can't be cut over ranks"),
        ({"distributed.strategy": "tensor"}, "layers with adapters can't be cut over ranks"),
    ],
)
def test_a_config_that_can_not_be_followed_is_refused_when_it_is_loaded(
    base: str, changes: dict[str, Any], says: str
) -> None:
    config: Config = config_of(base, lora=LORA)
    check_model(config.model)
    with pytest.raises(UsageError, match=says):
        config.replaced(changes)


def test_adapters_of_stacked_experts_are_refused(tmp_path: Path) -> None:
    name = write_base(tmp_path, "qwen3_moe")
    with pytest.raises(
        UsageError, match=r"adapters of stacked experts are not supported: .*experts"
    ):
        adapted(name)
    assert adapted(name, lora={"target_modules": ["q_proj"]})
