"""Any Auto class of transformers by a config: each kind trains as its author's own loop."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lockstep.config import Config, config_from
from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.models import check_model
from lockstep.trainer import Trainer, build

transformers = pytest.importorskip("transformers")

VOCAB = 32
LENGTH = 6
SAMPLES = 4
RATE = 0.1
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_BOTH_WAYS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_IMAGE: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    **{k: v for k, v in _TEXT.items() if k not in ("vocab_size", "max_position_embeddings")},
}


def _ids(index: int) -> Tensor:
    return torch.randint(1, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))


def _masked(index: int) -> dict[str, Tensor]:
    labels = _ids(index).clone()
    labels[: index + 1] = -100
    return {"input_ids": _ids(index), "labels": labels}


def _one_label(index: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(index), "labels": torch.tensor(index % 3)}


def _span(index: int) -> dict[str, Tensor]:
    ends = {"start_positions": torch.tensor(index % 3), "end_positions": torch.tensor(4)}
    return {"input_ids": _ids(index), **ends}


def _tokens(index: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(index), "labels": _masked(index)["labels"].remainder(3)}


def _image(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "pixel_values": torch.rand(3, 8, 8, generator=generator),
        "labels": torch.tensor(index % 3),
    }


KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "AutoModelForMaskedLM": ("bert", _TEXT, _masked),
    "AutoModelForSeq2SeqLM": ("t5", _BOTH_WAYS, _masked),
    "AutoModelForSequenceClassification": ("bert", {**_TEXT, "num_labels": 3}, _one_label),
    "AutoModelForTokenClassification": ("bert", {**_TEXT, "num_labels": 3}, _tokens),
    "AutoModelForQuestionAnswering": ("bert", _TEXT, _span),
    "AutoModelForImageClassification": ("vit", {**_IMAGE, "num_labels": 3}, _image),
}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample: dict[str, Tensor] = self.sample(index)
        return sample


def config_of(name: str, **model: Any) -> Config:
    return config_from(
        {
            "model.name": name,
            **{f"model.{key}": value for key, value in model.items()},
            "training.optimizer": "sgd",
            "training.optimizer_args": {"momentum": 0.0},
            "training.weight_decay": 0.0,
            "training.learning_rate": RATE,
            "training.max_steps": 2,
            "training.batch_size": 2,
            "training.global_batch_size": SAMPLES,
            "distributed.strategy": "single",
            "precision.mode": "fp32",
        }
    )


def library(auto: str) -> Any:
    """The library's own object of a kind, and a sample by its number."""
    family, sizes, sample = KINDS[auto]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **sizes)
    return getattr(transformers, auto).from_config(config), sample


@pytest.mark.parametrize("auto", KINDS)
def test_a_folder_trains_as_its_own_class(auto: str, tmp_path: Path) -> None:
    """Named, and by the folder's `architectures`: as its author's loop over the whole batch."""
    theirs, sample = library(auto)
    theirs.save_pretrained(tmp_path)
    name = f"hf:{tmp_path}"
    trainers = []
    for config in (config_of(name, auto=auto), config_of(name)):
        model = build(config, Data(None))
        assert type(model) is type(theirs)
        trainers.append(Trainer(model, config=config))
    found = [[float(r.loss) for r in trainer.steps(Samples(sample))] for trainer in trainers]
    batch = default_collate([sample(index) for index in range(SAMPLES)])
    optimizer = torch.optim.SGD(theirs.parameters(), lr=RATE)
    for step, losses in enumerate(zip(*found, strict=True)):
        loss = theirs.train()(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-5), step


def test_another_head_than_the_folders_is_drawn_and_told(tmp_path: Path) -> None:
    """By the seed of the run; the rest is the folder's."""
    theirs, _ = library("AutoModelForMaskedLM")
    theirs.save_pretrained(tmp_path)
    auto = "AutoModelForSequenceClassification"
    config = config_of(f"hf:{tmp_path}", auto=auto, args={"num_labels": 5})
    with pytest.warns(UserWarning, match=r"no .*classifier.*: drawn at random"):
        model, again = [build(config, Data(None)) for _ in range(2)]
    assert model.classifier.weight.shape == (5, 16)
    for name, value in again.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    layer = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(model.get_parameter(layer), theirs.get_parameter(layer))


def test_a_body_that_the_weights_do_not_fill_is_refused(tmp_path: Path) -> None:
    theirs, _ = library("AutoModelForMaskedLM")
    theirs.save_pretrained(tmp_path)
    auto = "AutoModelForSequenceClassification"
    config = config_of(f"hf:{tmp_path}", auto=auto, args={"num_hidden_layers": 3})
    with pytest.raises(UsageError, match="do not fill 16 of the model's parameters, the first"):
        build(config, Data(None))


def test_values_are_drawn_by_the_seed_where_there_are_no_weights() -> None:
    family, sizes, _ = KINDS["AutoModelForMaskedLM"]
    config = config_of(f"hf:{family}", auto="AutoModelForMaskedLM", args=sizes)
    model = build(config, Data(None))
    again = build(config, Data(None))
    assert type(model).__name__ == "BertForMaskedLM"
    for name, value in again.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("auto", "says"),
    [
        ("AutoModelForMaskLM", r"no Auto class 'AutoModelForMaskLM'; did you mean[\s\S]*CausalLM"),
        ("AutoModelForMaskedLM", r"no AutoModelForMaskedLM of the model type llama[\s\S]*CausalLM"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_anything_is_built(
    auto: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        check_model(config_of("hf:llama", auto=auto).model)


def test_the_keys_are_for_models_of_hugging_face() -> None:
    with pytest.raises(UsageError, match=r"model\.auto is for models of Hugging Face"):
        config_of("transformer", auto="AutoModelForCausalLM")
    with pytest.raises(UsageError, match=r"model\.lora is for models of Hugging Face"):
        config_of("transformer", lora={"r": 4})


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    described = {
        "model_type": "llama",
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    check = partial(check_model, config_of(f"hf:{tmp_path}", lora={}).model)
    with pytest.raises(UsageError, match=r"quantized in 4 bits \(bitsandbytes\)[\s\S]*dequantize"):
        check()
