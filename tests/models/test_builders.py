import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.models import build_model, get_model
from lockstep.models.batch_parts import num_samples
from lockstep.models.protocol import objective_of
from tests.models.samples import SMALL


@dataclass
class Section:
    name: str | None
    args: dict[str, Any] = field(default_factory=dict)
    auto: str | None = None
    lora: None = None
    adapter: None = None


class Plain(nn.Module):
    def __init__(self, width: int, channels: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(width, channels)


class Greedy(nn.Module):
    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.settings = settings


def not_a_module() -> int:
    return 3


HERE = __name__


def test_facts_fill_what_the_config_leaves_unset() -> None:
    facts = {"vocab_size": 50, "block_size": 64, "image_size": 32}
    model = build_model(Section("transformer", {"n_layer": 1, "n_embd": 8, "n_head": 2}), facts)
    assert model.embed.weight.shape == (50, 8)
    assert model.block_size == 64
    model = build_model(
        Section("transformer", {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 60}), facts
    )
    assert model.embed.weight.shape == (60, 8)


def test_models_are_built_on_the_default_device() -> None:
    with torch.device("meta"):
        model = build_model(Section("bdh"), {"vocab_size": 256})
    assert all(p.is_meta for p in model.parameters())


def test_a_builder_takes_a_config_or_keywords() -> None:
    from lockstep.config import Config

    config = Config.model_validate(
        {"model": {"name": "vae", "args": {"image_size": 16, "channels": 1}}}
    )
    assert get_model("vae")(config)(torch.rand(1, 1, 16, 16))["reconstruction"].shape == (
        1,
        1,
        16,
        16,
    )
    assert get_model("vae")(config, latent_dim=3).latent.mu.out_features == 3
    assert get_model("bdh")(**SMALL).head.out_features == SMALL["vocab_size"]


def test_classes_of_the_users_own() -> None:
    model = build_model(Section(f"{HERE}:Plain", {"width": 3}), {"channels": 5, "vocab_size": 9})
    assert model.layer.weight.shape == (5, 3)
    assert get_model(f"{HERE}:Greedy")(anything=1).settings == {"anything": 1}


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (
            "transfomer",
            {},
            r"no model 'transfomer'; did you mean 'transformer'\?[\s\S]*free_transformer",
        ),
        (
            "bdh",
            {"n_layers": 3},
            r"bdh takes no argument 'n_layers'; did you mean 'n_layer'\?[\s\S]*mlp_multiplier",
        ),
        (
            "free_transformer",
            {"vocab_size": 50, "hidden_dim": 64, "num_layers": 2, "num_heads": 2, "latent_dim": 8},
            r"no argument 'hidden_dim' and no 'num_layers' and no [\s\S]*"
            "write n_embd for hidden_dim; n_layer for num_layers; n_head for num_heads; latent_bits"
            " for latent_dim$",
        ),
        (
            "transformer",
            {"num_hidden_layers": 2, "what": 1},
            (
                r"model\.args\.num_hidden_layers, model\.args\.what[\s\S]*write n_layer for"
                r" num_hidden_layers; it takes"
            ),
        ),
        ("no.such.module:Model", {}, r"there is no module 'no', needed by no\.such\.module:Model"),
        (f"{HERE}:Missing", {}, r"has no Missing"),
        (f"{HERE}:HERE", {}, r"is a str, not a class"),
        (f"{HERE}:not_a_module", {}, r"made a int, not an nn.Module"),
        (f"{HERE}:Plain", {}, r"needs width"),
        (None, {}, r"no model is named"),
        ("transformer", {"n_layer": "two"}, r"n_layer should be a whole number, but is 'two'"),
        ("transformer", {"n_kv_head": 1.5}, r"n_kv_head should be a whole number, [\s\S]*leave it"),
        ("transformer", {"tie_embeddings": 1}, r"tie_embeddings should be true or false, but is 1"),
        ("mixture", {"n_embd": -1}, r"n_embd=-1: at least 1 is needed"),
    ],
)
def test_mistakes_are_named(name: str | None, args: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_model(Section(name, args), {})


def test_only_the_family_asked_for_is_imported() -> None:
    code = (
        "import sys, lockstep.models as m; assert 'torch' not in sys.modules; m.get_model('bdh'); "
        "assert 'lockstep.models.vae' not in sys.modules and 'transformers' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)


def test_a_wrapper_that_names_no_argument_gets_a_dict_by_keyword() -> None:
    """`forward(*args, **kwargs)` hands on to a model that names them; `forward(batch)` takes the
    dict itself.
    """

    class HandsOn(nn.Module):
        def forward(self, *args: object, **kwargs: object) -> object:
            return kwargs["x"]

    class Whole(nn.Module):
        def forward(self, batch: dict[str, object]) -> object:
            return batch["x"]

    assert objective_of(HandsOn()).inputs({"x": 1, "y": 2}) == ((), {"x": 1, "y": 2})
    assert objective_of(Whole()).inputs({"x": 1}) == (({"x": 1},), {})


def test_samples_are_counted_in_the_first_tensor_wherever_it_lies() -> None:
    """What is not a tensor passes through a batch, and may come first."""
    assert num_samples({"names": ["a", "b"], "x": torch.zeros(3, 2)}) == 3
    assert num_samples((["a"], {"deep": [torch.zeros(4)]})) == 4
    with pytest.raises(UsageError, match="holds no tensor"):
        num_samples({"names": ["a", "b"]})


def test_classes_come_last_in_text_and_second_in_pictures() -> None:
    """[B, T, V] against [B, T]; but [B, C, H, W] against [B, H, W], also where C, H and W are
    equal.
    """
    loss = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(0)
    objective = objective_of(nn.Linear(2, 2), loss)
    logits = torch.randn(2, 4, 4, generator=generator)
    targets = torch.randint(4, (2, 4), generator=generator)
    of_text = objective.summed(logits, (None, targets)) / objective.count((None, targets))
    torch.testing.assert_close(of_text, loss(logits.flatten(0, 1), targets.flatten()))
    logits = torch.randn(2, 4, 4, 4, generator=generator)
    targets = torch.randint(4, (2, 4, 4), generator=generator)
    of_a_picture = objective.summed(logits, (None, targets)) / objective.count((None, targets))
    torch.testing.assert_close(of_a_picture, loss(logits, targets))
