"""What was trained of a model of Hugging Face, as a folder: transformers gives the same bits."""

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoint import commands, convert, export_hugging_face
from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.models import build_model, hf_folder
from lockstep.trainer import Trainer, build
from tests.models.test_hf_auto import KINDS, Samples, config_of, library
from tests.parity.adapted import LORA, trainer_of, write_base
from tests.parity.toy import Tokens
from tests.sampled import quick_and_full

transformers = pytest.importorskip("transformers")

# One with tied weights, one of fused and transposed ones, one whose halves of layers are fused, and
# mixtures, whose experts are stacked in memory and apart on disk.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "phi3": {},
    "mixtral": {},
    "qwen3_moe": {},
}
ADAPTED: dict[str, dict[str, Any]] = {
    "llama": LORA,
    "gpt2": {
        "r": 4,
        "target_modules": ["c_attn", "c_fc"],
        "bias": "all",
        "use_dora": True,
        "use_rslora": True,
    },
}
TOKENIZER = '{"version": "1.0", "model": {"type": "WordLevel"}}'


def base_of(folder: Path, family: str = "llama") -> str:
    """A tiny model with what stands beside one: a tokenizer and settings of generation."""
    changes = FAMILIES[family]
    if family == "gpt2":
        changes = {**changes, "attention_dropout": 0.0}
    name = write_base(folder, family, **changes)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "top_k": 7}))
    return name


def trained(name: str, folder: Path, **changes: Any) -> tuple[Any, Path]:
    """The model after a step, and its checkpoint."""
    trainer = trainer_of(name, "single", {"model.lora": None, **changes})
    next(iter(trainer.steps(Tokens())))
    return trainer.placed.root, trainer.save_checkpoint(folder / "step-00000001")


def logits(model: Any, plain: bool = True) -> torch.Tensor:
    ids = torch.stack([Tokens()[index]["input_ids"] for index in range(3)])
    with torch.no_grad():
        found = model.eval()(ids, use_cache=False) if plain else model.eval()(ids)
    values: torch.Tensor = found.logits if plain else found
    return values


@pytest.mark.parametrize("family", quick_and_full(FAMILIES, ["gpt2", "mixtral"]))
def test_plain_transformers_computes_the_same_bits(family: str, tmp_path: Path) -> None:
    """As with the trained tensors in the library's own object. Both are copies: the bits of a
    product may depend on where in memory its factors begin, for tensors of a file anywhere.
    """
    name = base_of(tmp_path / "base", family)
    model, saved = trained(name, tmp_path)
    export_hugging_face(saved, tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected.load_state_dict(model.state_dict())
    assert torch.equal(logits(copy.deepcopy(plain)), logits(copy.deepcopy(expected)))
    torch.testing.assert_close(logits(plain), logits(model, plain=False), rtol=1e-5, atol=1e-5)
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.equal(logits(plain), logits(before))
    assert plain.generation_config.top_k == 7  # which the library reads, and refuses to write
    assert (tmp_path / "out/tokenizer.json").read_text() == TOKENIZER


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_folder_goes_in_and_out_unchanged(family: str, tmp_path: Path) -> None:
    """In files with an index, and in again; tied weights are in one of them."""
    name = base_of(tmp_path / "base", family)
    trainer = trainer_of(name, "single", {"model.lora": None})
    saved = trainer.save_checkpoint(tmp_path / "step-00000000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_folder, "_SHARD", "4KB")
        said = commands.run("export", saved, to="huggingface", output=tmp_path / "out")
    assert said.endswith(f"→ {tmp_path / 'out'}")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert "model.embed_tokens.weight" in index["weight_map"]
    assert ("lm_head.weight" in index["weight_map"]) == (family != "llama")
    for file in {*index["weight_map"].values()}:
        there = load_file(tmp_path / "out" / file)
        assert {*there} == {key for key, of in index["weight_map"].items() if of == file}
    before = build_model(config_of(name).model).state_dict()
    after = build_model(config_of(f"hf:{tmp_path / 'out'}").model).state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


@pytest.mark.parametrize(
    "family",
    quick_and_full(["llama", "qwen3_moe", "phi3", "adapted"], ["qwen3_moe", "phi3", "adapted"]),
)
def test_one_tensor_is_in_memory_at_a_time(family: str, tmp_path: Path) -> None:
    """Those of a layer, where adapters are merged: the base's weight and the adapters on it."""
    if family == "adapted":
        pytest.importorskip("peft")
        name = base_of(tmp_path / "base")
        _, saved = trained(name, tmp_path, **{"model.lora": LORA})
    else:
        _, saved = trained(base_of(tmp_path / "base", family), tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []
    sizes: list[int] = []
    most = 0
    unread = hf_folder.UnreadWeights

    def counted(forms: Any, read: Any) -> Any:
        def counts(of: str) -> torch.Tensor:
            nonlocal most
            value: torch.Tensor = read(of)
            alive.append(weakref.ref(value))
            held = [tensor for each in alive if (tensor := each()) is not None]
            sizes.append(value.nbytes)
            most = max(most, sum(tensor.nbytes for tensor in held))
            return value

        return unread(forms, counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "UnreadWeights", counted)
        export_hugging_face(saved, tmp_path / "out")
    state = load_file(tmp_path / "out/model.safetensors")
    written = sum(tensor.nbytes for tensor in state.values())
    assert sum(sizes) >= written  # a tied weight is read once
    assert len(sizes) > 5
    assert most <= (2.5 if family == "adapted" else 2) * max(sizes) < written / 2


def test_another_class_is_written_as_itself(tmp_path: Path) -> None:
    """With the number of its labels."""
    theirs, sample = library("AutoModelForSequenceClassification")
    theirs.save_pretrained(tmp_path / "base")
    config = config_of(f"hf:{tmp_path / 'base'}")
    trainer = Trainer(build(config, Data(None)), config=config)
    next(iter(trainer.steps(Samples(sample))))
    saved = trainer.save_checkpoint(tmp_path / "step-00000001")
    _, lines = export_hugging_face(saved, tmp_path / "out")
    assert lines == [f"no tokenizer: there is none in {tmp_path / 'base'}"]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    state = trainer.placed.root.state_dict()
    assert plain.config.num_labels == KINDS["AutoModelForSequenceClassification"][1]["num_labels"]
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_are_written_as_peft_does_and_merged(family: str, tmp_path: Path) -> None:
    """Plain peft loads the adapters onto the base, plain transformers what is merged."""
    peft = pytest.importorskip("peft")
    name = base_of(tmp_path / "base", family)
    model, saved = trained(name, tmp_path, **{"model.lora": ADAPTED[family]})
    expected = logits(model, plain=False)
    commands.run("export", saved, to="adapter", output=tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.allclose(logits(base), expected, atol=1e-4)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-6, atol=1e-6)
    commands.run("export", saved, to="huggingface", output=tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    assert not any("lora" in key for key in merged.state_dict())


def test_what_can_not_be_written_is_refused(tmp_path: Path) -> None:
    """And nothing is left behind."""
    model, saved = trained(base_of(tmp_path / "base"), tmp_path)
    with pytest.raises(UsageError, match="the model has no adapters"):
        export_hugging_face(saved, tmp_path / "out", adapter=True)
    with pytest.raises(UsageError, match="base exists already"):
        export_hugging_face(saved, tmp_path / "base")
    with pytest.raises(UsageError, match="there is no form 'onnx' to export to"):
        commands.run("export", saved, to="onnx")
    described = hf_folder.description_of(model)
    assert described is not None
    other = hf_folder.UnreadWeights({"other": torch.ones(1, device="meta")}, torch.ones)
    with pytest.raises(UsageError, match="the tensors are not those of a LlamaForCausalLM"):
        hf_folder.write_folder(described, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert hf_folder.description_of(torch.nn.Linear(2, 2)) is None


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(torch.nn.Linear(2, 2), loss_fn=torch.nn.MSELoss(), batch_size=2)
    saved = trainer.save_checkpoint(tmp_path / "step-00000000")
    with pytest.raises(UsageError, match="does not say that its model is one of transformers"):
        export_hugging_face(saved, tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        pytest.param({"target_modules": ["lm_head", "q_proj"]}, marks=pytest.mark.full),
        pytest.param({"modules_to_save": ["embed_tokens"]}, marks=pytest.mark.full),
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_embeddings_that_adapters_untie_are_written_apart(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """In a folder that ties them, the values of one would stand for both."""
    peft = pytest.importorskip("peft")
    name = base_of(tmp_path / "base")
    model, saved = trained(name, tmp_path, **{"model.lora": {**LORA, **changes}})
    expected = logits(model, plain=False)
    kind = transformers.AutoModelForCausalLM
    export_hugging_face(saved, tmp_path / "merged")
    assert not json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    torch.testing.assert_close(logits(kind.from_pretrained(tmp_path / "merged")), expected)
    export_hugging_face(saved, tmp_path / "adapter", adapter=True)
    base = kind.from_pretrained(tmp_path / "base")
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(wrapped), expected)
